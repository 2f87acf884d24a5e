"""Tiles of queries whose keys are cut into pieces, where tiles are too few to fill the chip.

Each piece is an entry of the list of tiles (`piece_plan.py` says how long it is), or dealt out
(`dealt_work.py`). A consumer leaves its rows' sums, not yet divided, as a part, and counts. Those
that have nothing else to do wait until all parts of their tile are there, and each adds up some of
its rows; elsewhere the last one to arrive adds up all. Parts are added up in the order of the keys,
so that the bits do not depend on who does it. Where pieces are stretches of keys (`stretches.py`),
they are added up as a consumer that had all of them would have done.

Nobody waits for ever, because it is nowhere said that all programs run at once: who has waited for
long gives up, and if anybody has, the last one to arrive adds up all rows.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.hopper.results import of_heads, store_lse
from torch_paged_attn.backends.triton.hopper.stretches import (
    factors,
    first_key_of,
    fold,
    next_reference,
    stretch_of,
)
from torch_paged_attn.backends.triton.hopper.tile_scheduler import ENTRY
from torch_paged_attn.backends.triton.hopper.work_info import (
    FIRST_PART,
    HEAD,
    PIECE,
    PIECES,
    thread_barrier,
)

# of how many parts a consumer asks for rows together: of few rows of many, or of many rows
MANY, FEW = gl.constexpr(16), gl.constexpr(4)

# a counter's fields: how many have arrived, have given up waiting, and are done
ARRIVED, GAVE_UP, DONE = gl.constexpr(2**12 - 1), gl.constexpr(2**12), gl.constexpr(2**22)
# how often somebody looks whether all have arrived, each time for half a microsecond
MOST_LOOKS = gl.constexpr(256)


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


@gluon.constexpr_function
def _rows_together(at_once, options):
    """Of how many rows, with so many parts: as many elements as there are registers for."""
    is_alone = options.CONSUMERS == 1 and not options.CONVERTS_V
    return (16384 if is_alone else 8192) // at_once // options.WIDTH_V


@gluon.jit
def pack_pieces(pieces, waiting):
    """A word: how many pieces a tile has, and how many of them, the first ones, are waited for by
    who had them."""
    return waiting << 16 | pieces


@gluon.jit
def pieces_in(word):
    """How many pieces a tile has."""
    return word & 0xFFFF


@gluon.jit
def _part_number(first, piece, step, OPTIONS: gl.constexpr):
    """The number of a piece's part. Of dealt work a program has two parts, the one that it begins
    with and the one that it ends with, which is the first of its tile."""
    if OPTIONS.IS_DEALT:
        return first + piece * step - gl.where(piece > 0, OPTIONS.CONSUMERS, 0)
    else:
        return first + piece * step


@gluon.jit
def _leave_part(acc, m_i, total, part, rows, pointers, references, OPTIONS: gl.constexpr):
    """Write sums, references and sums of weights of a piece as part number `part`."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    result: gl.constexpr = acc.type.layout
    r = gl.arange(0, ROWS, m_i.type.layout)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, result)), 1)
    column = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(0, result)), 0)
    # rows past the tile's last token are nobody's
    exists = of_heads(rows.first_token + row // OPTIONS.HEAD_ROWS < rows.stop_token, row, OPTIONS)
    gl.store(pointers.parts + part * (ROWS * WIDTH) + row * WIDTH + column, acc, mask=exists)
    gl.store(references + part * (2 * ROWS) + r, m_i)
    gl.store(references + part * (2 * ROWS) + ROWS + r, total)


@gluon.jit
def _give_up(counter, seen, pieces):
    """Say that nobody waits here any more, unless all have arrived: then that is returned."""
    expected = seen
    seen = gl.atomic_cas(counter, expected, expected + GAVE_UP, sem="acq_rel")
    while (seen != expected) & ((seen & ARRIVED) < pieces):
        expected = seen
        seen = gl.atomic_cas(counter, expected, expected + GAVE_UP, sem="acq_rel")
    return seen


@gluon.jit
def _arrive(counter, piece, pieces, waiting, num_rows, OPTIONS: gl.constexpr):
    """Count a piece. Returns the first row that is to be added up here, and the one after the last;
    all parts of these are there."""
    seen = gl.atomic_add(counter, 1, sem="acq_rel") + 1
    is_last = (seen & ARRIVED) == pieces
    waits = piece < waiting
    if waits:
        looks = 0
        while ((seen & ARRIVED) < pieces) & (looks < MOST_LOOKS):
            seen = gl.atomic_add(counter, 0, sem="acquire")
            looks += 1
        if (seen & ARRIVED) < pieces:
            seen = _give_up(counter, seen, pieces)
    # of what has all arrived, nothing changes but how many are done
    are_there = (seen & ARRIVED) == pieces
    left = waiting - seen // GAVE_UP % (DONE // GAVE_UP)
    are_shared = are_there & (left == waiting) & (waiting > 0)
    first = gl.where(are_shared, num_rows * piece // gl.maximum(waiting, 1), 0)
    stop = gl.where(are_shared, num_rows * (piece + 1) // gl.maximum(waiting, 1), num_rows)
    is_mine = gl.where(are_shared, waits, is_last)
    if OPTIONS.IS_DEALT and are_there:
        # the last one that looks sets it to zero for the next launch
        others = left
        if waits:
            others -= gl.atomic_add(counter, DONE, sem="relaxed") // DONE + 1
        if others == 0:
            gl.store(counter, 0)
    return first, gl.where(is_mine, stop, first)


@gluon.jit
def merge_pieces(sums, rows, params, work_info, tile, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Leave this piece's part, and add up what is to be added up here: write these rows' logsumexp
    and results. Returns the token at which the tile stops for who writes results of whole tiles: 0.

    `sums` are weighted sums of values (rows, width), the rows' references in base two, and their
    sums of weights.
    """
    acc, m_i, total = sums
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    pointers = params.pointers
    piece = work_info.get(tile, PIECE)
    word = work_info.get(tile, PIECES)
    pieces = pieces_in(word)
    # parts of the heads lie side by side
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    first_part = work_info.get(tile, FIRST_PART)
    step = 2 * CONSUMERS
    if not OPTIONS.IS_DEALT:
        first_part = first_part * heads + work_info.get(tile, HEAD) // OPTIONS.PACKED_HEADS
        step = heads * CONSUMERS
    first_part = first_part * CONSUMERS + INDEX
    references = pointers.parts + OPTIONS.MOST_PARTS * CONSUMERS * ROWS * WIDTH
    parts = Parts(first_part, step, pieces, references)
    part = _part_number(first_part, piece, step, OPTIONS)
    _leave_part(acc, m_i, total, part, rows, pointers, references, OPTIONS)
    # every thread has written before one of them counts
    thread_barrier()
    if OPTIONS.IS_DEALT:
        counter = pointers.counters + first_part
    else:
        counter = pointers.tile_list + ENTRY + first_part
    tokens = gl.minimum(rows.stop_token - rows.first_token, OPTIONS.TOKENS)
    num_rows = gl.maximum(tokens, 0) * OPTIONS.HEAD_ROWS
    first, stop = _arrive(counter, piece, pieces, word >> 16, num_rows, OPTIONS)
    if stop - first > _rows_together(MANY, OPTIONS):
        _add_parts(first, stop, parts, rows, params, OPTIONS, FEW)
    elif stop > first:
        _add_parts(first, stop, parts, rows, params, OPTIONS, MANY)
    return rows.stop_token * 0


@gluon.jit
def _place_of(i, pieces, OPTIONS: gl.constexpr):
    """Which piece is number i, or the last, of those that are added up: stretches begin at the last
    keys."""
    i = gl.minimum(i, pieces - 1)
    if OPTIONS.STRETCH > 0:
        i = pieces - 1 - i
    return i


@gluon.jit
def _finite(m):
    """Rows that have seen no key yet keep -inf; shifting by 0 instead avoids inf - inf."""
    return gl.where(m == -float("inf"), 0.0, m)


@gluon.jit
def _add_parts(
    first, stop, parts, rows, params, OPTIONS: gl.constexpr, AT_ONCE: gl.constexpr
):  # fmt: skip
    """Add up rows [first, stop) of all parts, AT_ONCE of which are asked for together: others wrote
    them, so that they are not to be found in this multiprocessor's cache."""
    HEIGHT: gl.constexpr = OPTIONS.BLOCK_M
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
                place = _place_of(i + j, parts.count, OPTIONS)
                part = _part_number(parts.first, place, parts.step, OPTIONS)
                is_there = exists & (i + j < parts.count)
                of_part = parts.references + part * (2 * HEIGHT) + r
                values = pointers.parts + part * (HEIGHT * WIDTH) + column
                values += gl.expand_dims(r * WIDTH, 1)
                is_stored = gl.expand_dims(is_there, 1)
                found = found + (  # noqa: RUF005 (Triton knows no stars)
                    gl.load(of_part, is_there, -float("inf"), cache_modifier=".cg"),
                    gl.load(of_part + HEIGHT, is_there, 0.0, cache_modifier=".cg"),
                    gl.load(values, is_stored, 0.0, cache_modifier=".cg"),
                )
            m_all, total, acc = _fold_parts(m_all, total, acc, found, OPTIONS, AT_ONCE)
        token = rows.first_token + r // OPTIONS.HEAD_ROWS
        share = store_lse(m_all, total, rows, r, exists, exists, params, OPTIONS)
        head = rows.head + r % OPTIONS.HEAD_ROWS
        row = (rows.q_start + token).to(gl.int64) * params.scalars.num_heads + head
        out = pointers.out + gl.expand_dims(row * OPTIONS.MERGED_COLUMNS, 1) + column
        result = (acc * gl.expand_dims(share, 1)).to(pointers.out.dtype.element_ty)
        is_stored = gl.expand_dims(exists, 1)
        if WIDTH > OPTIONS.MERGED_COLUMNS:
            is_stored = is_stored & (column < OPTIONS.MERGED_COLUMNS)
        gl.store(out, result, mask=is_stored)


@gluon.jit
def _fold_parts(m_all, total, acc, found, OPTIONS: gl.constexpr, AT_ONCE: gl.constexpr):
    """References, sums of weights and sums of rows with those of more parts. Products and sums are
    fused where it says so: a row's bits are the same wherever it stands."""
    if OPTIONS.STRETCH > 0:
        for j in gl.static_range(AT_ONCE):
            m_all, apart = next_reference(m_all, found[3 * j])
            old, weight = factors(apart)
            total = fold(total, found[3 * j + 1], old, weight)
            acc = fold(acc, found[3 * j + 2], gl.expand_dims(old, 1), gl.expand_dims(weight, 1))
    else:
        m_new = m_all
        for j in gl.static_range(AT_ONCE):
            m_new = gl.maximum(m_new, found[3 * j])
        shift = _finite(m_new)
        old = gl.exp2(m_all - shift)
        total *= old
        acc *= gl.expand_dims(old, 1)
        for j in gl.static_range(AT_ONCE):
            weight = gl.exp2(found[3 * j] - shift)
            total = gl.fma(found[3 * j + 1], weight, total)
            acc = gl.fma(found[3 * j + 2], gl.expand_dims(weight, 1), acc)
        m_all = m_new
    return m_all, total, acc
