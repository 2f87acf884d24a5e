"""Parts of a tile (`pieces.py`) that are added up by those who left them, each some of its rows.

For few queries, few chunks of prompts and mixed batches, whose programs most often have one piece
each: a program without other work waits until all parts of the tile are there (`arrivals.py`).
Elsewhere the last one to arrive adds up all rows. Parts are added up in the order of the keys, so
that the bits do not depend on which program does it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.common.arrivals import arrive
from torch_paged_attn.backends.triton.common.softmax import finite_or_zero
from torch_paged_attn.backends.triton.hopper.common.results import of_heads, store_lse
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD
from torch_paged_attn.backends.triton.hopper.schedule.pieces import (
    leave_part,
    part_number,
    parts_of,
    pieces_in,
    place_of,
)
from torch_paged_attn.backends.triton.hopper.schedule.stretches import factors, fold, next_reference

# how many parts a consumer asks for together: MANY of few rows, or FEW of many rows
MANY, FEW = gl.constexpr(16), gl.constexpr(4)


@gluon.constexpr_function
def _rows_together(at_once, options):
    """How many rows of so many parts are asked for together: their elements lie in registers."""
    elements = 16384 if options.REGISTERS >= 240 else 8192
    return (4096 if options.REGISTERS < 200 else elements) // at_once // options.WIDTH_V


@gluon.jit
def _arrive(counter, piece, pieces, waiting, num_rows, OPTIONS: gl.constexpr):
    """Count a piece. Returns the first row that is to be added up here, and the one after the last;
    all parts of these are there."""
    is_mine, are_shared = arrive(counter, piece, pieces, waiting, not OPTIONS.IS_LISTED)
    first = gl.where(are_shared, num_rows * piece // gl.maximum(waiting, 1), 0)
    stop = gl.where(are_shared, num_rows * (piece + 1) // gl.maximum(waiting, 1), num_rows)
    return first, gl.where(is_mine, stop, first)


@gluon.jit
def merge_shared(sums, rows, params, work_info, tile, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Leave this piece's part, and add up what is to be added up here: write these rows' logsumexp
    and results. Returns 0, as the token before which `store_result` has rows to write.

    `sums` are weighted sums of values (rows, width), the rows' references in base two, and their
    sums of weights.
    """
    piece = work_info.get(tile, WORD.PIECE)
    word = work_info.get(tile, WORD.PIECES)
    pieces = pieces_in(word, OPTIONS)
    parts = parts_of(pieces, params, work_info, tile, OPTIONS, INDEX)
    counter = leave_part(sums, piece, parts, rows, params.pointers, OPTIONS)
    tokens = gl.minimum(rows.stop_token - rows.first_token, OPTIONS.TOKENS)
    num_rows = gl.maximum(tokens, 0) * OPTIONS.PACKED_HEADS
    first, stop = _arrive(counter, piece, pieces, word >> 16, num_rows, OPTIONS)
    if stop - first > _rows_together(MANY, OPTIONS):
        _add_parts(first, stop, parts, rows, params, OPTIONS, FEW)
    elif stop > first:
        _add_parts(first, stop, parts, rows, params, OPTIONS, MANY)
    return rows.stop_token * 0


@gluon.jit
def _rows_of_part(i, r, exists, column, parts, pointers, OPTIONS: gl.constexpr):
    """References, sums of weights and values of rows r of part number i: nothing, if there is no
    such part."""
    HEIGHT: gl.constexpr = OPTIONS.BLOCK_M
    part = part_number(parts.first, place_of(i, parts.count, OPTIONS), parts.step, OPTIONS)
    is_there = exists & (i < parts.count)
    of_part = parts.references + part * (2 * HEIGHT) + r
    values = pointers.parts + part * (HEIGHT * OPTIONS.WIDTH_V) + column
    values += gl.expand_dims(r * OPTIONS.WIDTH_V, 1)
    return (
        gl.load(of_part, is_there, -float("inf"), cache_modifier=".cg"),
        gl.load(of_part + HEIGHT, is_there, 0.0, cache_modifier=".cg"),
        gl.load(values, gl.expand_dims(is_there, 1), 0.0, cache_modifier=".cg"),
    )


