"""The operator `paged_attn::append_and_attend`: `flash_attn_with_kvcache` in one call on a GPU.

It is internal and no part of the public contract: `flash_attn_with_kvcache` uses it for the calls
of a decoding loop. It does the work of `append_slots`, `reshape_and_cache` and `flash_varlen`,
because three ways through the dispatcher would take longer on the host than the kernels take on the
GPU. It runs their checks before anything is written, so that an error names one of these operators.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.ops._library import LIBRARY
from torch_paged_attn.ops.append_slots import check as check_append_slots
from torch_paged_attn.ops.backend import serving
from torch_paged_attn.ops.checks import check_dim, fail, refuse
from torch_paged_attn.ops.flash_varlen import check as check_flash_varlen
from torch_paged_attn.ops.repeated import REPEATED, Repeated, repeat
from torch_paged_attn.ops.reshape_and_cache import check_split

OP = "append_and_attend"
# the most new tokens of a call, all sequences together
MOST_TOKENS = 1024


class Parts(NamedTuple):
    """The arguments that `reshape_and_cache` and `flash_varlen` would get, as views. For checks
    only: cu_seqlens_q and seqused_k have the right shape and dtype, but no values.
    """

    q: Tensor  # (batch * seqlen_q, num_heads, head_dim)
    key: Tensor  # (batch * seqlen_new, num_kv_heads, head_dim)
    value: Tensor
    k_cache: Tensor  # (num_pages, num_kv_heads, page_size, head_dim)
    v_cache: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor


def parts_of(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, cache_seqlens: Tensor
) -> Parts:
    """The views, or ValueError for shapes and strides that allow none."""
    new = "(batch, seqlen_new, num_kv_heads, head_dim)"
    pages = "(num_pages, page_size, num_kv_heads, head_dim)"
    shapes = ("(batch, seqlen_q, num_heads, head_dim)", pages, pages, new, new, "(batch)")
    tensors = q, k_cache, v_cache, k, v, cache_seqlens
    names = "q", "k_cache", "v_cache", "k", "v", "cache_seqlens"
    for name, x, shape in zip(names, tensors, shapes, strict=True):
        check_dim(OP, name, x, shape)
    batch = cache_seqlens.shape[0]
    rows: list[Tensor] = []
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.shape[0] != batch:
            fail(OP, f"{name}.shape[0]", x.shape[0], f"{batch}, as cache_seqlens")
        rows.append(x.flatten(0, 1))
        if rows[-1].data_ptr() != x.data_ptr():
            fail(OP, name, f"strides {x.stride()}", "contiguous over batch and sequence")
    q_rows, key, value = rows
    return Parts(
        q_rows,
        key,
        value,
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        cu_seqlens_q=cache_seqlens.new_empty(batch + 1),
        seqused_k=cache_seqlens.new_empty(batch),
    )


def check(
    parts: Parts,
    cache_seqlens: Tensor,
    block_table: Tensor,
    sinks: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    **options: Any,
) -> None:
    """Raise for metadata that the kernels do not support."""
    num_tokens, page_size = parts.key.shape[0], parts.k_cache.shape[2]
    if not 0 < num_tokens <= MOST_TOKENS or 0 in (*parts.q.shape, *parts.k_cache.shape):
        fail(OP, "tokens of k", num_tokens, f"from 1 to {MOST_TOKENS}, and no tensor empty")
    if parts.q.dtype.itemsize == 1:
        fail(OP, "q", parts.q.dtype, "a dtype that out may have")
    check_append_slots(cache_seqlens, block_table, None, page_size, num_tokens)
    is_stored = parts.k_cache.dtype.itemsize == 1
    scales = (k_descale, v_descale) if is_stored else (None, None)
    slots = cache_seqlens.new_empty(num_tokens)
    check_split(parts.key, parts.value, parts.k_cache, parts.v_cache, slots, *scales)
    check_flash_varlen(
        parts.q,
        parts.k_cache,
        parts.v_cache,
        parts.cu_seqlens_q,
        seqused_k=parts.seqused_k,
        block_table=block_table,
        sinks=sinks,
        k_descale=k_descale,
        v_descale=v_descale,
        **options,
    )


def fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """What the operator returns, in shape and dtype."""
    batch, seqlen_q, num_heads, _ = q.shape
    out = q.new_empty((batch * seqlen_q, num_heads, v_cache.shape[3]))
    return out, q.new_empty((num_heads, batch * seqlen_q), dtype=torch.float32)


@functools.cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    backend, reason = serving("CUDA")
    if backend is None:
        refuse(OP, reason)
    if (again := backend.repeated(OP)) is not None:
        REPEATED[OP] = Repeated(torch.ops.paged_attn.append_and_attend.default, again, _bump)
    return backend.function(OP)


def _bump(args: tuple[Any, ...]) -> None:
    """Tell autograd that the caches change."""
    written = [x for x in args[1:3] if not x.is_inference()]
    if written:
        torch.autograd.graph.increment_version(written)


def _on_gpu(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    _bump(args)
    return _kernel()(*args, **options)


LIBRARY.define(
    f"{OP}(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v,"
    " Tensor cache_seqlens, Tensor block_table, Tensor? sinks=None, Tensor? k_descale=None,"
    " Tensor? v_descale=None, *, float? softmax_scale=None, bool causal=False,"
    " int window_size_left=-1, int window_size_right=-1, float softcap=0.0)"
    " -> (Tensor out, Tensor softmax_lse)"
)
torch.library.register_fake(f"paged_attn::{OP}", fake, lib=LIBRARY)
LIBRARY.impl(OP, _on_gpu, "CUDA")
# its caller has checked that no input requires grad
LIBRARY.impl(OP, torch.library.fallthrough_kernel, "Autograd")


def append_and_attend(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """The operator. Its caller has checked that all tensors are on a GPU, plain and without
    gradients, and that autocast is off.
    """
    if (results := repeat(OP, args, options)) is not NotImplemented:
        return results
    return torch.ops.paged_attn.append_and_attend.default(*args, **options)
