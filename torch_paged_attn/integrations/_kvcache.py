"""Steps of `flash_attn_with_kvcache` before attention: block tables, new tokens, rotary embedding.

All of it runs on the device: the host of an accelerator reads no tensor values.
"""

import numbers
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations import _kvcache_checks as checks
from torch_paged_attn.integrations._storages import with_whole_rows
from torch_paged_attn.ops import flash_varlen
from torch_paged_attn.ops.accepted import as_int32
from torch_paged_attn.ops.append_and_attend import OP as APPEND
from torch_paged_attn.ops.append_and_attend import append_and_attend
from torch_paged_attn.ops.attend_cache import OP as ATTEND
from torch_paged_attn.ops.attend_cache import attend_cache
from torch_paged_attn.ops.checks import refuse
from torch_paged_attn.ops.repeated import repeat

# operators that a GPU alone has, which take less host time than the calls that they stand for, by
# name; and how many tensors they need, the last of which are the lengths
APPENDING = APPEND, append_and_attend, 6
ATTENDING = ATTEND, attend_cache, 4


def in_one_call(
    operator: tuple[str, Any, int], args: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Tensor, Tensor] | None:
    """`out`, of q's shape but v's head_dim, and `softmax_lse` `(num_heads, total_q)`, by APPENDING
    for a call with new tokens, or ATTENDING. None for calls that it does not support, see
    `_has_one_call`.

    args, options: the operator's arguments by position, tensors and None, and by name
    """
    name, function, needed = operator
    if (results := repeat(name, args, options)) is not NotImplemented:
        return results
    if not is_on_gpu(args[0]) or not _has_one_call(args, needed):
        return None
    if args[needed - 1].dtype is not torch.int32:
        return None
    try:
        return function(*args, **options)
    except (ValueError, NotImplementedError):
        return None  # nothing has been written: the general code runs the call, or raises


def _has_one_call(tensors: tuple[Any, ...], needed: int) -> bool:
    """Whether an operator that a GPU alone has may take these tensors, the first of which is on
    one, and of which the first are `needed`: in eager calls without gradients, outside autocast.
    """
    if torch.compiler.is_compiling():
        return False
    # loops, because generators take as long as all else here
    for i, x in enumerate(tensors):
        if (x is not None or i < needed) and (type(x) is not Tensor or x.is_neg()):
            return False
    if environment.CHECK or torch.is_autocast_enabled("cuda"):
        return False
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return False
    return True


