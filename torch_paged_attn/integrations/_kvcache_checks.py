"""Checks of `flash_attn_with_kvcache`, all of which run before the cache is written to.

Shapes and dtypes are checked on every device. Values are read on a CPU, and on an accelerator only
under `PAGED_ATTN_CHECK=1`; a compiled graph reads none.
"""

import itertools
from typing import Any, NoReturn

import torch
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.ops import checks
from torch_paged_attn.ops.accepted import as_accepted, operator_of
from torch_paged_attn.ops.flash_varlen import check, check_values

OP = "flash_attn_with_kvcache"
OPERATOR = operator_of(torch.ops.paged_attn.flash_varlen.default)
INT32 = (torch.int32,)
# shape as errors spell it -> number of dimensions
DIMS = {
    "(batch,)": 1,
    "(batch + 1,)": 1,
    "(batch, max_pages)": 2,
    "(total_new, num_kv_heads, head_dim)": 3,
    "(pages, page_size, num_kv_heads, head_dim)": 4,
}


def fail(
    argument: str, got: object, expected: str, error: type[Exception] = ValueError
) -> NoReturn:
    checks.fail(OP, argument, got, expected, error)


def check_tensor(name: str, x: Any, shape: str, dtypes: tuple[torch.dtype, ...] = ()) -> None:
    """Raise unless x is a tensor with the number of dimensions of `shape` (a key of DIMS) and, if
    `dtypes` is not empty, with one of these dtypes.
    """
    if not isinstance(x, Tensor):
        fail(name, f"a {type(x).__name__}", f"a tensor {shape}", TypeError)
    if x.dim() != DIMS[shape]:
        fail(name, f"shape {tuple(x.shape)}", shape)
    if dtypes:
        checks.check_dtype(OP, name, x, dtypes)


def check_per_sequence(
    name: str, x: Tensor, size: int, shape: str, dtypes: tuple[torch.dtype, ...] = INT32
) -> None:
    check_tensor(name, x, shape, dtypes)
    if x.shape[0] != size:
        fail(name, f"shape {tuple(x.shape)}", f"{shape} with a first dimension of {size}")


def check_cu_seqlens_q(cu_seqlens_q: Tensor) -> None:
    check_tensor("cu_seqlens_q", cu_seqlens_q, "(batch + 1,)", INT32)
    if cu_seqlens_q.shape[0] == 0:
        fail("cu_seqlens_q", "no entries", "(batch + 1,) entries, the first of them 0")


def check_descale(name: str, scale: Tensor | None) -> None:
    if scale is not None and scale.dim() > 1:
        checks.refuse(
            OP,
            f"{name} of shape (batch, num_kv_heads) with k and v is not supported",
            "pass one of shape () or (num_kv_heads,)",
        )


def check_batch_idx(cache_batch_idx: Tensor, cache_batch: int) -> None:
    for b, row in enumerate(cache_batch_idx.tolist()):
        if not 0 <= row < cache_batch:
            expected = f"a row of k_cache, from 0 to {cache_batch - 1}"
            fail(f"cache_batch_idx[{b}]", row, expected, IndexError)


def check_leftpad(cache_leftpad: Tensor, cache_seqlens: Tensor) -> None:
    pairs = zip(cache_leftpad.tolist(), cache_seqlens.tolist(), strict=True)
    for b, (leftpad, length) in enumerate(pairs):
        if leftpad < 0 or 0 <= length < leftpad:
            fail(f"cache_leftpad[{b}]", leftpad, f"from 0 to cache_seqlens[{b}] = {length}")


def check_bounds(name: str, bounds: Tensor, total: int, total_name: str) -> None:
    """Raise unless `bounds` start at 0, never decrease, and end at `total` or less."""
    values = bounds.tolist()
    if values[0] != 0:
        fail(f"{name}[0]", values[0], "0")
    for i, (before, after) in enumerate(itertools.pairwise(values), start=1):
        if after < before:
            fail(f"{name}[{i}]", after, f"at least the entry before it, {before}")
    if values[-1] > total:
        fail(f"{name}[-1]", values[-1], f"at most {total_name} = {total}")


def check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Raise for a cache that `flash_varlen` would refuse by other names."""
    dtypes = tuple(dict.fromkeys((q.dtype, *checks.QUANTISED)))
    shape = "(pages, page_size, num_kv_heads, head_dim)"
    check_tensor("k_cache", k_cache, shape, dtypes)
    check_tensor("v_cache", v_cache, shape, (k_cache.dtype,))
    if k_cache.dtype is not torch.uint8 and k_cache.shape[3] != q.shape[-1]:  # else int4
        fail("k_cache.shape[3]", k_cache.shape[3], f"q's head_dim, {q.shape[-1]}")
    if v_cache.shape[:3] != k_cache.shape[:3]:
        expected = f"{tuple(k_cache.shape[:3])} + (head_dim_v,), as k_cache"
        fail("v_cache", f"shape {tuple(v_cache.shape)}", expected)
    if 0 in k_cache.shape[1:]:
        fail("k_cache", f"shape {tuple(k_cache.shape)}", "at least 1 from its second dimension on")


def check_room(
    cache_seqlens: Tensor, new: int | Tensor | None, capacity: int, has_table: bool
) -> None:
    """Raise RuntimeError if a sequence is longer than the cache has room for, with its new tokens.

    new: their number, of each sequence or of all; None without k and v, where a negative length
        raises ValueError: it is no row of padding
    """
    lengths = cache_seqlens.tolist()
    counts = new.tolist() if isinstance(new, Tensor) else [new or 0] * len(lengths)
    room = f"{capacity}, the room of {'block_table' if has_table else 'a row of k_cache'}"
    for b, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        if length < 0 and new is None:
            fail(f"cache_seqlens[{b}]", length, f"from 0 to {room}")
        if length >= 0 and length + count > capacity:
            plus = "" if new is None else " plus the new tokens"
            expected = f"at most {room}"
            fail(f"cache_seqlens[{b}]{plus}", length + count, expected, RuntimeError)


def check_gradients(arguments: dict[str, Any]) -> None:
    """Raise NotImplementedError if an argument requires grad: `flash_varlen` would do so only after
    the cache has been written to.
    """
    if not torch.is_grad_enabled():
        return
    for name, x in arguments.items():
        if isinstance(x, Tensor) and x.requires_grad:
            problem = f"no gradient through a KV cache, and {name} requires grad"
            checks.refuse(OP, problem, "call under torch.no_grad()")


def check_attention(arguments: dict[str, Any]) -> None:
    """Run the checks of `flash_varlen`, which would otherwise run after the cache has been written
    to.
    """
    _, arguments = as_accepted(OPERATOR, (), arguments)
    check(**arguments)
    # of values, which hints are not
    call = {name: x for name, x in arguments.items() if not name.startswith("max_seqlen")}
    k, table = call["k"], call["block_table"]
    first_keys = _constants.multiples(k.shape[2], table.shape[1], table)[:-1]
    used = first_keys < call["seqused_k"][:, None]
    outside = table.clamp(0, k.shape[0] - 1) != table
    bounds = call["cu_seqlens_q"].tolist()
    rising = bounds == sorted(bounds) and bounds[0] == 0 and bounds[-1] <= call["q"].shape[0]
    # check_values is slow; it runs only if something is wrong, to raise the right message
    if not rising or bool((used & outside).any()):
        check_values(**call)
