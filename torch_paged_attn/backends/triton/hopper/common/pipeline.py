"""Tiles in shared memory that travel from producers to consumers through a ring of stages.

The names are CUTLASS's: a producer acquires a stage and commits it by the barrier that its loads
complete; a consumer waits for a stage and releases it.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_paged_attn.backends.triton.hopper.common.records import record


@record
class Pipeline:
    """Fill number n goes to stage n % STAGES, once each consumer has released fill n - STAGES."""

    tiles: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def tile(self, n):
        """Where fill n lies, if a fill is one tile."""
        return self.tiles.index(n % self.STAGES)

    @gluon.jit
    def full_barrier(self, n):
        """The barrier that the loads of fill n complete."""
        return self.full.index(n % self.STAGES)

    @gluon.jit
    def producer_acquire(self, n):
        """Wait until fill n may be written; a new barrier lets the first round pass."""
        mbarrier.wait(self.empty.index(n % self.STAGES), ((n // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def consumer_wait(self, n):
        """Wait until fill n has arrived."""
        mbarrier.wait(self.full.index(n % self.STAGES), (n // self.STAGES) & 1)

    @gluon.jit
    def consumer_wait_for(self, n, IS_COPIED: gl.constexpr):
        """The same where warps may have copied the fill, which products read by another way."""
        self.consumer_wait(n)
        if IS_COPIED:
            fence_async_shared()

    @gluon.jit
    def consumer_release(self, n):
        """Say that this consumer is done with fill n."""
        mbarrier.arrive(self.empty.index(n % self.STAGES), count=1)


@gluon.jit
def new_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT barriers, each completed by ARRIVALS arrivals."""
    layout: gl.constexpr = mbarrier.MBarrierLayout()
    barriers = gl.allocate_shared_memory(gl.int64, [COUNT, 1], layout)
    for i in gl.static_range(COUNT):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def new_pipeline(
    dtype: gl.constexpr,
    shape: gl.constexpr,
    layout: gl.constexpr,
    STAGES: gl.constexpr,
    CONSUMERS: gl.constexpr,
    PRODUCERS: gl.constexpr,
):
    """A pipeline whose fills are `shape[0] // STAGES` boxes of `shape[1:]` each."""
    tiles = gl.allocate_shared_memory(dtype, shape, layout)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=PRODUCERS)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    return Pipeline(tiles, full, empty, STAGES)


class Pipelines(NamedTuple):
    """Queries, keys and values on their way from producers to consumers, and the words about each
    tile of queries (`work_info.py`)."""

    q: Any
    k: Any
    v: Any
    work_info: Any
    # of 8 bits (`converter.py`): keys and values as they are loaded, which `k` and `v` are in 16
    # bits, and where consumers leave results, which else lie where the queries lay
    stored_k: Any = None
    stored_v: Any = None
    out: Any = None
    # where the rows are that each producer copies, if pages are smaller than a box
    found: Any = None
    # references and sums of stretches of keys that consumers have left (`stretches.py`)
    left: Any = None
    # what a consumer leaves to the one that has the same rows (`split_keys.py`)
    halves: Any = None
    # of keys and values, by token (`scales.py`)
    scales: Any = None
