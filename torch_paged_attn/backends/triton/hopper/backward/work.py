"""How a program of the backward goes through the tiles of a list (`tile_scheduler.py`).

There is one program on each multiprocessor. Its first producer claims one tile after the other, the
longest first, and tells the other warps of it: numbers in shared memory, under the names below.
"""

from collections import namedtuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.common.pipeline import Pipeline
from torch_paged_attn.backends.triton.hopper.common.work_info import (
    Names,
    new_work_info,
    thread_barrier,
)
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
    info = new_work_info(TILES_KNOWN)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    read = gl.allocate_shared_memory(gl.int64, [TILES_KNOWN, 1], barrier)
    for i in gl.static_range(TILES_KNOWN):
        mbarrier.init(read.index(i), count=READERS)
    return info, Pipeline(info.words, info.published, read, TILES_KNOWN)


@gluon.jit
def load_entry(unit, tile_list_ptr, num_tiles):
    """A unit of work, all tiles of a head before those of the next. Returns its head, sequence and
    first row, the sequence's first query and their number, its first key and their number, and the
    row after the tile's last."""
    entry = tile_list_ptr + (1 + unit % num_tiles) * ENTRY
    b, first, q_start = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    query_len, k_start, key_len = gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)
    return unit // num_tiles, b, first, q_start, query_len, k_start, key_len, gl.load(entry + 6)


@gluon.jit
def publish(claims, tile):
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
def end_claims(pipelines, tile):
    """Tell the other warps that there is no tile number `tile`."""
    pipelines.claims.producer_acquire(tile)
    pipelines.info.put(tile, FIELD.STEPS, -1)
    publish(pipelines.claims, tile)


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
