"""Which tiles of queries a program of the forward works on, in which order: one function for each
way, all with the same arguments and results.

VISIT(at, tile, n, *given) works on a `QueryTile`, the program's number `tile`, from fill n of keys
on, and returns the next n. Each way returns how many tiles the program had.

Tiles of a paged batch are found by their numbers, without a list, and without a launch that makes
one. Where each sequence has one tile, its number is the sequence's; elsewhere there are gaps, as in
`seqlen_info.py`. The last tile comes first: a causal sequence's longest tiles do. Only decodes that
engines put before chunks of prompts come before them, if one of them has the most keys. Programs
take tiles in turns at first, and claim the last ones, so that who has long tiles has fewer. The
heads of a tile are neighbours: together they read whole tokens of a cache.

Where sums are added up by stretches of keys (`stretches.py`), tiles of few queries may be cut: each
tile has as many units of work as the host says that there may be stretches.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.common.seqlen_info import key_span, query_span
from torch_paged_attn.backends.triton.hopper.schedule.dealt_work import (
    Piece,
    piece_of,
    sequence_of,
    share_of,
    tiles_of,
)
from torch_paged_attn.backends.triton.hopper.schedule.stretches import stretch_of
from torch_paged_attn.backends.triton.hopper.schedule.tile_scheduler import ENTRY

# sequences that are looked at at a time
SEARCHED_AT_ONCE = gl.constexpr(128)
# turns whose tiles are claimed, at most: a claim takes half a microsecond, if tiles see few keys.
# None where each sequence has one tile and the fewest keys of one are so many eighths of the most
CLAIMED_TURNS, ALIKE = gl.constexpr(3), gl.constexpr(7)


class Numbered(NamedTuple):
    """A tile, as values of the kernel."""

    b: Any
    sequence: Any
    first_token: Any
    exists: Any  # whether the number is a tile's, and not in a gap


class Numbers(NamedTuple):
    """Of tiles, as values of the kernel."""

    count: Any
    leading: Any  # the first ones in order of work, in rising order; then come the last ones
    without_gaps: Any  # whether each of them is a tile's
    are_alike: Any  # whether all tiles are known to see about as many keys


@gluon.jit
def numbers_of_tiles(params, room, OPTIONS: gl.constexpr):
    """The numbers of a launch, found out by a warp. With gaps, they are as many as `num_tiles` of
    `seqlen_info.py` says or, without rows past the last sequence, fewer. Without, they are those of
    sequences that have one tile each; no tile is of rows past the last one. `room`: units of work
    of a tile."""
    by_lane: gl.constexpr = gl.BlockedLayout([SEARCHED_AT_ONCE // 32], [32], [1], [0])
    STEP: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    total_q, batch = params.sizes.total_q, params.sizes.batch
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    has_padding = gl.load(params.pointers.cu_seqlens_q + batch) < total_q
    most = gl.where(has_padding, total_q // STEP + batch + 1, (total_q - 1) // STEP + batch)
    lane = gl.arange(0, SEARCHED_AT_ONCE, by_lane)
    ones = lane * 0
    first_long = ones + most
    longest = ones
    shortest = ones + 2**27
    # of one sequence, or a unit for each program, there is nothing to look at
    units = (total_q // STEP + batch + 1) * heads * room
    if (batch > 1) & (units > gl.num_programs(0)):
        for b0 in range(0, batch, SEARCHED_AT_ONCE):
            b = b0 + lane
            sequence = sequence_of(b, params, OPTIONS)
            has_one = ((b < batch) & (sequence.tiles == 1)).to(gl.int32)
            ones += has_one
            is_long = (b < batch) & (sequence.tiles > 1)
            first = gl.where(is_long, sequence.q_start // STEP + b, most)
            first_long = gl.minimum(first_long, first)
            # odd, if it is a sequence of one tile that has the most keys
            longest = gl.maximum(longest, gl.where(b < batch, 2 * sequence.units + has_one, 0))
            shortest = gl.minimum(shortest, gl.where(b < batch, sequence.units, 2**27))
    without_gaps = (gl.sum(ones, 0) == batch) & (not has_padding)
    most_keys = gl.max(longest, 0)
    leading = gl.min(first_long, 0)
    leading = gl.where((most_keys % 2 == 1) & (leading < most), leading, 0)
    are_alike = without_gaps & (8 * gl.min(shortest, 0) >= ALIKE * (most_keys // 2))
    return Numbers(gl.where(without_gaps, batch, most), leading, without_gaps, are_alike)


@gluon.jit
def find_numbered(number, without_gaps, params, OPTIONS: gl.constexpr):
    """Tile number `number`, found by a warp; none where it is negative."""
    by_lane: gl.constexpr = gl.BlockedLayout([SEARCHED_AT_ONCE // 32], [32], [1], [0])
    STEP: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    batch = params.sizes.batch
    b = gl.maximum(number, 0)
    if not without_gaps:
        lane = gl.arange(0, SEARCHED_AT_ONCE, by_lane)
        started = lane * 0
        for b0 in range(0, batch + 1, SEARCHED_AT_ONCE):
            other = b0 + lane
            bound = gl.load(params.pointers.cu_seqlens_q + other, mask=other <= batch, other=0)
            started += ((other <= batch) & (bound // STEP + other <= number)).to(gl.int32)
        b = gl.maximum(gl.sum(started, 0) - 1, 0)
    sequence = sequence_of(b, params, OPTIONS)
    place = number - b
    if not without_gaps:
        place -= sequence.q_start // STEP
    first_token = place * STEP
    exists = (place >= 0) & (first_token < sequence.query_len)
    return Numbered(b, sequence, first_token, exists)


@gluon.jit
def stretch_of_unit(unit, sequence, units, params, OPTIONS: gl.constexpr):
    """The stretch of keys that is unit number `unit`, of `units` of a launch, of a sequence's tile;
    `number` is no less than `pieces` where there is none. A sequence in more stretches than a tile
    has room for is not cut."""
    room = params.sizes.heads_per_unit
    first_seen = unit * 0
    if OPTIONS.HAS_LEFT:
        first_seen = sequence.key_len - sequence.query_len - params.scalars.window_left
        first_seen = gl.maximum(first_seen, 0)
    last = gl.maximum(sequence.key_len - 1, 0)
    pieces = stretch_of(last, OPTIONS.STRETCH) + 1 - stretch_of(first_seen, OPTIONS.STRETCH)
    pieces = gl.where(pieces > room, 1, gl.maximum(pieces, 1))
    # where each program has one unit at most, those of a tile wait for each other
    waiting = gl.where(units <= gl.num_programs(0), pieces, 0)
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    first_part = unit // room // heads * room
    return Piece(unit, unit, unit % room, pieces, waiting, first_part)


@gluon.jit
def claim_unit(first, units, params, OPTIONS: gl.constexpr):
    """The next of `units` units, from number `first` on, that no program has: no less than `units`
    where there is none. Every program that has units claims another in vain; the last to do so
    makes the counter zero for the next launch."""
    counter = params.pointers.counters + OPTIONS.COUNTERS
    claimed = gl.atomic_add(counter, 1)
    if claimed == gl.minimum(gl.num_programs(0), units) + gl.maximum(units - first, 0) - 1:
        gl.store(counter, 0)
    return claimed + first


class QueryTile(NamedTuple):
    """A tile of queries of a head, or of heads that share it, as values of the kernel."""

    head: Any
    entry: Any  # of the list of tiles; 0 where there is none
    b: Any
    first_token: Any
    q_start: Any  # of the sequence, like the next three
    query_len: Any
    k_start: Any
    key_len: Any
    stop_token: Any
    piece: Any = 0  # of `dealt_work.py`, unless it is in the list
    is_last: Any = 0  # whether it is known that the program has no tile after this one


@gluon.jit
def _tile_of(unit, tile_list_ptr, num_tiles, heads_per_unit, is_last, COUNTERS: gl.constexpr):
    """Head and entry of a unit of work: a tile for each of `heads_per_unit` heads, which share
    keys, then the next tile; then the next heads."""
    tile = unit // heads_per_unit
    head = tile // num_tiles * heads_per_unit + unit % heads_per_unit
    entry = tile_list_ptr + COUNTERS + (1 + tile % num_tiles) * ENTRY
    b, first_token, q_start = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    query_len, k_start, key_len = gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)
    stop_token = gl.load(entry + 6)
    return QueryTile(
        head, entry, b, first_token, q_start, query_len, k_start, key_len, stop_token, 0, is_last
    )


@gluon.jit
def _lengths_of(b, params):
    """Of sequence b of a packed batch: first row and number of queries, first row and number of
    keys. The rows past the last sequence are one more, without keys."""
    pointers, sizes = params.pointers, params.sizes
    q_start, q_stop = query_span(b, pointers.cu_seqlens_q, sizes.batch, sizes.total_q)
    # rows nobody checked must not lead outside the tensors
    q_start, q_stop = gl.maximum(q_start, 0), gl.minimum(q_stop, sizes.total_q)
    k_start, key_len = key_span(
        b, pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.seqused_k, sizes.batch,
        sizes.num_pages, False,
    )  # fmt: skip
    return q_start, gl.maximum(q_stop - q_start, 0), k_start, key_len


@gluon.jit
def visit_tiles(params, VISIT: gl.constexpr, given, OPTIONS: gl.constexpr):
    """Visit a program's tiles, in the way that the kernel is compiled for."""
    if OPTIONS.IS_DEALT:
        return _visit_dealt(params, VISIT, given, OPTIONS)
    elif OPTIONS.IS_LISTED:
        return _visit_listed(params, VISIT, given, OPTIONS)
    elif OPTIONS.IS_NUMBERED and OPTIONS.MOST_PARTS > 0:
        return _visit_stretches(params, VISIT, given, OPTIONS)
    elif OPTIONS.IS_NUMBERED:
        return _visit_numbered(params, VISIT, given, OPTIONS)
    else:
        return _visit_in_turns(params, VISIT, given, OPTIONS)


