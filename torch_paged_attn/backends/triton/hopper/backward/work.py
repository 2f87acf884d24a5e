"""How a program of the backward goes through the tiles of a list (`tile_scheduler.py`).

There is one program on each multiprocessor. Its first producer claims one tile after the other, the
longest first, and tells the other warps of it: numbers in shared memory, under the names below.
"""

from collections import namedtuple
from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.common.names import Names
from torch_paged_attn.backends.triton.hopper.common.pipeline import Pipeline, new_barriers
from torch_paged_attn.backends.triton.hopper.common.work_info import new_work_info, thread_barrier
from torch_paged_attn.backends.triton.hopper.schedule.tile_scheduler import ENTRY

# STEPS: tiles that pass by, from row FIRST_PASS on, for each head that the tile meets; -1: there is
# no tile. The tile that stays has rows FIRST_STAY to STOP_STAY of its sequence. HEAD: of that tile.
# STATISTICS_TILE: of row FIRST_PASS if queries pass by, of the sequence's row 0 if queries stay.
# FIRST_LIVE: queries before this row see no key; only where queries pass by.
Fields = namedtuple(
    "Fields",
    "STEPS FIRST_PASS FIRST_STAY HEAD Q_START QUERY_LEN K_START KEY_LEN"
    " CONTEXT_LEN STOP_STAY STATISTICS_TILE BATCH FIRST_LIVE",
)
FIELD = Names(Fields(*range(len(Fields._fields))))

# rows of a tile of statistics (`common/backward_preprocess.py`)
STATISTICS_ROWS = gl.constexpr(64)

# tiles of which numbers are kept, so that the next one can be loaded ahead
TILES_KNOWN = gl.constexpr(2)


@gluon.jit
def new_claims(READERS: gl.constexpr):
    """Room for the numbers of tiles, and a pipeline for it: its fills are tiles, its consumers the
    READERS partitions of warps that read the numbers."""
    info = new_work_info(TILES_KNOWN, new_barriers(TILES_KNOWN, 1))
    read = new_barriers(TILES_KNOWN, READERS)
    return info, Pipeline(info.words, info.published, read, TILES_KNOWN)


class Entry(NamedTuple):
    """A tile that stays, as values of the kernel. `start` and `size` are the row of a sequence's
    first query, or key, and how many there are."""

    head: Any
    b: Any
    first: Any
    q_start: Any
    query_len: Any
    k_start: Any
    key_len: Any
    context_len: Any
    stop: Any


class Passing(NamedTuple):
    """What passes by it: the values of `FIELD` with these names."""

    steps: Any
    first: Any
    statistics_tile: Any
    first_live: Any


@gluon.jit
def _load_entry(unit, tile_list_ptr, num_tiles):
    """A unit of work, all tiles of a head before those of the next."""
    entry = tile_list_ptr + (1 + unit % num_tiles) * ENTRY
    b, first, q_start = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    query_len, k_start, key_len = gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)
    head = unit // num_tiles
    stop = gl.load(entry + 6)
    context_len = key_len - query_len
    return Entry(head, b, first, q_start, query_len, k_start, key_len, context_len, stop)


@gluon.jit
def claim_tiles(
    params, pipelines, FIND: gl.constexpr, LOAD: gl.constexpr, OF_KEYS: gl.constexpr,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """Claim tiles until there are none, and write the numbers of each for the other warps. FIND
    says what passes by a tile; LOAD loads a part of it, from fill n on, and returns the next n."""
    pointers, info, claims = params.pointers, pipelines.info, pipelines.claims
    programs = gl.num_programs(0)
    num_tiles = gl.load(pointers.tile_list + 1)
    units = num_tiles * params.scalars.heads
    tile = 0
    n = 0
    unit = gl.program_id(0)
    while unit < units:
        at = _load_entry(unit, pointers.tile_list, num_tiles)
        passing = FIND(at, params, OPTIONS)

        claims.producer_acquire(tile)
        info.put(tile, FIELD.STEPS, passing.steps)
        info.put(tile, FIELD.FIRST_PASS, passing.first)
        info.put(tile, FIELD.FIRST_STAY, at.first)
        info.put(tile, FIELD.HEAD, at.head)
        info.put(tile, FIELD.Q_START, at.q_start)
        if OF_KEYS:
            info.put(tile, FIELD.QUERY_LEN, at.query_len)
        info.put(tile, FIELD.K_START, at.k_start)
        info.put(tile, FIELD.KEY_LEN, at.key_len)
        info.put(tile, FIELD.CONTEXT_LEN, at.context_len)
        info.put(tile, FIELD.STOP_STAY, at.stop)
        info.put(tile, FIELD.STATISTICS_TILE, passing.statistics_tile)
        info.put(tile, FIELD.BATCH, at.b)
        if OF_KEYS:
            info.put(tile, FIELD.FIRST_LIVE, passing.first_live)
        _publish(claims, tile)

        n = LOAD(n, tile, at, passing, params, pipelines, OPTIONS)
        tile += 1
        unit = gl.atomic_add(pointers.tile_list, 1) + programs

    claims.producer_acquire(tile)
    info.put(tile, FIELD.STEPS, -1)
    _publish(claims, tile)


@gluon.jit
def visit_tiles(params, pipelines, VISIT: gl.constexpr, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Have VISIT work on every tile that is claimed, from fill n on; it returns the next n. INDEX:
    number of a consumer, 0 for other warps."""
    n = 0
    tile = 0
    steps = steps_of(pipelines, 0)
    while steps >= 0:
        n = VISIT(n, tile, steps, params, pipelines, OPTIONS, INDEX)
        tile += 1
        steps = steps_of(pipelines, tile)


@gluon.jit
def _publish(claims, tile):
    """Let the other warps read the numbers of a tile."""
    thread_barrier()  # the thread that arrives has not written all of these
    mbarrier.arrive(claims.full_barrier(tile), count=1)


@gluon.jit
def slope_of(b, head, params):
    """A head's ALiBi slope for sequence b, in the unit of scores; 0 for rows of no sequence."""
    slope = 0.0
    if params.pointers.alibi_slopes is not None:
        scalars = params.scalars
        slope_ptr = params.pointers.alibi_slopes + b * scalars.stride_alibi_batch
        slope_ptr += head * scalars.stride_alibi_head
        slope = gl.load(slope_ptr, mask=b < params.sizes.batch, other=0.0) * scalars.alibi_scale
    return slope


@gluon.jit
def steps_of(pipelines, tile):
    """Wait for the numbers of a tile. Returns its STEPS."""
    pipelines.claims.consumer_wait(tile)
    return pipelines.info.get(tile, FIELD.STEPS)


@gluon.jit
def pass_by(first, second, n, count):
    """Release fills n to n + count of two pipelines, which a consumer does not need."""
    for i in range(n, n + count):
        first.consumer_wait(i)
        first.consumer_release(i)
        second.consumer_wait(i)
        second.consumer_release(i)
    return n + count
