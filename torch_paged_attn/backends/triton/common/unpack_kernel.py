"""Copies keys and values of 8 bits and int4 to a workspace in 16 bits.

A sequence of at least LEAST queries has consecutive rows there, from a multiple of BLOCK on, if
there is room for them behind those of the sequences before it. Every program finds this out from
the lengths; the first one writes it down, for the two launches that share the batch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.dequant import decode
from torch_paged_attn.backends.triton.common.int4 import decode_two
from torch_paged_attn.backends.triton.common.seqlen_info import key_span


class Unpacked(NamedTuple):
    k: Any  # (num_pages, num_kv_heads, page_size, width)
    v: Any
    k_descale: Any
    v_descale: Any
    block_table: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqused_k: Any
    new_k: Any  # (num_kv_heads, capacity, head_dim)
    new_v: Any
    new_k_descale: Any  # (num_kv_heads, capacity)
    new_v_descale: Any
    # (batch,): the first row of a sequence in the workspace; and its number of keys if it is there,
    # if it has few queries, or if there was no room: elsewhere -1
    k_start: Any
    used: Any
    used_of_few: Any
    used_of_rest: Any


class UnpackStrides(NamedTuple):
    """Strides in elements."""

    page: int
    head: int
    slot: int
    scale_page: int  # of the batch, if scales are by head
    scale_head: int
    scale_slot: int


@triton.jit
def _unpack_rows(x_ptr, new_ptr, row, inside, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Rows at offsets `row[0]` of the cache to rows at offsets `row[1]` of the workspace."""
    if FORMAT == "INT4":
        d = tl.arange(0, DIM // 2)
        x = tl.load(x_ptr + row[0][:, None] + d[None, :], mask=inside[:, None])
        even, odd = decode_two(x, tl.float32)
        x = tl.reshape(tl.join(even, odd), [x.shape[0], DIM])
    else:
        d = tl.arange(0, DIM)
        x = tl.load(x_ptr + row[0][:, None] + d[None, :], mask=inside[:, None])
        x = decode(x, FORMAT, tl.float32)
    d = tl.arange(0, DIM)
    tl.store(new_ptr + row[1][:, None] + d[None, :], x.to(tl.bfloat16), mask=inside[:, None])


@triton.jit
def _scales(ptr, b, page, slot, head, inside, strides, BY_TOKEN: tl.constexpr):
    if ptr is None:
        return tl.full(slot.shape, 1.0, tl.float32)
    at = head * strides.scale_head + tl.zeros_like(slot)
    if BY_TOKEN:
        at += page * strides.scale_page + slot * strides.scale_slot
    else:
        at += b * strides.scale_page
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def _blocks_of(
    b, first, pointers, batch, most_keys, capacity, LEAST: tl.constexpr, BLOCK: tl.constexpr
):
    """Of sequences b, of which the first would begin at block `first`: the number of keys, the
    block after a sequence's last, the number of its blocks, and whether it is in the workspace."""
    exists = b < batch
    start = tl.load(pointers.cu_seqlens_q + b, mask=exists, other=0)
    stop = tl.load(pointers.cu_seqlens_q + b + 1, mask=exists, other=0)
    _, keys = key_span(
        b, pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.seqused_k, batch, most_keys, True
    )
    blocks = tl.where(exists & (stop - start >= LEAST), tl.cdiv(keys, BLOCK), 0)
    ends = first + tl.cumsum(blocks, 0)
    return keys, ends, blocks, (blocks > 0) & (ends <= capacity // BLOCK)


SIZES = ("batch", "num_pages", "stride_table", "page_size", "most_keys", "capacity")


@triton.jit(do_not_specialize=SIZES)
def _unpack_kernel(
    pointers, k_strides, v_strides, batch, num_pages, stride_table, page_size, most_keys, capacity,
    DIM: tl.constexpr, DIM_V: tl.constexpr, FORMAT: tl.constexpr, BY_TOKEN: tl.constexpr,
    LEAST: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    program, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    lane = tl.arange(0, WIDTH)
    number = program
    first = tl.full([], 0, tl.int32)
    for b0 in tl.range(0, batch, WIDTH):
        b = b0 + lane
        keys, ends, blocks, is_here = _blocks_of(
            b, first, pointers, batch, most_keys, capacity, LEAST, BLOCK
        )
        if (program == 0) & (head == 0):
            exists, is_few = b < batch, blocks == 0
            at = tl.where(is_here, ends - blocks, 0) * BLOCK
            tl.store(pointers.k_start + b, at, mask=exists)
            tl.store(pointers.used + b, tl.where(is_here, keys, -1), mask=exists)
            tl.store(pointers.used_of_few + b, tl.where(is_few, keys, -1), mask=exists)
            is_rest = (blocks > 0) & (ends > capacity // BLOCK)
            tl.store(pointers.used_of_rest + b, tl.where(is_rest, keys, -1), mask=exists)
        stop = first + tl.sum(blocks, 0)
        while number < stop:
            # the sequence whose block this is
            is_one = is_here & (number < ends) & (number >= ends - blocks)
            one = tl.sum(tl.where(is_one, b, 0), 0).to(tl.int64)
            j = (number - tl.sum(tl.where(is_one, ends - blocks, 0), 0)) * BLOCK + tl.arange(
                0, BLOCK
            )
            inside = j < tl.sum(tl.where(is_one, keys, 0), 0)
            page = tl.load(
                pointers.block_table + one * stride_table + j // page_size, mask=inside, other=0
            )
            # a bad id that nobody checked reads the last page: wrong, but inside the cache
            page = tl.minimum(page.to(tl.uint32), (num_pages - 1).to(tl.uint32)).to(tl.int64)
            slot = (j % page_size).to(tl.int64)
            new = head * capacity + number * BLOCK + tl.arange(0, BLOCK)
            row = page * k_strides.page + head * k_strides.head + slot * k_strides.slot, new * DIM
            _unpack_rows(pointers.k, pointers.new_k, row, inside, DIM, FORMAT)
            row = page * v_strides.page + head * v_strides.head + slot * v_strides.slot, new * DIM_V
            _unpack_rows(pointers.v, pointers.new_v, row, inside, DIM_V, FORMAT)
            k_scale = _scales(
                pointers.k_descale, one, page, slot, head, inside, k_strides, BY_TOKEN
            )
            v_scale = _scales(
                pointers.v_descale, one, page, slot, head, inside, v_strides, BY_TOKEN
            )
            tl.store(pointers.new_k_descale + new, k_scale, mask=inside)
            tl.store(pointers.new_v_descale + new, v_scale, mask=inside)
            number += tl.num_programs(0)
        first = stop
