"""Queries and keys of latent attention in shared memory.

Keys come in pairs of blocks of 64. A block is read three times: for scores, by one consumer, and as
values, by both, each for its half of the columns. So a pair has four *quarters*, one half of one
block's columns each, and a quarter is loaded anew as soon as its last reader is done. Consumer W
computes the scores of block W, whose quarters are:

- quarter 2 W: the columns that consumer W needs as values. Nobody else reads it.
- quarter 2 W + 1: the columns that the other consumer needs as values, and the 64 columns that are
  no values. Once consumer W has the scores, its probabilities take the place of these 64 columns;
  the other consumer reads them there, and is the quarter's last reader.

The columns of a quarter arrive in one or several boxes, each with a barrier of its own.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.common.pipeline import new_barriers
from torch_paged_attn.backends.triton.hopper.common.records import record
from torch_paged_attn.backends.triton.hopper.common.work_info import thread_barrier

# rows of a tile of queries; keys of a block; columns of a quarter; columns that are no values
ROWS, KEYS, HALF, ROPE = (gl.constexpr(i) for i in (64, 64, 256, 64))
QUARTERS = gl.constexpr(4)


@gluon.jit
def opaque_zero(n):
    """Zero for n >= 0, which the compiler does not know. It would keep the descriptors of places in
    shared memory that it knows to be the same in every step, and has no registers for them."""
    return gl.minimum(n, 0)


@record
class LatentKeys:
    """The quarters of a pair of blocks, in one stage. `n` is the number of a pair."""

    halves: gl.shared_memory_descriptor  # (QUARTERS, 1, 1, KEYS, 1, HALF)
    ropes: gl.shared_memory_descriptor  # (2, 1, 1, KEYS, 1, ROPE)
    full: gl.shared_memory_descriptor  # a barrier for each column box of each quarter
    empty: gl.shared_memory_descriptor  # a barrier for each quarter
    COLUMN_BOXES: gl.constexpr

    @gluon.jit
    def half(self, n, QUARTER: gl.constexpr):
        """The columns of a quarter that are values: (KEYS, HALF)."""
        return self.halves.index(QUARTER + opaque_zero(n)).reshape([KEYS, HALF])

    @gluon.jit
    def rope(self, n, BLOCK: gl.constexpr):
        """The columns of a block that are no values, later its probabilities, (ROWS, KEYS)."""
        return self.ropes.index(BLOCK + opaque_zero(n)).reshape([KEYS, ROPE])

    @gluon.jit
    def acquire(self, n, QUARTER: gl.constexpr):
        """Wait, as the producer, until a quarter of pair n may be loaded."""
        mbarrier.wait(self.empty.index(QUARTER), (n & 1) ^ 1)

    @gluon.jit
    def full_barrier(self, QUARTER: gl.constexpr, BOX: gl.constexpr):
        """The barrier that the loads of a quarter's column box complete."""
        return self.full.index(self.COLUMN_BOXES * QUARTER + BOX)

    @gluon.jit
    def wait(self, n, QUARTER: gl.constexpr, BOX: gl.constexpr, exists=True):
        """Wait until a column box of a quarter of pair n has arrived, if there is such a pair."""
        mbarrier.wait(self.full_barrier(QUARTER, BOX), n & 1, pred=exists)

    @gluon.jit
    def release(self, QUARTER: gl.constexpr):
        """Release a quarter, as its last reader."""
        mbarrier.arrive(self.empty.index(QUARTER), count=1)


@record
class LatentQueries:
    """A tile of queries. Later its result takes the place of `halves`."""

    halves: gl.shared_memory_descriptor  # (2, 1, 1, TOKENS, PACKED_HEADS, HALF)
    rope: gl.shared_memory_descriptor  # (1, 1, 1, TOKENS, PACKED_HEADS, ROPE)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.jit
    def half(self, n, SIDE: gl.constexpr):
        """Half of the columns that are not `rope`: (ROWS, HALF). n is any number >= 0."""
        return self.halves.index(SIDE + opaque_zero(n)).reshape([ROWS, HALF])

    @gluon.jit
    def acquire(self, tile):
        """Wait, as the producer, until queries of a program's tile may be loaded."""
        mbarrier.wait(self.empty.index(0), (tile & 1) ^ 1)

    @gluon.jit
    def wait(self, tile):
        """Wait until the queries of a tile, and its words in `work_info`, have arrived."""
        mbarrier.wait(self.full.index(0), tile & 1)

    @gluon.jit
    def release(self):
        """Release a tile, as a consumer."""
        mbarrier.arrive(self.empty.index(0), count=1)


