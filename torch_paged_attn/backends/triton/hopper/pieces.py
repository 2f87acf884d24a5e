"""Tiles of queries whose keys are cut into pieces, where tiles are too few to fill the chip.

Every tile of a launch has as many pieces (`tile_scheduler.py` chooses, on the device). A consumer
leaves its rows' sums, not yet divided, as a part; the last one that arrives at a tile adds up all
parts, in the order of the keys, so that the bits do not depend on who that is, and writes the
result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.hopper.tile_scheduler import ENTRY
from torch_paged_attn.backends.triton.hopper.work_info import (
    PIECE,
    PIECES,
    WHOLE,
    thread_barrier,
)


@gluon.jit
def piece_of(unit, pieces, heads_per_unit):
    """The tile of a unit of work, and which of its pieces: heads that share keys are neighbours,
    with the same piece."""
    group = unit // heads_per_unit
    return group // pieces * heads_per_unit + unit % heads_per_unit, group % pieces


@gluon.jit
def keys_of_piece(piece, pieces, num_kv_tiles):
    """First tile of keys of a piece, and how many there are. A piece that is left without any
    visits the tile past the last, of which no row sees a key."""
    first = num_kv_tiles * piece // pieces
    count = num_kv_tiles * (piece + 1) // pieces - first
    return gl.where(count > 0, first, num_kv_tiles), gl.maximum(count, 1)


@gluon.jit
def merge_pieces(
    acc, m_i, total, stop_token, params, work_info, tile, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):
    """Leave this piece's part. The last consumer to arrive returns the sums of all pieces; the
    others, which write nothing, return that their tile stops at token 0.

    `acc` (rows, width) are weighted sums of values, `m_i` the rows' references in base two, `total`
    their sums of weights.
    """
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    by_row: gl.constexpr = m_i.type.layout
    result: gl.constexpr = acc.type.layout
    pointers = params.pointers
    pieces = work_info.get(tile, PIECES)
    whole = work_info.get(tile, WHOLE)
    first_part = whole * pieces * CONSUMERS + INDEX
    part = first_part + work_info.get(tile, PIECE) * CONSUMERS
    references = pointers.parts + OPTIONS.MOST_PARTS * CONSUMERS * ROWS * WIDTH
    r = gl.arange(0, ROWS, by_row)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, result)), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, result)), 0)
    at = row * WIDTH + column
    gl.store(pointers.parts + part * (ROWS * WIDTH) + at, acc)
    gl.store(references + part * (2 * ROWS) + r, m_i)
    gl.store(references + part * (2 * ROWS) + ROWS + r, total)
    # every thread has written before one of them counts
    thread_barrier()
    counter = pointers.tile_list + ENTRY + whole * CONSUMERS + INDEX
    stop = stop_token
    if gl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
        m_i = gl.full([ROWS], -float("inf"), gl.float32, by_row)
        total = gl.zeros([ROWS], gl.float32, by_row)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, result)
        for i in range(pieces):
            of_part = references + (first_part + i * CONSUMERS) * (2 * ROWS) + r
            m_part = gl.load(of_part, cache_modifier=".cg")
            total_part = gl.load(of_part + ROWS, cache_modifier=".cg")
            values = pointers.parts + (first_part + i * CONSUMERS) * (ROWS * WIDTH) + at
            acc_part = gl.load(values, cache_modifier=".cg")
            m_new = gl.maximum(m_i, m_part)
            # rows that have seen no key yet keep -inf; shifting by 0 instead avoids inf - inf
            shift = gl.where(m_new == -float("inf"), 0.0, m_new)
            old, new = gl.exp2(m_i - shift), gl.exp2(m_part - shift)
            total = total * old + total_part * new
            acc = acc * _by_rows(old, acc) + acc_part * _by_rows(new, acc)
            m_i = m_new
    else:
        stop = stop * 0
    return acc, m_i, total, stop


@gluon.jit
def _by_rows(x, acc):
    """(rows, 1), as rows of `acc` lie."""
    return gl.expand_dims(gl.convert_layout(x, gl.SliceLayout(1, acc.type.layout)), 1)
