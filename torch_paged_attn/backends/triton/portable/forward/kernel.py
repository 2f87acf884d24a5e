"""The attention kernel for every GPU that Triton supports: packed or paged keys, any batch.

It is FlashAttention-2's loop (arXiv 2307.08691): for one tile of queries at a time
(`query_tile.py`), over tiles of BLOCK_N keys (`key_loop.py`). Tiles of keys that every row sees
need no mask. With a layout, a tile's keys are the listed blocks of its row. With IS_SPLIT, the keys
of all tiles are divided evenly between programs (`work_info.py`), and programs that share a tile
merge their partial results (`combine.py`).

Scores and sums are float32; probabilities are rounded to DTYPE, the type of the matrix products.
`arguments.py` explains the groups of arguments.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.seqlen_info import find_tile
from torch_paged_attn.backends.triton.portable.common.groups import Sizes
from torch_paged_attn.backends.triton.portable.common.named import named
from torch_paged_attn.backends.triton.portable.forward.combine import merge_if_there, part_of
from torch_paged_attn.backends.triton.portable.forward.query_tile import attend_tile, tile_at
from torch_paged_attn.backends.triton.portable.forward.work_info import (
    find_work,
    sequence_at,
    sequence_info,
)
from torch_paged_attn.backends.triton.runtime.launch import gdc_wait


@triton.jit
def _attend_to_all(tile, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """Attention of a tile to all of its keys."""
    # the tuple must not be assigned to a name: Triton would not treat its numbers as constants
    attend_tile(
        tile, named("unit taken units is_part part")(0, 1, 1, False, 0), pointers, strides, sizes,
        scalars, OPTIONS,
    )  # fmt: skip


@triton.jit
def _attend_whole_tile(lengths, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """The program computes one tile of queries with all its keys."""
    # the last tiles of a causal sequence see the most keys: they start first
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    b, place = find_tile(number, pointers.cu_seqlens_q, sizes.batch, OPTIONS.TOKENS, OPTIONS.GAP)
    sequence = sequence_at(b, lengths, sizes, OPTIONS, OPTIONS.SKIPS)
    tile = tile_at(place, tl.program_id(1), sequence, OPTIONS)
    if tile.first_token < tile.query_len:
        _attend_to_all(tile, pointers, strides, sizes, scalars, OPTIONS)


@triton.jit
def _attend_in_turns(lengths, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """Program p of n computes tiles p, p + n, p + 2 n, ... of a sequence and a head. So a program
    need not search for its sequence, and programs that run at the same time read neighbouring heads
    of the same tokens.
    """
    sequence = sequence_at(tl.program_id(2), lengths, sizes, OPTIONS, OPTIONS.SKIPS)
    place = tl.program_id(1)
    while place * OPTIONS.TOKENS < sequence.query_len:
        tile = tile_at(place, tl.program_id(0), sequence, OPTIONS)
        _attend_to_all(tile, pointers, strides, sizes, scalars, OPTIONS)
        place += tl.num_programs(1)


@triton.jit
def _attend_piece(lengths, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """The program computes a piece of the keys of all tiles (`work_info.py`), and helps to merge
    the tiles that it shares with others (`combine.py`).
    """
    # heads are the fastest grid dimension: neighbouring programs read whole tokens of a cache
    head_program = tl.program_id(0)
    heads = tl.num_programs(0)
    program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    programs = tl.num_programs(1) * tl.num_programs(2)
    piece, at, stop, b, first = find_work(program, programs, lengths, sizes, scalars, OPTIONS)
    # the first iteration always runs, so that the compiler need not wait for the lengths before it
    # computes addresses
    goes_on = tl.full([], 1, tl.int1)
    while goes_on:
        sequence = sequence_info(b, lengths, sizes, scalars, OPTIONS)
        units = sequence.units
        if at >= first + sequence.tiles * units:
            first += sequence.tiles * units
            b += 1
        else:
            place = 0
            if sequence.tiles > 1:
                place = (at - first) // units
            tile_start = first + place * units
            unit = at - tile_start
            taken = tl.minimum(stop - at, units - unit)
            is_shared = taken < units
            tile = tile_at(place, head_program, sequence, OPTIONS)
            share = named("unit taken units is_part part")(
                unit=unit,
                taken=taken,
                units=units,
                is_part=is_shared,
                part=part_of(program, unit == 0, heads, head_program),
            )
            attend_tile(tile, share, pointers, strides, sizes, scalars, OPTIONS)
            if is_shared:
                # consecutive programs share the tile
                first_program = tile_start // piece
                parts = (tile_start + units - 1) // piece - first_program + 1
                merge_if_there(
                    tile, program, first_program, parts, heads, pointers, sizes, scalars, OPTIONS
                )
            at += taken
        goes_on = at < stop


@triton.jit
def attend_batch(pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """The kernel's body, also of the kernel in torch.compile's graphs (`graph_kernel.py`)."""
    # if a function's result is part of an address that is written to, torch.compile assumes that
    # all pointers among its arguments are written to; so these functions get only the lengths
    lengths = named("cu_seqlens_q cu_seqlens_k seqused_k k_start q_position")(
        pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.seqused_k, pointers.k_start,
        pointers.q_position,
    )  # fmt: skip
    if OPTIONS.IS_SPLIT:
        _attend_piece(lengths, pointers, strides, sizes, scalars, OPTIONS)
    elif OPTIONS.GAP == 0:
        _attend_in_turns(lengths, pointers, strides, sizes, scalars, OPTIONS)
    else:
        _attend_whole_tile(lengths, pointers, strides, sizes, scalars, OPTIONS)


@triton.jit(do_not_specialize=Sizes._fields)
def _attention_fwd_kernel(
    pointers, strides,
    stride_table, stride_crow_batch, stride_crow_head, stride_col_batch, stride_col_head, total_q,
    max_keys, num_pages, batch, layout_rows, nnz,
    scalars,
    OPTIONS: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Sizes come one by one: of a tuple, Triton would compile a kernel for each one's divisors."""
    gdc_wait(IS_DEPENDENT)
    sizes = Sizes(
        stride_table, stride_crow_batch, stride_crow_head, stride_col_batch, stride_col_head,
        total_q, max_keys, num_pages, batch, layout_rows, nnz,
    )  # fmt: skip
    attend_batch(pointers, strides, sizes, scalars, OPTIONS)
