"""Keys of 8 bits, queries and probabilities of latent attention in shared memory.

A stage holds a block of 64 keys as they lie in memory: 512 latent columns, which are the values,
too, and the 64 others. Consumers read both as pairs of bytes, two columns each: the instructions
that move 16-bit numbers from shared memory to operands of products (`ldmatrix`, with or without
transposing) move pairs. The two bytes of a pair, converted, are operands of two products, one over
even columns and one over odd ones. So consumers put queries into shared memory with their even
columns apart from the odd ones, as float16.

Converted keys are exact in float16, and so need only be of that type if queries are. A row of
bfloat16 becomes float16 times a power of two. That is exact, but for numbers below 2**-29 times the
row's largest one.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_paged_attn.backends.triton.common.dequant import float16_range
from torch_paged_attn.backends.triton.hopper.common.pipeline import new_barriers
from torch_paged_attn.backends.triton.hopper.common.records import record
from torch_paged_attn.backends.triton.hopper.common.results import seen_as
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier

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
    """What consumers of the same rows of queries share."""

    p: Any  # probabilities (CONSUMERS * KEYS / SLICE * ROWS, SLICE) float16
    rows: Any  # maxima of a block, at last sums (CONSUMERS, ROWS) float32
    factors: Any  # factors of scores (ROWS,) float32


class Meetings(NamedTuple):
    """Barriers of two consumers, one for each."""

    ready: Any  # its share of the queries is there
    found: Any  # its maxima are there
    sent: Any  # its probabilities are there
    ended: Any  # its sums are there


class BytesPipelines(NamedTuple):
    """All of these, and the words about each tile (`work_info.py`)."""

    k: Any
    q: Any
    shared: Any
    meetings: Any  # None for one consumer
    work_info: Any
    read: Any  # a barrier: consumers have read the words about a tile


@gluon.jit
def meet_consumers(n, barriers, W: gl.constexpr):
    """Wait until the threads of both consumers are here, as consumer W. n: how often they have met
    at these barriers before."""
    thread_barrier()
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
    return SharedRows(p, rows, factors)


@gluon.jit
def new_meetings():
    """Barriers of two consumers."""
    ready, found = new_barriers(2, 1), new_barriers(2, 1)
    return Meetings(ready, found, new_barriers(2, 1), new_barriers(2, 1))


# rows of queries that are read at a time
QUERIES = gl.constexpr(16)


@gluon.constexpr_function
def _rows_of_threads(width):
    """A layout of rows of `width` columns, of which a thread has eight in a row."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _load_queries(at, column, exists, WIDTH: gl.constexpr, params):
    """WIDTH columns of QUERIES rows of queries, from `column` on; 0 where a row does not exist.
    `at`: by row, the number of its first element in memory."""
    layout: gl.constexpr = _rows_of_threads(WIDTH)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    at = gl.convert_layout(at, rows)
    exists = gl.convert_layout(exists.to(gl.int32), rows) != 0
    columns = column + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    pointers = params.pointers.q + gl.expand_dims(at, 1) + gl.expand_dims(columns, 0)
    return gl.load(pointers, mask=gl.expand_dims(exists, 1), other=0.0)


@gluon.jit
def _put_queries(x, enlarge, target, FIRST: gl.constexpr):
    """Store queries as float16 into shared memory from row FIRST on, even columns apart from odd
    ones. Those of bfloat16 are multiplied by `enlarge`, a power of two for each row."""
    rows: gl.constexpr = gl.SliceLayout(1, x.type.layout)
    if x.dtype == gl.bfloat16:
        x = x.to(gl.float32) * gl.expand_dims(gl.convert_layout(enlarge, rows), 1)
    x = x.to(gl.float16)
    even, odd = gl.split(gl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]))
    target.index(0).slice(FIRST, x.shape[0]).store(even)
    target.index(1).slice(FIRST, x.shape[0]).store(odd)


@gluon.jit
def _take_rows(of_scores, params, pipelines, OPTIONS: gl.constexpr, FIRST: gl.constexpr):
    """Put QUERIES rows of a tile, from row FIRST on, into shared memory, and with them the factors
    of their scores: `of_scores`, and what undoes the power of two of a row."""
    PACKED_HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    by_row: gl.constexpr = gl.SliceLayout(1, _rows_of_threads(LATENT))
    work_info, scalars = pipelines.work_info, params.scalars
    r = FIRST + gl.arange(0, QUERIES, by_row)
    token = work_info.get(0, WORD.FIRST_TOKEN) + r // PACKED_HEADS
    head = work_info.get(0, WORD.HEAD) + r % PACKED_HEADS
    exists = (token < work_info.get(0, WORD.STOP_TOKEN)) & (head < scalars.num_heads)
    at = (work_info.get(0, WORD.Q_START) + token).to(
        gl.int64
    ) * scalars.q_token + head * scalars.q_head
    latent = _load_queries(at, 0, exists, LATENT, params)
    rope = _load_queries(at, LATENT, exists, ROPE, params)
    factor = gl.full([QUERIES], 1.0, gl.float32, by_row)
    enlarge = factor
    if latent.dtype == gl.bfloat16:
        largest = gl.max(gl.abs(latent.to(gl.float32)), 1)
        of_rope = gl.max(gl.abs(rope.to(gl.float32)), 1)
        largest = gl.maximum(largest, gl.convert_layout(of_rope, by_row))
        enlarge, factor = float16_range(largest)
    _put_queries(latent, enlarge, pipelines.q.latent, FIRST)
    _put_queries(rope, enlarge, pipelines.q.rope, FIRST)
    pipelines.shared.factors.slice(FIRST, QUERIES).store(factor * of_scores)


@gluon.jit
def take_queries(tile, of_scores, params, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr):
    """Put a tile's queries into shared memory, each consumer its share, and wait for the other's.
    `of_scores`: the factor of products by which they become exponents of two; `tile`: number of the
    program's tile."""
    SHARE: gl.constexpr = OPTIONS.ROWS // OPTIONS.CONSUMERS
    for i in gl.static_range(SHARE // QUERIES):
        _take_rows(of_scores, params, pipelines, OPTIONS, W * SHARE + i * QUERIES)
    fence_async_shared()
    if OPTIONS.CONSUMERS == 2:
        meet_consumers(tile, pipelines.meetings.ready, W)
    else:
        thread_barrier()