@record
class Exchange:
    """Numbers of rows that consumers give each other, by KIND: references (0), factors of the sums
    of earlier blocks (1), and at a tile's end sums of weights (2)."""

    rows: gl.shared_memory_descriptor  # (6, ROWS) float32
    sent: gl.shared_memory_descriptor  # a barrier for each consumer: its block's are there
    ended: gl.shared_memory_descriptor  # the same: its sums of the tile are there

    @gluon.jit
    def of(self, WARPGROUP: gl.constexpr, KIND: gl.constexpr):
        """Where a consumer leaves its numbers of a kind."""
        return self.rows.index(3 * WARPGROUP + KIND)


@record
class SeenKeys:
    """Which keys of the blocks of a pair are seen, where lists name them. The room of block W is
    written anew when quarter 2 W is."""

    limits: gl.shared_memory_descriptor  # of scores, (2, KEYS) float32: -inf for keys not seen
    whole: gl.shared_memory_descriptor  # (2, 4): whether all keys are seen that a warp copies
    full: gl.shared_memory_descriptor  # a barrier for each block

    @gluon.jit
    def put(self, is_seen, BLOCK: gl.constexpr):
        """Write, as the producer, which keys of a block are seen. Warp w copies rows 16 i + 4 w + j
        for each i, j < 4."""
        self.limits.index(BLOCK).store(gl.where(is_seen, float("inf"), -float("inf")))
        of_warp = gl.reshape(is_seen.to(gl.int32), [4, 4, 4])
        self.whole.index(BLOCK).store(gl.min(gl.min(of_warp, 0), 1))
        thread_barrier()  # the thread that arrives has not written all of these
        mbarrier.arrive(self.full.index(BLOCK), count=1)

    @gluon.jit
    def hide(self, s, n, BLOCK: gl.constexpr, OF_HEADS: gl.constexpr = 0):
        """Scores of a block of pair n; -inf where a key is not seen, also in place of NaN. Axis
        OF_HEADS has the heads."""
        four: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        mbarrier.wait(self.full.index(BLOCK), n & 1)
        if gl.min(self.whole.index(BLOCK).load(four), 0) == 0:
            limit = self.limits.index(BLOCK).load(gl.SliceLayout(OF_HEADS, s.type.layout))
            s = gl.minimum(s, gl.expand_dims(limit, OF_HEADS))
        return s


class LatentPipelines(NamedTuple):
    """All of these, and the words about each tile (`work_info.py`)."""

    q: Any
    k: Any
    exchange: Any
    work_info: Any
    seen: Any = None
    weights: Any = None  # of a block, for few heads


@gluon.jit
def new_queries(desc, rope_desc, OPTIONS: gl.constexpr, CONSUMERS: gl.constexpr = 2):
    """Room for a tile of queries."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    half: gl.constexpr = [2, 1, 1, OPTIONS.TOKENS, HEADS, HALF]
    rest: gl.constexpr = [1, 1, 1, OPTIONS.TOKENS, HEADS, ROPE]
    halves = gl.allocate_shared_memory(desc.dtype, half, desc.layout)
    rope = gl.allocate_shared_memory(desc.dtype, rest, rope_desc.layout)
    return LatentQueries(halves, rope, new_barriers(1, 1), new_barriers(1, CONSUMERS))


@gluon.jit
def new_keys(desc, rope_desc, OPTIONS: gl.constexpr):
    """Room for a pair of blocks."""
    half: gl.constexpr = [QUARTERS, 1, 1, KEYS, 1, HALF]
    rest: gl.constexpr = [2, 1, 1, KEYS, 1, ROPE]
    halves = gl.allocate_shared_memory(desc.dtype, half, desc.layout)
    ropes = gl.allocate_shared_memory(desc.dtype, rest, rope_desc.layout)
    # of keys that threads copy, each of the producer's threads says when its share has arrived
    ARRIVALS: gl.constexpr = 128 if OPTIONS.OF_LISTS else 1
    full, empty = new_barriers(QUARTERS * OPTIONS.COLUMN_BOXES, ARRIVALS), new_barriers(QUARTERS, 1)
    return LatentKeys(halves, ropes, full, empty, OPTIONS.COLUMN_BOXES)


@gluon.jit
def new_exchange():
    """Room for what consumers give each other."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.float32, [6, ROWS], layout)
    return Exchange(rows, new_barriers(2, 1), new_barriers(2, 1))


@gluon.jit
def new_seen_keys():
    """Room for which keys of a pair of blocks are seen."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    limits = gl.allocate_shared_memory(gl.float32, [2, KEYS], layout)
    whole = gl.allocate_shared_memory(gl.int32, [2, 4], layout)
    return SeenKeys(limits, whole, new_barriers(2, 1))


@gluon.jit
def new_weights(dtype: gl.constexpr, WEIGHTS: gl.constexpr):
    """Room for so many weights of each of a block's keys."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    shape: gl.constexpr = [WEIGHTS, KEYS]
    return gl.allocate_shared_memory(dtype, shape, swizzled)
