"""Attention forward for every GPU that Triton knows: packed or paged keys, prefill, decode and
mixes.

FlashAttention-2's loop (arXiv 2307.08691) over one tile of queries at a time, see `query_tile.py`.
The keys come in tiles of BLOCK_N; those that every row sees need no mask and go first through the
middle phase. With IS_SPLIT the keys of all tiles are dealt out evenly, see `work_info.py`, and
programs that share a tile merge what each has found, see `combine.py`. With a layout, a tile's keys
are the listed blocks of its row.

Scores and sums are float32; probabilities are rounded to DTYPE, the type of the products. The
arguments come in groups, see `arguments.py`.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.arguments import Sizes
from torch_paged_attn.backends.triton.portable.combine import is_last_arrival, merge_parts, part_of
from torch_paged_attn.backends.triton.portable.named import named
from torch_paged_attn.backends.triton.portable.query_tile import attend_tile, tile_at
from torch_paged_attn.backends.triton.portable.work_info import (
    find_work,
    sequence_at,
    sequence_info,
)
from torch_paged_attn.backends.triton.runtime.launch import gdc_wait
from torch_paged_attn.backends.triton.seqlen_info import find_tile


@triton.jit
def _attend_whole_tile(lengths, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """One program, one tile of queries and all its keys."""
    # the last tiles of a causal sequence see the most keys: they start first
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    b, place = find_tile(number, pointers.cu_seqlens_q, sizes.batch, OPTIONS.TOKENS, OPTIONS.GAP)
    sequence = sequence_at(b, lengths, sizes, OPTIONS)
    tile = tile_at(place, tl.program_id(1), sequence, OPTIONS)
    if tile.first_token < tile.query_len:
        # not by way of a name: numbers in a tuple that has one are no constants any more
        attend_tile(
            tile,
            named("unit taken units is_part part")(unit=0, taken=1, units=1, is_part=False, part=0),
            pointers,
            strides,
            sizes,
            scalars,
            OPTIONS,
        )


@triton.jit
def _attend_in_turns(lengths, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """The programs of a sequence and a head take its tiles in turns. Nothing is searched for, and
    programs that run together read neighbouring heads of the same tokens."""
    sequence = sequence_at(tl.program_id(2), lengths, sizes, OPTIONS)
    place = tl.program_id(1)
    while place * OPTIONS.TOKENS < sequence.query_len:
        attend_tile(
            tile_at(place, tl.program_id(0), sequence, OPTIONS),
            named("unit taken units is_part part")(unit=0, taken=1, units=1, is_part=False, part=0),
            pointers,
            strides,
            sizes,
            scalars,
            OPTIONS,
        )
        place += tl.num_programs(1)


@triton.jit
def _attend_piece(lengths, pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """One program, the next piece of all tiles' keys; it merges a tile if it is the last there.
    Where another kernel does a part of the batch, it is those sequences with more than the `limit`
    of queries.
    """
    # heads are neighbours: together they read whole tokens of a cache
    head_program = tl.program_id(0)
    heads = tl.num_programs(0)
    program = tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)
    programs = tl.num_programs(1) * tl.num_programs(2)
    piece, at, stop, b, first = find_work(program, programs, lengths, sizes, scalars, OPTIONS)
    # a loop that surely begins needs no branch before it: addresses are computed while the
    # lengths are on their way
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
                # the programs that share the tile, one after another
                first_program = tile_start // piece
                parts = (tile_start + units - 1) // piece - first_program + 1
                counter = pointers.counters + first_program * heads + head_program
                if is_last_arrival(counter, parts):
                    merge_parts(
                        tile, first_program, parts, heads, pointers, sizes, scalars, OPTIONS
                    )
            at += taken
        goes_on = at < stop


@triton.jit
def attend_batch(pointers, strides, sizes, scalars, OPTIONS: tl.constexpr):
    """What one program does, whichever kernel it is in."""
    limit = 0
    if OPTIONS.IS_BESIDE:
        limit = tl.load(pointers.tile_list + 2)
    # torch.compile takes every pointer for written to that a function has, if what it returns is
    # part of an address that is written to
    lengths = named("cu_seqlens_q cu_seqlens_k seqused_k k_start q_position limit")(
        cu_seqlens_q=pointers.cu_seqlens_q,
        cu_seqlens_k=pointers.cu_seqlens_k,
        seqused_k=pointers.seqused_k,
        k_start=pointers.k_start,
        q_position=pointers.q_position,
        limit=limit,
    )
    if OPTIONS.IS_BESIDE:
        padding = tl.load(pointers.cu_seqlens_q + sizes.batch) < sizes.total_q
        if (limit > 0) | padding:
            _attend_piece(lengths, pointers, strides, sizes, scalars, OPTIONS)
    elif OPTIONS.IS_SPLIT:
        _attend_piece(lengths, pointers, strides, sizes, scalars, OPTIONS)
    elif OPTIONS.GAP == 0:
        _attend_in_turns(lengths, pointers, strides, sizes, scalars, OPTIONS)
    else:
        _attend_whole_tile(lengths, pointers, strides, sizes, scalars, OPTIONS)


@triton.jit(do_not_specialize=Sizes._fields)
def _attention_fwd_kernel(
    pointers,
    strides,
    # one by one: Triton compiles for the divisors of what is in a tuple
    stride_table,
    stride_crow_batch,
    stride_crow_head,
    stride_col_batch,
    stride_col_head,
    total_q,
    max_keys,
    num_pages,
    batch,
    layout_rows,
    nnz,
    scalars,
    OPTIONS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    # beside a kernel that does the rest of the call, nothing is waited for but its end
    gdc_wait(IS_DEPENDENT and not OPTIONS.IS_BESIDE)
    sizes = Sizes(
        stride_table=stride_table,
        stride_crow_batch=stride_crow_batch,
        stride_crow_head=stride_crow_head,
        stride_col_batch=stride_col_batch,
        stride_col_head=stride_col_head,
        total_q=total_q,
        max_keys=max_keys,
        num_pages=num_pages,
        batch=batch,
        layout_rows=layout_rows,
        nnz=nnz,
    )
    attend_batch(pointers, strides, sizes, scalars, OPTIONS)
    if OPTIONS.IS_BESIDE:
        # what comes after this kernel comes after both
        is_first = tl.program_id(0) + tl.program_id(1) + tl.program_id(2) == 0
        if is_first:
            gdc_wait(IS_DEPENDENT)
