"""Tiles of queries whose keys are cut into pieces, where tiles are too few to fill the chip.

Each piece is an entry of the list of tiles (`piece_plan.py` says how long it is). A consumer
leaves its rows' sums, not yet divided, as a part; the last one that arrives at a tile adds up all
parts, in the order of the keys, so that the bits do not depend on who that is, and writes the
result. Where pieces are stretches of keys (`stretches.py`), it adds them up as a consumer that had
all of them would have done. Parts of few queries are added up by several: see `shared_pieces.py`.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.common.softmax import finite_or_zero
from torch_paged_attn.backends.triton.hopper.common.results import of_heads, store_lse
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.schedule.stretches import (
    factors,
    first_key_of,
    fold,
    next_reference,
    stretch_of,
)
from torch_paged_attn.backends.triton.hopper.schedule.tile_scheduler import ENTRY

# columns that are added up of all parts at a time, and parts that are on their way together
COLUMNS, AT_ONCE = gl.constexpr(64), gl.constexpr(4)


@gluon.jit
def unpack_piece(word):
    """The tile's first part, of one head; which of its pieces an entry is, of how many."""
    return word >> 16, (word >> 8) & 255, word & 255


@gluon.jit
def pack_pieces(pieces, waiting, OPTIONS: gl.constexpr):
    """A word: how many pieces a tile has; and, where several programs add up its parts, how many
    wait for all of them: those of the first pieces."""
    if OPTIONS.MERGED_COLUMNS > 0:
        pieces = waiting << 16 | pieces
    return pieces


@gluon.jit
def pieces_in(word, OPTIONS: gl.constexpr):
    """How many pieces a tile has."""
    if OPTIONS.MERGED_COLUMNS > 0:
        word = word & 0xFFFF
    return word


@gluon.jit
def keys_of_piece(piece, pieces, num_kv_tiles):
    """First tile of keys of a piece, and how many there are. A piece that is left without any
    visits the tile past the last, of which no row sees a key."""
    first = num_kv_tiles * piece // pieces
    count = num_kv_tiles * (piece + 1) // pieces - first
    return gl.where(count > 0, first, num_kv_tiles), gl.maximum(count, 1)


@gluon.jit
def tiles_of_stretch(
    piece, pieces, first_kv_tile, num_kv_tiles, start, STRETCH: gl.constexpr, BLOCK_N: gl.constexpr
):
    """The same where a piece is a stretch, of those from the one on that holds key `start`, as far
    as it is in `num_kv_tiles` from `first_kv_tile` on."""
    number = stretch_of(start, STRETCH) + piece
    stop = first_kv_tile + num_kv_tiles
    first = gl.maximum(first_key_of(number, STRETCH) // BLOCK_N, first_kv_tile)
    count = gl.minimum(first_key_of(number + 1, STRETCH) // BLOCK_N, stop) - first
    first = gl.where(count > 0, first, stop)
    is_whole = pieces == 1
    return (
        gl.where(is_whole, first_kv_tile, first),
        gl.where(is_whole, num_kv_tiles, gl.maximum(count, 1)),
    )


@gluon.jit
def visited_of_piece(piece, first, stop):
    """Of a tile that visits tiles of keys [first, stop) those of a dealt piece: first one and how
    many, as above."""
    begin = gl.maximum(piece.first, first)
    count = gl.minimum(piece.first + piece.count, stop) - begin
    return gl.where(count > 0, begin, stop), gl.maximum(count, 1)


class Parts(NamedTuple):
    """The parts of a consumer's rows of a tile, as values of the kernel."""

    first: Any  # the number of the first
    step: Any  # from one to the next
    count: Any
    references: Any  # of rows, and sums of weights, behind the values of all parts


@gluon.jit
def part_number(first, piece, step, OPTIONS: gl.constexpr):
    """The number of a piece's part. Of dealt work a program has two parts, the one that it begins
    with and the one that it ends with, which is the first of its tile."""
    if OPTIONS.IS_DEALT:
        return first + piece * step - gl.where(piece > 0, OPTIONS.ROW_GROUPS, 0)
    else:
        return first + piece * step


@gluon.jit
def parts_of(pieces, params, work_info, tile, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """The parts of a tile's rows of consumer INDEX, as many as it has pieces."""
    ROW_GROUPS: gl.constexpr = OPTIONS.ROW_GROUPS
    # parts of the heads lie side by side
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    first = work_info.get(tile, WORD.FIRST_PART)
    step = 2 * ROW_GROUPS
    if not OPTIONS.IS_DEALT:
        first = first * heads + work_info.get(tile, WORD.HEAD) // OPTIONS.PACKED_HEADS
        step = heads * ROW_GROUPS
    values = OPTIONS.MOST_PARTS * ROW_GROUPS * OPTIONS.BLOCK_M * OPTIONS.WIDTH_V
    return Parts(first * ROW_GROUPS + INDEX, step, pieces, params.pointers.parts + values)


@gluon.jit
def leave_part(sums, piece, parts, rows, pointers, OPTIONS: gl.constexpr):
    """Write sums, references and sums of weights of a piece as its part. Returns the counter of the
    tile's parts that are there, which this one is not yet in."""
    acc, m_i, total = sums
    part = part_number(parts.first, piece, parts.step, OPTIONS)
    references = parts.references
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    result: gl.constexpr = acc.type.layout
    r = gl.arange(0, ROWS, m_i.type.layout)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, result)), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, result)), 0)
    # rows past the tile's last token belong to no sequence
    exists = of_heads(
        rows.first_token + row // OPTIONS.PACKED_HEADS < rows.stop_token, row, OPTIONS
    )
    gl.store(pointers.parts + part * (ROWS * WIDTH) + row * WIDTH + column, acc, mask=exists)
    gl.store(references + part * (2 * ROWS) + r, m_i)
    gl.store(references + part * (2 * ROWS) + ROWS + r, total)
    # every thread has written before one of them counts
    thread_barrier()
    if OPTIONS.IS_LISTED:
        return pointers.tile_list + ENTRY + parts.first
    else:
        return pointers.counters + parts.first


