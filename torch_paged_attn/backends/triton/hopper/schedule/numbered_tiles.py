"""Tiles of queries of a paged batch, found by their numbers: without a list, and without a launch
that makes one.

They are numbered with gaps, as in `seqlen_info.py`, from the last to the first: a causal sequence's
longest tiles come first, and engines put decodes before chunks of prompts. Programs take them in
turns, back and forth, so that who has a longer one in a turn has a shorter one in the next. The
heads of a tile are neighbours: together they read whole tokens of a cache.

Where sums are added up by stretches of keys (`stretches.py`), tiles of few queries may be cut: each
tile has as many units of work as the host says that there may be stretches.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.hopper.schedule.dealt_work import Piece, sequence_of
from torch_paged_attn.backends.triton.hopper.schedule.stretches import stretch_of

# sequences that are looked at at a time
SEARCHED_AT_ONCE = gl.constexpr(128)


class Numbered(NamedTuple):
    """A tile, as values of the kernel."""

    b: Any
    sequence: Any
    first_token: Any
    exists: Any  # whether the number is a tile's, and not in a gap


@gluon.jit
def numbers_of_tiles(params, OPTIONS: gl.constexpr):
    """How many numbers there are: what `num_tiles` of `seqlen_info.py` says or, without rows past
    the last sequence, fewer. Those of no tile would be a turn of some programs, which then have one
    tile less than others."""
    STEP: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    total_q, batch = params.sizes.total_q, params.sizes.batch
    has_padding = gl.load(params.pointers.cu_seqlens_q + batch) < total_q
    return gl.where(has_padding, total_q // STEP + batch + 1, (total_q - 1) // STEP + batch)


@gluon.jit
def find_numbered(number, params, OPTIONS: gl.constexpr):
    """Tile number `number`, found by a warp; none where it is negative."""
    by_lane: gl.constexpr = gl.BlockedLayout([SEARCHED_AT_ONCE // 32], [32], [1], [0])
    STEP: gl.constexpr = OPTIONS.ROW_GROUPS * OPTIONS.TOKENS
    batch = params.sizes.batch
    lane = gl.arange(0, SEARCHED_AT_ONCE, by_lane)
    started = lane * 0
    for b0 in range(0, batch + 1, SEARCHED_AT_ONCE):
        other = b0 + lane
        bound = gl.load(params.pointers.cu_seqlens_q + other, mask=other <= batch, other=0)
        started += ((other <= batch) & (bound // STEP + other <= number)).to(gl.int32)
    b = gl.maximum(gl.sum(started, 0) - 1, 0)
    sequence = sequence_of(b, params, OPTIONS)
    place = number - sequence.q_start // STEP - b
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
def claim_unit(units, params, OPTIONS: gl.constexpr):
    """The next of `units` units that no program has: no less than `units` where there is none.
    Every program that had one claims another in vain; the last to do so makes the counter zero for
    the next launch."""
    counter = params.pointers.counters + OPTIONS.COUNTERS
    claimed = gl.atomic_add(counter, 1)
    if claimed == units - 1:
        gl.store(counter, 0)
    return claimed + gl.num_programs(0)
