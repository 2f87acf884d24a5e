"""`append_and_attend` on GPUs, in two launches: the first writes new tokens and the new lengths,
the second is attention.

A program of the first kernel copies some elements of the keys and values of a few tokens, as in
`reshape_and_cache.py`, but computes their slots itself. It computes the slots of all tokens,
because a later token with the same slot has to win.
"""

import operator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.append_slots import slots_behind
from torch_paged_attn.backends.triton.dequant import as_stored
from torch_paged_attn.backends.triton.flash_varlen import flash_varlen
from torch_paged_attn.backends.triton.reshape_and_cache import (
    choose_rows,
    load_rows,
    row_strides,
    store_rows,
)
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backends.triton.written_slots import is_written_later
from torch_paged_attn.ops.append_and_attend import check, parts_of

TENSORS = (
    "q", "k_cache", "v_cache", "key", "value", "cache_seqlens", "block_table", "sinks", "k_descale",
    "v_descale",
)  # fmt: skip


class Pointers(NamedTuple):
    """The kernel's tensors; the scales may be None."""

    key: Any
    value: Any
    k_cache: Any
    v_cache: Any
    k_descale: Any
    v_descale: Any
    cache_seqlens: Any
    block_table: Any
    seqused_k: Any
    cu_seqlens_q: Any


class Strides(NamedTuple):
    """Strides in elements."""

    k: Any  # RowStrides
    v: Any
    cache_seqlens: int
    page: int  # block_table.stride(1)


@triton.jit(
    do_not_specialize=("num_tokens", "num_slots", "stride_row", "max_pages", "batch", "seqlen_q")
)
def _append_kernel(
    pointers,
    strides,
    num_heads,
    page_size,
    num_tokens,
    num_slots,
    stride_row,
    max_pages,
    batch,
    seqlen_q,
    OPTIONS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A program copies BLOCK_E elements of the keys and of the values of BLOCK_T tokens."""
    DIM: tl.constexpr = OPTIONS.DIM
    DIM_V: tl.constexpr = OPTIONS.DIM_V
    gdc_wait(IS_DEPENDENT)
    token = tl.program_id(0) * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)
    new = num_tokens // batch
    b = token // new
    before, slot = slots_behind(
        pointers, strides, stride_row, page_size, max_pages, b, token - b * new, token < num_tokens
    )
    slot = tl.where(slot < num_slots, slot, -1)
    key = load_rows(pointers.key, token, num_tokens, strides.k, num_heads, DIM, OPTIONS)
    value = load_rows(pointers.value, token, num_tokens, strides.v, num_heads, DIM_V, OPTIONS)
    writes = slot >= 0
    if OPTIONS.WIDTH > 1:
        other = tl.arange(0, OPTIONS.WIDTH)
        other_b = other // new
        _, other_slot = slots_behind(
            pointers, strides, stride_row, page_size, max_pages, other_b, other - other_b * new,
            other < num_tokens,
        )  # fmt: skip
        writes = writes & ~is_written_later(token, slot, other, other_slot)
    place = slot // page_size, slot % page_size, writes
    store_rows(key, pointers.k_cache, pointers.k_descale, place, strides.k, num_heads, DIM, OPTIONS)
    store_rows(
        value, pointers.v_cache, pointers.v_descale, place, strides.v, num_heads, DIM_V, OPTIONS
    )
    # the program of a sequence's first token writes the sequence's length and end of queries
    is_first = (token == b * new) & (token < num_tokens) & (tl.program_id(1) == 0)
    tl.store(pointers.seqused_k + b, tl.where(before < 0, 0, before + new), mask=is_first)
    tl.store(pointers.cu_seqlens_q + b + 1, (b + 1) * seqlen_q, mask=is_first)
    tl.store(pointers.cu_seqlens_q + b, 0 * b, mask=is_first & (b == 0))


def append_and_attend(*tensors: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.append_and_attend`."""
    return launch_cache.call("append_and_attend", _plan, tensors, options)


def _plan(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor,
    v: Tensor,
    cache_seqlens: Tensor,
    block_table: Tensor,
    sinks: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    **options: Any,
) -> Plan:
    parts = parts_of(q, k_cache, v_cache, k, v, cache_seqlens)
    check(parts, cache_seqlens, block_table, sinks, k_descale, v_descale, **options)
    tensors = q, k_cache, v_cache, k, v, cache_seqlens, block_table, sinks, k_descale, v_descale
    given = [name for name, x in zip(TENSORS, tensors, strict=True) if x is not None]
    # the last name, None, stands for tensors that are not given
    names = [*given, "seqused_k", "cu_seqlens_q", None]
    stored = parts.k_cache.dtype.itemsize == 1
    unused = () if stored else ("k_descale", "v_descale")
    wanted = (x if x in names and x not in unused else None for x in Pointers._fields)
    pick = operator.itemgetter(*map(names.index, wanted))
    attention = (
        "q", "k_cache", "v_cache", "cu_seqlens_q", "seqused_k", "block_table", "sinks", "k_descale",
        "v_descale",
    )  # fmt: skip
    pick_attention = operator.itemgetter(*(names.index(x) for x in attention if x in names))
    attend = flash_varlen.plan(
        q.shape[1], 0, parts.q, parts.k_cache, parts.v_cache, parts.cu_seqlens_q, None,
        parts.seqused_k, block_table, None, None, sinks, None, k_descale, v_descale, **options,
    )  # fmt: skip
    target = target_of(q.device)
    num_tokens, batch = parts.key.shape[0], cache_seqlens.shape[0]
    grid, rows = choose_rows(parts.key, parts.value, parts.k_cache, num_tokens, target)
    scales = (k_descale, v_descale) if stored else (None, None)
    append = Launch(
        _append_kernel,
        grid,
        strides=Strides(
            k=row_strides(parts.key, parts.k_cache, scales[0]),
            v=row_strides(parts.value, parts.v_cache, scales[1]),
            cache_seqlens=cache_seqlens.stride(0),
            page=block_table.stride(1),
        ),
        num_heads=parts.key.shape[1],
        page_size=parts.k_cache.shape[2],
        num_tokens=num_tokens,
        num_slots=parts.k_cache.shape[0] * parts.k_cache.shape[2],
        stride_row=block_table.stride(0),
        max_pages=block_table.shape[1],
        batch=batch,
        seqlen_q=q.shape[1],
        OPTIONS=rows,
        **dependent_launch(target.overlaps_launches),
    )
    new_lengths = Allocation((batch,), torch.int32, q.device)
    new_bounds = Allocation((batch + 1,), torch.int32, q.device)

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        lengths, bounds = new_lengths(), new_bounds()
        found = (*tensors, lengths, bounds, None)
        at = (*addresses, lengths.data_ptr(), bounds.data_ptr(), None)
        if append.is_ready:
            append.start(pick(at))
        else:
            views = [x if x is None else as_stored(x, target)[0] for x in pick(found)]
            append(Pointers(*views))
        return attend(pick_attention(found), pick_attention(at))

    return run