@gluon.jit
def merge_pieces(
    sums, place, at, rows, params, work_info, tile, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):
    """Leave this piece's part. The last consumer to arrive adds up all of them, writes the rows'
    logsumexp, and leaves the result in `place`, in shared memory; the others return that their tile
    stops at token 0.

    `sums` are weighted sums of values (rows, width), the rows' references in base two, and their
    sums of weights; `at` is as for `results.store_lse`.
    """
    ROWS: gl.constexpr = OPTIONS.BLOCK_M
    WIDTH: gl.constexpr = OPTIONS.WIDTH_V
    by_row: gl.constexpr = sums[1].type.layout
    pointers = params.pointers
    pieces = work_info.get(tile, WORD.PIECES)
    parts = parts_of(pieces, params, work_info, tile, OPTIONS, INDEX)
    counter = leave_part(sums, work_info.get(tile, WORD.PIECE), parts, rows, pointers, OPTIONS)
    stop = rows.stop_token
    if gl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
        if OPTIONS.IS_DEALT:
            # zero for the next launch
            gl.store(counter, 0)
        r = gl.arange(0, ROWS, by_row)
        m_all = gl.full([ROWS], -float("inf"), gl.float32, by_row)
        total = gl.zeros([ROWS], gl.float32, by_row)
        for i in range(0, pieces, AT_ONCE):
            for j in gl.static_range(AT_ONCE):
                number = place_of(i + j, pieces, OPTIONS)
                part = part_number(parts.first, number, parts.step, OPTIONS)
                m_part, total_part = _part_of_rows(parts.references, part, r, ROWS)
                total_part = gl.where(i + j < pieces, total_part, 0.0)
                if OPTIONS.STRETCH > 0:
                    m_part = gl.where(i + j < pieces, m_part, -float("inf"))
                    m_all, apart = next_reference(m_all, m_part)
                    old, weight = factors(apart)
                    total = fold(total, total_part, old, weight)
                else:
                    m_new = gl.maximum(m_all, m_part)
                    shift = finite_or_zero(m_new)
                    total = total * gl.exp2(m_all - shift) + total_part * gl.exp2(m_part - shift)
                    m_all = m_new
        share = store_lse(m_all, total, at, rows, params, OPTIONS)
        for first in gl.static_range(0, WIDTH, COLUMNS):
            _add_parts(first, parts, m_all, share, place, rows, pointers, OPTIONS)
    else:
        stop = stop * 0
    return stop


@gluon.jit
def place_of(i, pieces, OPTIONS: gl.constexpr):
    """The piece that is added up as number i, or the last one: stretches are added up from the last
    keys on."""
    i = gl.minimum(i, pieces - 1)
    if OPTIONS.STRETCH > 0:
        i = pieces - 1 - i
    return i


@gluon.jit
def _part_of_rows(references, part, r, ROWS: gl.constexpr):
    """References and sums of rows of a part, which other multiprocessors wrote: they are not to be
    found in this one's cache."""
    of_part = references + part * (2 * ROWS) + r
    return gl.load(of_part, cache_modifier=".cg"), gl.load(of_part + ROWS, cache_modifier=".cg")


@gluon.jit
def _add_parts(
    first: gl.constexpr, parts, m_all, share, place, rows, pointers, OPTIONS: gl.constexpr
):  # fmt: skip
    """Add up COLUMNS columns of all parts, and leave their share in `place`. AT_ONCE parts are
    asked for together."""
    ROWS: gl.constexpr = place.shape[0]
    WIDTH: gl.constexpr = place.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [4, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    r = gl.arange(0, ROWS, by_row)
    row = gl.expand_dims(r, 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    token = rows.first_token + row // OPTIONS.PACKED_HEADS
    exists = of_heads(token < rows.stop_token, row, OPTIONS)
    shift = finite_or_zero(gl.convert_layout(m_all, by_row))
    values = pointers.parts + first + row * WIDTH + column
    acc = gl.zeros([ROWS, COLUMNS], gl.float32, layout)
    m_so_far = gl.full([ROWS], -float("inf"), gl.float32, by_row)
    for i in range(0, parts.count, AT_ONCE):
        for j in gl.static_range(AT_ONCE):
            is_one = i + j < parts.count
            number = place_of(i + j, parts.count, OPTIONS)
            part = part_number(parts.first, number, parts.step, OPTIONS)
            m_part, _ = _part_of_rows(parts.references, part, r, ROWS)
            values_of = values + part * (ROWS * WIDTH)
            if OPTIONS.STRETCH > 0:
                is_there = exists & is_one
                found = gl.load(values_of, mask=is_there, other=0.0, cache_modifier=".cg")
                m_part = gl.where(is_one, m_part, -float("inf"))
                m_so_far, apart = next_reference(m_so_far, m_part)
                old, weight = factors(apart)
                acc = fold(acc, found, gl.expand_dims(old, 1), gl.expand_dims(weight, 1))
            else:
                found = gl.load(values_of, mask=exists, other=0.0, cache_modifier=".cg")
                weight = gl.where(is_one, gl.exp2(m_part - shift), 0.0)
                acc += found * gl.expand_dims(weight, 1)
    acc *= gl.expand_dims(gl.convert_layout(share, by_row), 1)
    place.slice(first, COLUMNS, dim=1).store(acc.to(place.dtype))
