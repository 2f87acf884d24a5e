"""Tiles of queries whose keys are cut into pieces, where tiles are too few to fill the chip.

Each piece is an entry of the list of tiles (`piece_plan.py` says how long it is). A consumer
leaves its rows' sums, not yet divided, as a part; the last one that arrives at a tile adds up all
parts, in the order of the keys, so that the bits do not depend on who that is, and writes the
result.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.hopper.tile_scheduler import ENTRY
from torch_paged_attn.backends.triton.hopper.work_info import (
    FIRST_PART,
    HEAD,
    PIECE,
    PIECES,
    thread_barrier,
)


@gluon.jit
def unpack_piece(word):
    """The tile's first part, of one head; which of its pieces an entry is, of how many."""
    return word >> 16, (word >> 8) & 255, word & 255


@gluon.jit
def keys_of_piece(piece, pieces, num_kv_tiles):
    """First tile of keys of a piece, and how many there are. A piece that is left without any
    visits the tile past the last, of which no row sees a key."""
    first = num_kv_tiles * piece // pieces
    count = num_kv_tiles * (piece + 1) // pieces - first
    return gl.where(count > 0, first, num_kv_tiles), gl.maximum(count, 1)


@gluon.jit
def merge_pieces(
    acc, m_i, total, rows, params, work_info, tile, OPTIONS: gl.constexpr, INDEX: gl.constexpr
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
    # parts of the heads lie side by side
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    first_part = work_info.get(tile, FIRST_PART) * heads
    first_part += work_info.get(tile, HEAD) // OPTIONS.PACKED_HEADS
    first_part = first_part * CONSUMERS + INDEX
    step = heads * CONSUMERS
    part = first_part + work_info.get(tile, PIECE) * step
    references = pointers.parts + OPTIONS.MOST_PARTS * CONSUMERS * ROWS * WIDTH
    r = gl.arange(0, ROWS, by_row)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, result)), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, result)), 0)
    at = row * WIDTH + column
    # rows past the tile's last token are nobody's
    exists = rows.first_token + row // OPTIONS.PACKED_HEADS < rows.stop_token
    gl.store(pointers.parts + part * (ROWS * WIDTH) + at, acc, mask=exists)
    gl.store(references + part * (2 * ROWS) + r, m_i)
    gl.store(references + part * (2 * ROWS) + ROWS + r, total)
    # every thread has written before one of them counts
    thread_barrier()
    counter = pointers.tile_list + ENTRY + first_part
    stop = rows.stop_token
    if gl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
        m_i = gl.full([ROWS], -float("inf"), gl.float32, by_row)
        total = gl.zeros([ROWS], gl.float32, by_row)
        acc = gl.zeros([ROWS, WIDTH], gl.float32, result)
        for i in range(pieces):
            of_part = references + (first_part + i * step) * (2 * ROWS) + r
            m_part = gl.load(of_part, cache_modifier=".cg")
            total_part = gl.load(of_part + ROWS, cache_modifier=".cg")
            values = pointers.parts + (first_part + i * step) * (ROWS * WIDTH) + at
            acc_part = gl.load(values, mask=exists, other=0.0, cache_modifier=".cg")
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