def is_on_gpu(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def attend_only(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | int | None,
    table: Tensor | None,
    cu_seqlens_q: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    **options: Any,
) -> tuple[Tensor, Tensor] | None:
    """The same of a call without new tokens: one call of `flash_varlen`, with views of the
    arguments. None for calls in a graph and those that `flash_varlen` refuses: the general
    code runs them, or raises in the words of `flash_attn_with_kvcache`.

    options: keyword arguments of `flash_varlen`; tensors among them may be None
    """
    tensors = q, k_cache, v_cache
    if torch.compiler.is_compiling() or any([type(x) is not Tensor for x in tensors]):
        return None
    if k_cache.dim() != 4 or v_cache.dim() != 4 or q.dim() != (4 if cu_seqlens_q is None else 3):
        return None
    if q.stride(-1) != 1 or q.dtype.itemsize == 1:
        return None
    shape = q.shape[:-1]
    if cu_seqlens_q is None:
        batch, max_seqlen_q = shape[:2]
        cu_seqlens_q, q = _constants.multiples(max_seqlen_q, batch, q), q.flatten(0, 1)
    else:
        batch = cu_seqlens_q.shape[0] - 1
        max_seqlen_q = None if isinstance(max_seqlen_q, Tensor) else max_seqlen_q
    if table is None:
        if k_cache.shape[0] != batch:
            return None
        table = _constants.row_numbers(batch, k_cache)
    capacity = table.shape[-1] * k_cache.shape[1]
    if not isinstance(cache_seqlens, Tensor):
        cache_seqlens = lengths_of(capacity if cache_seqlens is None else cache_seqlens, batch, q)
    options = {name: x for name, x in options.items() if x is not None}
    k, v = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    lengths = cu_seqlens_q, None, max_seqlen_q, capacity, cache_seqlens, table
    try:
        out, lse = flash_varlen(q, k, v, *lengths, **options)
        return out.view(*shape, out.shape[-1]), lse
    except (TypeError, ValueError, IndexError, RuntimeError):
        return None  # nothing has been written


def end_to_end(x: Tensor) -> bool:
    """Whether x (batch, seqlen, ...) can be viewed as (batch * seqlen, ...)."""
    if min(x.shape[:2]) <= 1 or x.numel() == 0:
        return True  # the stride of a dimension of 1 means nothing
    return x.stride(0) == x.shape[1] * x.stride(1)


def pages_of(
    k_cache: Tensor,
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
    batch: int,
    may_read: bool,
) -> Tensor:
    """The block table of a call. In a cache without pages, each row of the cache is a page."""
    if block_table is not None:
        if cache_batch_idx is not None:
            refuse(checks.OP, "cache_batch_idx is not supported with block_table")
        block_table = as_int32(checks.OP, "block_table", block_table)
        checks.check_per_sequence("block_table", block_table, batch, "(batch, max_pages)")
        return block_table
    if cache_batch_idx is not None:
        cache_batch_idx = as_int32(checks.OP, "cache_batch_idx", cache_batch_idx)
        checks.check_per_sequence("cache_batch_idx", cache_batch_idx, batch, "(batch,)")
        if may_read:
            checks.check_batch_idx(cache_batch_idx, k_cache.shape[0])
        return cache_batch_idx[:, None]
    if k_cache.shape[0] != batch:
        expected = f"{batch}, a row for each sequence, or cache_batch_idx or block_table given"
        checks.fail("k_cache.shape[0]", k_cache.shape[0], expected)
    return _constants.row_numbers(batch, k_cache)


def lengths_of(cache_seqlens: Tensor | int, batch: int, like: Tensor) -> Tensor:
    """cache_seqlens as int32 (batch,)."""
    if isinstance(cache_seqlens, int | numbers.Integral):
        value = max(min(int(cache_seqlens), 2**31 - 1), -(2**31))
        return _constants.repeated(value, batch, like)
    lengths = as_int32(checks.OP, "cache_seqlens", cache_seqlens)
    checks.check_per_sequence("cache_seqlens", lengths, batch, "(batch,)")
    return lengths


class NewTokens(NamedTuple):
    """The new tokens of all sequences, packed.

    k, v: (total, num_kv_heads, head_dim)
    cu_seqlens: (batch + 1,), where each sequence's tokens start; None if all have the same number
    each: this number; 0 with cu_seqlens
    """

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor | None
    each: int

    def lengths(self) -> int | Tensor:
        """The number of new tokens of each sequence: (batch,), or one number for all."""
        return self.each if self.cu_seqlens is None else self.cu_seqlens.diff()


def new_tokens(
    k: Tensor, v: Tensor, cu_seqlens_k_new: Tensor | None, batch: int, may_read: bool
) -> NewTokens:
    """k and v as packed rows, after checks. `may_read`: whether their values may be read."""
    if cu_seqlens_k_new is None:
        if k.dim() != 4 or k.shape[0] != batch or v.shape[:2] != k.shape[:2]:
            raise ValueError(
                f"{checks.OP}: k and v must be (batch, seqlen_new, num_kv_heads, head_dim) with "
                f"batch {batch}, got shapes {tuple(k.shape)} and {tuple(v.shape)}"
            )
        k, v = with_whole_rows(checks.OP, "k", k), with_whole_rows(checks.OP, "v", v)
        return NewTokens(k.flatten(0, 1), v.flatten(0, 1), None, k.shape[1])
    cu_seqlens_k_new = as_int32(checks.OP, "cu_seqlens_k_new", cu_seqlens_k_new)
    checks.check_per_sequence("cu_seqlens_k_new", cu_seqlens_k_new, batch + 1, "(batch + 1,)")
    for name, x in (("k", k), ("v", v)):
        checks.check_tensor(name, x, "(total_new, num_kv_heads, head_dim)")
    if may_read:
        checks.check_bounds("cu_seqlens_k_new", cu_seqlens_k_new, k.shape[0], "total_new")
    k, v = with_whole_rows(checks.OP, "k", k), with_whole_rows(checks.OP, "v", v)
    return NewTokens(k, v, cu_seqlens_k_new, 0)


def behind_leftpad(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cache_leftpad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The caches with page_size 1, and a block table that starts after each sequence's padding."""
    num_slots, page_size = k_cache.shape[0] * k_cache.shape[1], k_cache.shape[1]
    if not (end_to_end(k_cache) and end_to_end(v_cache)) or num_slots >= 2**31:
        raise NotImplementedError(
            f"{checks.OP}: cache_leftpad is offered only for caches of fewer than 2^31 slots whose "
            f"rows lie end to end, got k_cache of shape {tuple(k_cache.shape)}, "
            f"strides {k_cache.stride()}"
        )
    slot = _constants.count(block_table.shape[1] * page_size, k_cache)
    # entries past the end are also past every sequence's length, so they are never used
    slot = (slot + cache_leftpad[:, None]).clamp(max=max(len(slot) - 1, 0))
    table = block_table.gather(1, slot // page_size) * page_size + (slot % page_size).int()
    return k_cache.flatten(0, 1)[:, None], v_cache.flatten(0, 1)[:, None], table


def rotate(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of the first 2 * cos.shape[1] elements of each head.

    x: (total, heads, head_dim); position: total integers, in any shape
    cos, sin: (positions, rotary_dim / 2)
    interleaved: pairs are neighbours (GPT-J); otherwise the two halves (GPT-NeoX)
    """
    rotary_dim = 2 * cos.shape[1]
    # padding has invalid positions; its results are not used
    row = position.flatten().clamp(0, cos.shape[0] - 1)
    cos, sin = cos[row][:, None].float(), sin[row][:, None].float()
    turned = x[..., :rotary_dim].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pairs = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)