@gluon.jit
def _visit_dealt(params, VISIT: gl.constexpr, given, OPTIONS: gl.constexpr):
    """Those of an equal share of all keys (`dealt_work.py`)."""
    STEP: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    tile = 0
    n = 0
    program = gl.program_id(0)
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    share = share_of(program, gl.num_programs(0), params, OPTIONS)
    b, base = share.b, share.base
    while base < share.stop:
        sequence = sequence_of(b, params, OPTIONS)
        first, last = tiles_of(sequence, base, share, heads, OPTIONS)
        for number in range(first, last):
            first_token = number // heads * STEP
            stop_token = gl.minimum(first_token + STEP, sequence.query_len)
            piece = piece_of(number, sequence, base, program, share, OPTIONS)
            at = QueryTile(
                number % heads, 0, b, first_token, sequence.q_start, sequence.query_len,
                sequence.k_start, sequence.key_len, stop_token, piece,
            )  # fmt: skip
            n = VISIT(at, tile, n, *given)
            tile += 1
        base += sequence.tiles * heads * sequence.units
        b += 1
    return tile


@gluon.jit
def _visit_listed(params, VISIT: gl.constexpr, given, OPTIONS: gl.constexpr):
    """Those of a list, the longest first, that no other program has claimed."""
    tile_list = params.pointers.tile_list
    programs = gl.num_programs(0)
    tile = 0
    n = 0
    unit = gl.program_id(0)
    num_tiles = gl.load(tile_list + 1)
    units = num_tiles * (params.scalars.num_heads // OPTIONS.PACKED_HEADS)
    while unit < units:
        # all units are worked on at once, if they are no more than programs
        at = _tile_of(
            unit, tile_list, num_tiles, params.sizes.heads_per_unit, units <= programs,
            OPTIONS.COUNTERS,
        )  # fmt: skip
        n = VISIT(at, tile, n, *given)
        tile += 1
        # claimed while the consumers are busy, so that the next queries are there in time
        unit = gl.atomic_add(tile_list, 1) + programs
    return tile


@gluon.jit
def _visit_stretches(params, VISIT: gl.constexpr, given, OPTIONS: gl.constexpr):
    """Stretches of keys of tiles that are found by their numbers."""
    STEP: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    tile = 0
    n = 0
    unit = gl.program_id(0)
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    room = params.sizes.heads_per_unit
    programs = gl.num_programs(0)
    numbers = numbers_of_tiles(params, room, OPTIONS)
    units = numbers.count * heads * room
    while unit < units:
        found = find_numbered(unit // room // heads, numbers.without_gaps, params, OPTIONS)
        sequence = found.sequence
        piece = stretch_of_unit(unit, sequence, units, params, OPTIONS)
        if found.exists & (piece.number < piece.pieces):
            at = QueryTile(
                unit // room % heads, 0, found.b, found.first_token, sequence.q_start,
                sequence.query_len, sequence.k_start, sequence.key_len,
                gl.minimum(found.first_token + STEP, sequence.query_len), piece,
            )  # fmt: skip
            n = VISIT(at, tile, n, *given)
            tile += 1
        unit = claim_unit(programs, units, params, OPTIONS)
    return tile


@gluon.jit
def _visit_numbered(params, VISIT: gl.constexpr, given, OPTIONS: gl.constexpr):
    """Tiles that are found by their numbers, whole: in turns, and then those that no other program
    has claimed."""
    STEP: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    tile = 0
    n = 0
    unit = gl.program_id(0)
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    numbers = numbers_of_tiles(params, 1, OPTIONS)
    units = numbers.count * heads
    programs = gl.num_programs(0)
    turns = (units + programs - 1) // programs
    unclaimed = gl.where(numbers.are_alike, turns, gl.maximum(turns - CLAIMED_TURNS, 1))
    first_claimed = unclaimed * programs
    while unit < units:
        place = unit // heads
        number = gl.where(
            place < numbers.leading, place, numbers.count - 1 - (place - numbers.leading)
        )
        found = find_numbered(number, numbers.without_gaps, params, OPTIONS)
        if found.exists:
            sequence = found.sequence
            at = QueryTile(
                unit % heads, 0, found.b, found.first_token, sequence.q_start,
                sequence.query_len, sequence.k_start, sequence.key_len,
                gl.minimum(found.first_token + STEP, sequence.query_len),
            )  # fmt: skip
            n = VISIT(at, tile, n, *given)
            tile += 1
        unit += programs
        if (unit >= first_claimed) & (first_claimed < units):
            unit = claim_unit(first_claimed, units, params, OPTIONS)
    return tile


@gluon.jit
def _visit_in_turns(params, VISIT: gl.constexpr, given, OPTIONS: gl.constexpr):
    """Tiles of short packed sequences: those of each are dealt in turns to as many units of work as
    the host says, and units to programs."""
    STEP: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    programs = gl.num_programs(0)
    tile = 0
    n = 0
    unit = gl.program_id(0)
    heads = params.scalars.num_heads // OPTIONS.PACKED_HEADS
    in_turns = params.sizes.lists_per_head
    # units of a sequence, for each head
    units = (params.sizes.batch + 1) * in_turns * heads
    while unit < units:
        # heads are neighbours: together they read whole tokens
        place = unit // heads
        b = place // in_turns
        q_start, query_len, k_start, key_len = _lengths_of(b, params)
        for first_token in range(place % in_turns * STEP, query_len, in_turns * STEP):
            stop_token = gl.minimum(first_token + STEP, query_len)
            at = QueryTile(
                unit % heads, 0, b, first_token, q_start, query_len, k_start, key_len, stop_token
            )
            n = VISIT(at, tile, n, *given)
            tile += 1
        unit += programs
    return tile
