"""Queries of latent attention beside keys of 8 bits: consumers put them into shared memory, with
even columns apart from odd ones (`stages_8bit.py`), as float16.

Converted keys are exact in float16, and so need only be of that type if queries are. A row of
bfloat16 becomes float16 times a power of two. That is exact, but for numbers below 2**-29 times the
row's largest one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_paged_attn.backends.triton.common.dequant import float16_range
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD
from torch_paged_attn.backends.triton.hopper.mla.stages_8bit import LATENT, ROPE, meet_consumers

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
    meet_consumers(tile, pipelines.shared.ready, OPTIONS, W)
