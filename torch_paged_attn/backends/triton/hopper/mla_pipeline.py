"""Queries and keys of latent attention in shared memory.

Keys come in pairs of blocks of 64. A block is read three times: for scores, by one consumer, and as
values, by both, each for its half of the columns. So each half is a unit of its own, loaded again
as soon as its last reader is done. Of block W, whose scores consumer W multiplies:

- unit 2 W: the half that consumer W has as values. Nobody else reads it.
- unit 2 W + 1: the half that the other consumer has as values, and the 64 columns that are no
  values. When consumer W has the scores, its probabilities take the place of these columns; the
  other consumer reads them there, and is the unit's last reader.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate

# rows of a tile of queries, keys of a block, columns of a unit and of the rest
ROWS, KEYS, HALF, ROPE = (gl.constexpr(i) for i in (64, 64, 256, 64))
UNITS = gl.constexpr(4)


@gluon.jit
def _none_of(n):
    """Zero, but the compiler does not know: of places in shared memory that it knows to be the same
    in every step it would keep the descriptors, more than there are registers."""
    return gl.minimum(n, 0)


@aggregate
class LatentKeys:
    """The units of a pair of blocks, in one stage. Pairs are numbered by `n`."""

    halves: gl.shared_memory_descriptor  # (UNITS, 1, 1, KEYS, 1, HALF)
    ropes: gl.shared_memory_descriptor  # (2, 1, 1, KEYS, 1, ROPE)
    full: gl.shared_memory_descriptor  # of each piece of a unit
    empty: gl.shared_memory_descriptor  # of each unit
    PIECES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, halves, ropes, full, empty, PIECES):
        self.halves = halves
        self.ropes = ropes
        self.full = full
        self.empty = empty
        self.PIECES = gl.constexpr(PIECES)

    @gluon.jit
    def half(self, n, UNIT: gl.constexpr):
        """The columns of a unit that are values: (KEYS, HALF)."""
        return self.halves.index(UNIT + _none_of(n)).reshape([KEYS, HALF])

    @gluon.jit
    def rope(self, n, BLOCK: gl.constexpr):
        """The columns of a block that are no values, later its probabilities, (ROWS, KEYS)."""
        return self.ropes.index(BLOCK + _none_of(n)).reshape([KEYS, ROPE])

    @gluon.jit
    def acquire(self, n, UNIT: gl.constexpr):
        """Wait, as the producer, until a unit may be loaded with that of pair n."""
        mbarrier.wait(self.empty.index(UNIT), (n & 1) ^ 1)

    @gluon.jit
    def full_barrier(self, UNIT: gl.constexpr, PIECE: gl.constexpr):
        """The barrier that the loads of a piece of a unit complete."""
        return self.full.index(self.PIECES * UNIT + PIECE)

    @gluon.jit
    def wait(self, n, UNIT: gl.constexpr, PIECE: gl.constexpr):
        """Wait until a piece of a unit of pair n has arrived."""
        mbarrier.wait(self.full_barrier(UNIT, PIECE), n & 1)

    @gluon.jit
    def release(self, UNIT: gl.constexpr):
        """Say, as its last reader, that a unit is done with."""
        mbarrier.arrive(self.empty.index(UNIT), count=1)


@aggregate
class LatentQueries:
    """A tile of queries, and later the result in place of its first two thirds."""

    halves: gl.shared_memory_descriptor  # (2, 1, 1, TOKENS, PACKED_HEADS, HALF)
    rope: gl.shared_memory_descriptor  # (1, 1, 1, TOKENS, PACKED_HEADS, ROPE)
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor

    @gluon.constexpr_function
    def __init__(self, halves, rope, full, empty):
        self.halves = halves
        self.rope = rope
        self.full = full
        self.empty = empty

    @gluon.jit
    def half(self, n, SIDE: gl.constexpr):
        """(ROWS, HALF)."""
        return self.halves.index(SIDE + _none_of(n)).reshape([ROWS, HALF])

    @gluon.jit
    def acquire(self, tile):
        """Wait, as the producer, until queries of a program's tile may be loaded."""
        mbarrier.wait(self.empty.index(0), (tile & 1) ^ 1)

    @gluon.jit
    def wait(self, tile):
        """Wait until the queries of a tile, and what is said of it, have arrived."""
        mbarrier.wait(self.full.index(0), tile & 1)

    @gluon.jit
    def release(self):
        """Say, as a consumer, that a tile is done with."""
        mbarrier.arrive(self.empty.index(0), count=1)


@aggregate
class Exchange:
    """What consumers tell each other by row: references (0), factors of what came before (1), and
    in the end sums (2)."""

    rows: gl.shared_memory_descriptor  # (6, ROWS) float32
    told: gl.shared_memory_descriptor  # of each consumer, once for each pair
    ended: gl.shared_memory_descriptor  # once for each tile

    @gluon.constexpr_function
    def __init__(self, rows, told, ended):
        self.rows = rows
        self.told = told
        self.ended = ended

    @gluon.jit
    def of(self, WARPGROUP: gl.constexpr, WHAT: gl.constexpr):
        """Where a consumer's numbers of a kind are."""
        return self.rows.index(3 * WARPGROUP + WHAT)


class LatentPipelines(NamedTuple):
    """All of these, and what is said of each tile (`work_info.py`)."""

    q: Any
    k: Any
    exchange: Any
    work_info: Any


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], layout)
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def new_queries(desc, rope_desc, OPTIONS: gl.constexpr):
    """Room for a tile of queries."""
    TOKENS: gl.constexpr = OPTIONS.TOKENS
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    half: gl.constexpr = [2, 1, 1, TOKENS, HEADS, HALF]
    rest: gl.constexpr = [1, 1, 1, TOKENS, HEADS, ROPE]
    halves = gl.allocate_shared_memory(desc.dtype, half, desc.layout)
    rope = gl.allocate_shared_memory(desc.dtype, rest, rope_desc.layout)
    return LatentQueries(halves, rope, _barriers(1, 1), _barriers(1, 2))


@gluon.jit
def new_keys(desc, rope_desc, OPTIONS: gl.constexpr):
    """Room for a pair of blocks."""
    PIECES: gl.constexpr = OPTIONS.PIECES
    half: gl.constexpr = [UNITS, 1, 1, KEYS, 1, HALF]
    rest: gl.constexpr = [2, 1, 1, KEYS, 1, ROPE]
    halves = gl.allocate_shared_memory(desc.dtype, half, desc.layout)
    ropes = gl.allocate_shared_memory(desc.dtype, rest, rope_desc.layout)
    return LatentKeys(halves, ropes, _barriers(UNITS * PIECES, 1), _barriers(UNITS, 1), PIECES)


@gluon.jit
def new_exchange():
    """Room for what consumers tell each other."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rows = gl.allocate_shared_memory(gl.float32, [6, ROWS], layout)
    return Exchange(rows, _barriers(2, 1), _barriers(2, 1))
