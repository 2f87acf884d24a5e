"""`append_slots` on GPUs: a program computes the slots of BLOCK new tokens, and the new lengths of
BLOCK sequences.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import cdiv, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.ops.append_slots import check

BLOCK = 128


class Pointers(NamedTuple):
    """The kernel's tensors; cu_seqlens_k_new may be None."""

    cache_seqlens: Any
    block_table: Any
    cu_seqlens_k_new: Any
    slot_mapping: Any
    seqused_k: Any


class Strides(NamedTuple):
    """Strides in elements."""

    cache_seqlens: int
    page: int  # block_table.stride(1)
    cu_seqlens_k_new: int


@triton.jit
def sequence_of(token, cu_seqlens_ptr, stride, batch):
    """The sequence of each token, that is how many sequences end at or before it; `batch` for
    tokens of no sequence.
    """
    least, most = token * 0, token * 0 + batch
    size = batch
    while size > 0:
        middle = (least + most) // 2
        is_open = least < most
        end = tl.load(cu_seqlens_ptr + (middle + 1) * stride, mask=is_open, other=0)
        has_ended = is_open & (end <= token)
        most = tl.where(is_open & ~has_ended, middle, most)
        least = tl.where(has_ended, middle + 1, least)
        size = size // 2
    return least


@triton.jit
def place_of(token, cu_seqlens_ptr, stride, batch, num_tokens):
    """For each token its sequence, its number among the tokens of the sequence, and whether it has
    one. Without `cu_seqlens_ptr`, all sequences have as many tokens.
    """
    if cu_seqlens_ptr is not None:
        b = sequence_of(token, cu_seqlens_ptr, stride, batch)
        exists = (token < num_tokens) & (b < batch)
        first = tl.load(cu_seqlens_ptr + b * stride, mask=exists, other=0)
    else:
        each = tl.maximum(num_tokens // batch, 1)
        exists = token < num_tokens
        b = token // each
        first = b * each
    return b, token - first, exists


@triton.jit
def slots_of_new(pointers, strides, stride_row, page_size, max_pages, batch, token, num_tokens):
    """The positions of new tokens in their sequences, and their slots; -1 for tokens of no sequence
    and those for which the table has no entry.
    """
    b, offset, exists = place_of(
        token, pointers.cu_seqlens_k_new, strides.cu_seqlens_k_new, batch, num_tokens
    )
    before = tl.load(pointers.cache_seqlens + b * strides.cache_seqlens, mask=exists, other=-1)
    position = offset.to(tl.int64) + before
    entry = position // page_size
    exists = exists & (before >= 0) & (position >= 0) & (entry < max_pages)
    row = pointers.block_table + b.to(tl.int64) * stride_row
    page = tl.load(row + entry * strides.page, mask=exists, other=-1).to(tl.int64)
    slot = page * page_size + position % page_size
    return position, tl.where(exists, slot, -1)


@triton.jit
def store_lengths(pointers, strides, b, batch, num_tokens):
    """The lengths of sequences b with their new tokens."""
    exists = b < batch
    before = tl.load(pointers.cache_seqlens + b * strides.cache_seqlens, mask=exists, other=0)
    if pointers.cu_seqlens_k_new is not None:
        bound = pointers.cu_seqlens_k_new + b * strides.cu_seqlens_k_new
        new = tl.load(bound + strides.cu_seqlens_k_new, mask=exists, other=0)
        new -= tl.load(bound, mask=exists, other=0)
    else:
        new = num_tokens // batch
    tl.store(pointers.seqused_k + b, tl.where(before < 0, 0, before + new), mask=exists)


@triton.jit(do_not_specialize=("stride_row", "max_pages", "batch", "num_tokens"))
def _append_slots_kernel(
    pointers,
    strides,
    stride_row,
    page_size,
    max_pages,
    batch,
    num_tokens,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    gdc_wait(IS_DEPENDENT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    store_lengths(pointers, strides, i, batch, num_tokens)
    _, slot = slots_of_new(
        pointers, strides, stride_row, page_size, max_pages, batch, i, num_tokens
    )
    tl.store(pointers.slot_mapping + i, slot, mask=i < num_tokens)


def append_slots(
    cache_seqlens: Tensor,
    block_table: Tensor,
    cu_seqlens_k_new: Tensor | None,
    page_size: int,
    num_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.append_slots`."""
    tensors: tuple[Tensor, ...] = cache_seqlens, block_table
    if cu_seqlens_k_new is not None:
        tensors = *tensors, cu_seqlens_k_new
    options = {"page_size": page_size, "num_tokens": num_tokens}
    return launch_cache.call("append_slots", _plan, tensors, options)


def _plan(
    cache_seqlens: Tensor,
    block_table: Tensor,
    cu_seqlens_k_new: Tensor | None = None,
    *,
    page_size: int,
    num_tokens: int,
) -> Plan:
    check(cache_seqlens, block_table, cu_seqlens_k_new, page_size, num_tokens)
    batch, max_pages = block_table.shape
    device = cache_seqlens.device
    new_slots = Allocation((num_tokens,), torch.int64, device)
    new_lengths = Allocation((batch,), torch.int32, device)
    is_empty = num_tokens == 0 and batch == 0
    has_bounds = cu_seqlens_k_new is not None

    def pointers(given: tuple[Any, ...], slots: Any, lengths: Any) -> Pointers:
        before, table, *bounds = given
        return Pointers(before, table, bounds[0] if has_bounds else None, slots, lengths)

    launch = Launch(
        _append_slots_kernel,
        (cdiv(max(num_tokens, batch), BLOCK),),
        strides=Strides(
            cache_seqlens=cache_seqlens.stride(0),
            page=block_table.stride(1),
            cu_seqlens_k_new=0 if cu_seqlens_k_new is None else cu_seqlens_k_new.stride(0),
        ),
        stride_row=block_table.stride(0),
        page_size=max(page_size, 1),
        max_pages=max_pages if page_size else 0,
        batch=batch,
        num_tokens=num_tokens,
        BLOCK=BLOCK,
        **dependent_launch(target_of(device).overlaps_launches),
    )

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        slots, lengths = new_slots(), new_lengths()
        if is_empty:
            return slots, lengths
        if launch.is_ready:
            launch.start(pointers(addresses, slots.data_ptr(), lengths.data_ptr()))
        else:
            launch(pointers(tensors, slots, lengths))
        return slots, lengths

    return run
