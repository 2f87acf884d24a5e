"""The operator `paged_attn::append_and_attend`: `flash_attn_with_kvcache` in one call on a GPU.

It is internal and no part of the public contract: `flash_attn_with_kvcache` uses it for the calls
of a decoding loop. It does the work of `append_slots`, a rotary embedding, `reshape_and_cache` and
`flash_varlen`, because as many ways through the dispatcher would take longer on the host than the
kernels take on the GPU. It runs their checks before anything is written, so that an error names one
of these operators.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import numbers_of
from torch_paged_attn.ops._gradients import increment_versions
from torch_paged_attn.ops._library import LIBRARY
from torch_paged_attn.ops.append_slots import check as check_append_slots
from torch_paged_attn.ops.backend import serving
from torch_paged_attn.ops.checks import (
    check_devices,
    check_dim,
    check_dtype,
    fail,
    names,
    refuse,
)
from torch_paged_attn.ops.flash_varlen import check as check_flash_varlen
from torch_paged_attn.ops.repeated import remember
from torch_paged_attn.ops.reshape_and_cache import check_split

OP = "append_and_attend"
# the places of the caches
WRITTEN = 1, 2
# dtypes of the tables of a rotary embedding
OF_ROTARY = torch.float32, torch.float16, torch.bfloat16


class Parts(NamedTuple):
    """The arguments that `append_slots`, `reshape_and_cache` and `flash_varlen` would get, as
    views. For checks only: seqused_k has the right shape and dtype, but no values, and so has
    cu_seqlens_q if it is not given.
    """

    q: Tensor  # (total_q, num_heads, head_dim)
    key: Tensor  # (total_new, num_kv_heads, head_dim)
    value: Tensor
    k_cache: Tensor  # (num_pages, num_kv_heads, page_size, head_dim)
    v_cache: Tensor
    cu_seqlens_q: Tensor
    seqused_k: Tensor
    cu_seqlens_k_new: Tensor | None

    @property
    def batch(self) -> int:
        return self.seqused_k.shape[0]


def parts_of(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
) -> Parts:
    """The views, or ValueError for shapes and strides that allow none."""
    pages = "(num_pages, page_size, num_kv_heads, head_dim)"
    check_dim(OP, "cache_seqlens", cache_seqlens, "(batch)")
    check_dim(OP, "k_cache", k_cache, pages)
    check_dim(OP, "v_cache", v_cache, pages)
    batch = cache_seqlens.shape[0]
    return Parts(
        _rows_of("q", q, batch, cu_seqlens_q),
        _rows_of("k", k, batch, cu_seqlens_k_new),
        _rows_of("v", v, batch, cu_seqlens_k_new),
        k_cache.transpose(1, 2),
        v_cache.transpose(1, 2),
        cache_seqlens.new_empty(batch + 1) if cu_seqlens_q is None else cu_seqlens_q,
        cache_seqlens.new_empty(batch),
        cu_seqlens_k_new,
    )


def _rows_of(name: str, x: Tensor, batch: int, cu_seqlens: Tensor | None) -> Tensor:
    """q, k or v as rows (tokens, heads, head_dim)."""
    if cu_seqlens is not None:
        check_dim(OP, name, x, "(total, heads, head_dim)")
        return x
    check_dim(OP, name, x, "(batch, seqlen, heads, head_dim)")
    if x.shape[0] != batch:
        fail(OP, f"{name}.shape[0]", x.shape[0], f"{batch}, as cache_seqlens")
    rows = x.flatten(0, 1)
    if rows.data_ptr() != x.data_ptr():
        fail(OP, name, f"strides {x.stride()}", "contiguous over batch and sequence")
    return rows


def check_rows(parts: Parts) -> None:
    """Raise unless a cache without a block table has a row for each sequence."""
    if parts.k_cache.shape[0] != parts.batch:
        expected = f"{parts.batch}, a row for each sequence, or block_table given"
        fail(OP, "k_cache.shape[0]", parts.k_cache.shape[0], expected)


def check_rotary(op: str, cos: Tensor, sin: Tensor, capacity: int, head_dim: int) -> None:
    """Raise unless the tables of a rotary embedding have a row for each slot of a sequence.

    Args:
        op: whose call it is
        capacity: the most tokens of a sequence
    """
    shape = "(positions, rotary_dim / 2)"
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        check_dim(op, name, x, shape)
        if not x.dtype.is_floating_point:
            fail(op, name, names((x.dtype,)), "of a floating-point dtype")
    if sin.shape != cos.shape:
        fail(op, "rotary_sin", f"shape {tuple(sin.shape)}", f"{tuple(cos.shape)}, as rotary_cos")
    if cos.shape[0] < capacity:
        expected = f"at least the {capacity} positions of the cache"
        fail(op, "rotary_cos.shape[0]", cos.shape[0], expected)
    if 2 * cos.shape[1] > head_dim:
        expected = f"rotary_dim / 2, at most half of head_dim = {head_dim}"
        fail(op, "rotary_cos.shape[1]", cos.shape[1], expected)


def check(
    parts: Parts,
    cache_seqlens: Tensor,
    block_table: Tensor,
    sinks: Tensor | None,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    **options: Any,
) -> None:
    """Raise for metadata that the kernels do not support."""
    num_tokens, page_size = parts.key.shape[0], parts.k_cache.shape[2]
    if not num_tokens or 0 in (*parts.q.shape, *parts.k_cache.shape):
        fail(OP, "tokens of k", num_tokens, "at least 1, and no tensor empty")
    if parts.q.dtype.itemsize == 1:
        fail(OP, "q", parts.q.dtype, "a dtype that out may have")
    check_append_slots(cache_seqlens, block_table, parts.cu_seqlens_k_new, page_size, num_tokens)
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
    if rotary_cos is None and rotary_sin is None:
        return
    if rotary_cos is None or rotary_sin is None:
        fail(OP, "rotary_cos and rotary_sin", "one of them", "both or none")
    capacity, head_dim = block_table.shape[1] * page_size, parts.q.shape[2]
    check_rotary(OP, rotary_cos, rotary_sin, capacity, head_dim)
    check_dtype(OP, "rotary_cos", rotary_cos, OF_ROTARY)
    check_dtype(OP, "rotary_sin", rotary_sin, (rotary_cos.dtype,))
    check_devices(OP, parts.q.device, {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin})
    for name, x in (("rotary_cos", rotary_cos), ("rotary_sin", rotary_sin), ("q", parts.q)):
        if x.stride(-1) != 1:
            fail(OP, name, f"strides {x.stride()}", "contiguous rows")


def fake(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *args: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    """What the operator returns, in shape and dtype."""
    total, num_heads = q.shape[:-2].numel(), q.shape[-2]
    out = q.new_empty((*q.shape[:-1], numbers_of(v_cache)))
    return out, q.new_empty((num_heads, total), dtype=torch.float32)


@functools.cache
def _kernel() -> Callable[..., tuple[Tensor, Tensor]]:
    backend, reason = serving("CUDA")
    if backend is None:
        refuse(OP, reason)
    if (recent := backend.recent(OP)) is not None:
        remember(append_and_attend, recent, WRITTEN)
    return backend.function(OP)


def _bump(args: tuple[Any, ...]) -> None:
    """Tell autograd that the caches change."""
    increment_versions([args[i] for i in WRITTEN])


def _on_gpu(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    _bump(args)
    return _kernel()(*args, **options)


LIBRARY.define(
    f"{OP}(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v,"
    " Tensor cache_seqlens, Tensor? block_table=None, Tensor? sinks=None, Tensor? k_descale=None,"
    " Tensor? v_descale=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k_new=None,"
    " Tensor? rotary_cos=None, Tensor? rotary_sin=None, *, int max_seqlen_q=0,"
    " bool rotary_interleaved=True, float? softmax_scale=None, bool causal=False,"
    " int window_size_left=-1, int window_size_right=-1, float softcap=0.0)"
    " -> (Tensor out, Tensor softmax_lse)"
)
torch.library.register_fake(f"paged_attn::{OP}", fake, lib=LIBRARY)
LIBRARY.impl(OP, _on_gpu, "CUDA")
# its caller has checked that no input requires grad
LIBRARY.impl(OP, torch.library.fallthrough_kernel, "Autograd")


# its caller has checked that all tensors are on a GPU, plain and without gradients, and that
# autocast is off
append_and_attend = torch.ops.paged_attn.append_and_attend.default
