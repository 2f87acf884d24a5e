"""Keys of 8 bits, queries and probabilities of latent attention in shared memory.

A stage holds a block of 64 keys as they lie in memory: 512 latent columns, which are the values,
too, and the 64 others. Consumers read both as pairs of bytes, two columns each: the instructions
that move 16-bit numbers from shared memory to operands of products (`ldmatrix`, with or without
transposing) move pairs. The two bytes of a pair, converted, are operands of two products, one over
even columns and one over odd ones. So queries lie in shared memory with their even columns apart
from the odd ones.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.common.pipeline import new_barriers
from torch_paged_attn.backends.triton.hopper.common.records import record
from torch_paged_attn.backends.triton.hopper.common.results import seen_as
from torch_paged_attn.backends.triton.hopper.common.work_info import thread_barrier

# keys of a block; columns that are values, those of a box of them, and the others
KEYS, LATENT, BOX, ROPE = (gl.constexpr(i) for i in (64, 512, 128, 64))
# keys whose values are converted and multiplied at a time
SLICE = gl.constexpr(16)


@record
class StoredKeys:
    """A ring of blocks. Fill n goes to stage n % STAGES, once each consumer has released what lay
    there."""

    latent: gl.shared_memory_descriptor  # (STAGES, 1, 1, KEYS, 1, LATENT) of 8 bits
    rope: gl.shared_memory_descriptor  # (STAGES, 1, 1, KEYS, 1, ROPE)
    latent_pairs: gl.shared_memory_descriptor  # the same as pairs: (STAGES, KEYS, LATENT / 2)
    rope_pairs: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor
    STAGES: gl.constexpr

    @gluon.jit
    def acquire(self, n):
        """Wait, as the producer, until fill n may be loaded."""
        mbarrier.wait(self.empty.index(n % self.STAGES), ((n // self.STAGES) & 1) ^ 1)

    @gluon.jit
    def full_barrier(self, n):
        """The barrier that the loads of fill n complete."""
        return self.full.index(n % self.STAGES)

    @gluon.jit
    def wait(self, n):
        """Wait until fill n has arrived."""
        mbarrier.wait(self.full_barrier(n), (n // self.STAGES) & 1)

    @gluon.jit
    def release(self, n):
        """Release fill n, as a consumer."""
        mbarrier.arrive(self.empty.index(n % self.STAGES), count=1)


class SplitQueries(NamedTuple):
    """A tile of queries as float16: [0] has the even columns, [1] the odd ones."""

    latent: Any  # (2, ROWS, LATENT / 2)
    rope: Any  # (2, ROWS, ROPE / 2)


class SharedRows(NamedTuple):
    """What consumers of the same rows of queries share. Each barrier is one for each consumer."""

    p: Any  # probabilities (CONSUMERS * KEYS / SLICE * ROWS, SLICE) float16
    rows: Any  # maxima of a block, at last sums (CONSUMERS, ROWS) float32
    factors: Any  # factors of scores (ROWS,) float32
    ready: Any  # barriers: a consumer's share of the queries is there
    found: Any  # the same: its maxima are there
    sent: Any  # the same: its probabilities are there
    ended: Any  # the same: its sums are there


class BytesPipelines(NamedTuple):
    """All of these, and the words about each tile (`work_info.py`)."""

    k: Any
    q: Any
    shared: Any
    work_info: Any
    read: Any  # a barrier: consumers have read the words about a tile


@gluon.jit
def meet_consumers(n, barriers, OPTIONS: gl.constexpr, W: gl.constexpr):
    """Wait until the threads of all consumers are here, as consumer W. n: how often they have met
    at these barriers before."""
    thread_barrier()
    if OPTIONS.CONSUMERS == 2:
        mbarrier.arrive(barriers.index(W), count=1)
        mbarrier.wait(barriers.index(1 - W), n & 1)


@gluon.constexpr_function
def _pairs_layout(layout):
    """The layout of the bytes in `layout` as 16-bit pairs, a matrix for each stage."""
    return gl.NVMMASharedLayout(layout.swizzle_byte_width, 16, rank=2)


@gluon.jit
def new_stored_keys(desc, rope_desc, OPTIONS: gl.constexpr):
    """Room for STAGES blocks."""
    STAGES: gl.constexpr = OPTIONS.STAGES
    latent_shape: gl.constexpr = [STAGES, 1, 1, KEYS, 1, LATENT]
    rope_shape: gl.constexpr = [STAGES, 1, 1, KEYS, 1, ROPE]
    wide: gl.constexpr = _pairs_layout(desc.layout)
    narrow: gl.constexpr = _pairs_layout(rope_desc.layout)
    latent = gl.allocate_shared_memory(desc.dtype, latent_shape, desc.layout)
    rope = gl.allocate_shared_memory(rope_desc.dtype, rope_shape, rope_desc.layout)
    latent_pairs = seen_as(latent, [STAGES, KEYS, LATENT // 2], wide, gl.int16)
    rope_pairs = seen_as(rope, [STAGES, KEYS, ROPE // 2], narrow, gl.int16)
    full, empty = new_barriers(STAGES, 1), new_barriers(STAGES, OPTIONS.CONSUMERS)
    return StoredKeys(latent, rope, latent_pairs, rope_pairs, full, empty, STAGES)


@gluon.jit
def new_split_queries(OPTIONS: gl.constexpr):
    """Room for a tile of queries."""
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    narrow: gl.constexpr = gl.NVMMASharedLayout(64, 16, rank=2)
    latent = gl.allocate_shared_memory(gl.float16, [2, OPTIONS.ROWS, LATENT // 2], wide)
    rope = gl.allocate_shared_memory(gl.float16, [2, OPTIONS.ROWS, ROPE // 2], narrow)
    return SplitQueries(latent, rope)


@gluon.jit
def new_shared_rows(OPTIONS: gl.constexpr):
    """Room for what consumers share."""
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    swizzled: gl.constexpr = gl.NVMMASharedLayout(2 * SLICE, 16, rank=2)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    P_ROWS: gl.constexpr = CONSUMERS * KEYS // SLICE * OPTIONS.ROWS
    p = gl.allocate_shared_memory(gl.float16, [P_ROWS, SLICE], swizzled)
    rows = gl.allocate_shared_memory(gl.float32, [CONSUMERS, OPTIONS.ROWS], plain)
    factors = gl.allocate_shared_memory(gl.float32, [OPTIONS.ROWS], plain)
    ready, found = new_barriers(CONSUMERS, 1), new_barriers(CONSUMERS, 1)
    sent, ended = new_barriers(CONSUMERS, 1), new_barriers(CONSUMERS, 1)
    return SharedRows(p, rows, factors, ready, found, sent, ended)