@gluon.jit
def _add_parts(
    first, stop, parts, rows, params, OPTIONS: gl.constexpr, AT_ONCE: gl.constexpr
):  # fmt: skip
    """Add up rows [first, stop) of all parts, AT_ONCE of which are asked for together: others wrote
    them, so that they are not to be found in this multiprocessor's cache."""
    WIDTH: gl.constexpr = OPTIONS.WIDTH_V
    ROWS: gl.constexpr = _rows_together(AT_ONCE, OPTIONS)
    ACROSS: gl.constexpr = min(WIDTH // 4, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [32 // ACROSS, ACROSS], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    pointers = params.pointers
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, layout)), 0)
    for start in range(first, stop, ROWS):
        r = start + gl.arange(0, ROWS, by_row)
        exists = of_heads(r < stop, r, OPTIONS)
        m_all = gl.full([ROWS], -float("inf"), gl.float32, by_row)
        total = gl.zeros([ROWS], gl.float32, by_row)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, layout)
        for i in range(0, parts.count, AT_ONCE):
            found = ()
            for j in gl.static_range(AT_ONCE):
                found = found + _rows_of_part(i + j, r, exists, column, parts, pointers, OPTIONS)
            if OPTIONS.STRETCH > 0:
                m_all, total, acc = _fold_stretches(m_all, total, acc, found, AT_ONCE)
            else:
                m_all, total, acc = _fold_parts(m_all, total, acc, found, AT_ONCE)
        token = rows.first_token + r // OPTIONS.PACKED_HEADS
        share = store_lse(m_all, total, (r, token, exists, exists), rows, params, OPTIONS)
        head = rows.head + r % OPTIONS.PACKED_HEADS
        row = (rows.q_start + token).to(gl.int64) * params.scalars.num_heads + head
        out = pointers.out + gl.expand_dims(row * OPTIONS.MERGED_COLUMNS, 1) + column
        result = (acc * gl.expand_dims(share, 1)).to(pointers.out.dtype.element_ty)
        is_stored = gl.expand_dims(exists, 1)
        if WIDTH > OPTIONS.MERGED_COLUMNS:
            is_stored = is_stored & (column < OPTIONS.MERGED_COLUMNS)
        gl.store(out, result, mask=is_stored)


@gluon.jit
def _fold_parts(m_all, total, acc, found, AT_ONCE: gl.constexpr):
    """References, sums of weights and sums of rows with those of more parts. Products and sums are
    fused where it says so: a row's bits are the same wherever it stands."""
    m_new = m_all
    for j in gl.static_range(AT_ONCE):
        m_new = gl.maximum(m_new, found[3 * j])
    shift = finite_or_zero(m_new)
    old = gl.exp2(m_all - shift)
    total *= old
    acc *= gl.expand_dims(old, 1)
    for j in gl.static_range(AT_ONCE):
        weight = gl.exp2(found[3 * j] - shift)
        total = gl.fma(found[3 * j + 1], weight, total)
        acc = gl.fma(found[3 * j + 2], gl.expand_dims(weight, 1), acc)
    return m_new, total, acc


@gluon.jit
def _fold_stretches(m_all, total, acc, found, AT_ONCE: gl.constexpr):
    """The same where parts are stretches of keys: one after the other, as a consumer that had all
    of them would have added them up."""
    for j in gl.static_range(AT_ONCE):
        m_all, apart = next_reference(m_all, found[3 * j])
        old, weight = factors(apart)
        total = fold(total, found[3 * j + 1], old, weight)
        acc = fold(acc, found[3 * j + 2], gl.expand_dims(old, 1), gl.expand_dims(weight, 1))
    return m_all, total, acc
