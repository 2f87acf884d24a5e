"""Tiles in shared memory that travel from producers to several consumers, in turns."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.core import _aggregate as aggregate


@aggregate
class Ring:
    """The n-th fill goes to slot n % STAGES, once each consumer has released fill n - STAGES."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, tiles, full, empty, STAGES):
        self.tiles = tiles
        self.full = full
        self.empty = empty
        self.STAGES = gl.constexpr(STAGES)

    @gluon.jit
    def tile(self, n):
        """Where fill n lies, if a fill is one tile."""
        return self.tiles.index(n % self.STAGES)

    @gluon.jit
    def filled(self, n):
        """The barrier that fill n completes."""
        return self.full.index(n % self.STAGES)

    @gluon.jit
    def wait_empty(self, n):
        """The producer's wait before fill n; a new barrier lets the first round pass."""
        mbarrier.wait(self.empty.index(n % self.STAGES), ((n // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def wait_full(self, n):
        """A consumer's wait for fill n."""
        mbarrier.wait(self.full.index(n % self.STAGES), (n // self.STAGES) & 1)

    @gluon.jit
    def release(self, n):
        """A consumer is done with fill n."""
        mbarrier.arrive(self.empty.index(n % self.STAGES), count=1)


@gluon.jit
def new_ring(
    dtype: gl.constexpr,
    shape: gl.constexpr,
    layout: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PARTS: gl.constexpr,
):
    """A ring whose fills are `shape[0] // STAGES` boxes of `shape[1:]` each, of PARTS producers."""
    tiles = gl.allocate_shared_memory(dtype, shape, layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=PARTS)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return Ring(tiles, full, empty, STAGES)
