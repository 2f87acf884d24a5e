"""The warps beside the consumers of tiles of queries.

One claims tiles, and loads queries and the keys that pass by; one loads gradients of the result,
and values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.backward.work import FIELD, Passing, claim_tiles
from torch_paged_attn.backends.triton.hopper.common.tma import load_fill, load_rows


@gluon.jit
def _load_stay(desc, pipeline, tile, start, size, first, head, OPTIONS: gl.constexpr):
    """Load the rows of all consumers, from row `first` on, of a sequence that begins at row `start`
    and has `size` rows."""
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    pipeline.producer_acquire(tile)
    barrier = pipeline.full_barrier(tile)
    mbarrier.expect(barrier, desc.block_type.nbytes * CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        box = pipeline.tiles.index(tile % OPTIONS.STAY_STAGES * CONSUMERS + i)
        load_rows(desc, start, size, first + i * OPTIONS.STAY, head, barrier, box)


@gluon.jit
def _find_keys(at, params, OPTIONS: gl.constexpr):
    """The keys that pass by a tile of queries."""
    scalars, context_len = params.scalars, at.context_len
    first = 0
    stop = at.key_len
    if OPTIONS.HAS_LEFT:
        first = gl.maximum(context_len + at.first - scalars.window_left, 0)
    if OPTIONS.HAS_RIGHT:
        stop = gl.minimum(stop, context_len + at.stop + scalars.window_right)
    steps = gl.maximum((stop - first + OPTIONS.PASS - 1) // OPTIONS.PASS, 0)
    statistics_tile = gl.load(params.pointers.cu_seqlens_q + at.b) // 64 + at.b
    return Passing(steps, first, statistics_tile, 0)


@gluon.jit
def _load_queries_and_keys(n, tile, at, passing, params, pipelines, OPTIONS: gl.constexpr):
    """Load a tile of queries and the keys that pass by."""
    _load_stay(params.q_desc, pipelines.q, tile, at.q_start, at.stop, at.first, at.head, OPTIONS)
    kv_head = at.head // OPTIONS.GROUP_SIZE
    for m in range(passing.steps):
        key = passing.first + m * OPTIONS.PASS
        load_fill(params.k_desc, pipelines.k, n, at.k_start, at.key_len, key, kv_head)
        n += 1
    return n


@gluon.jit
def produce_queries_and_keys(params, pipelines, OPTIONS: gl.constexpr):
    """Claim tiles of queries, and load them and the keys that pass by."""
    claim_tiles(params, pipelines, _find_keys, _load_queries_and_keys, False, OPTIONS)


@gluon.jit
def load_gradients_and_values(
    n, tile, steps, params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):
    """Load the gradients of a tile's result, and the values that pass by."""
    info = pipelines.info
    q_start, stop_token = info.get(tile, FIELD.Q_START), info.get(tile, FIELD.STOP_STAY)
    k_start, key_len = info.get(tile, FIELD.K_START), info.get(tile, FIELD.KEY_LEN)
    first, first_token = info.get(tile, FIELD.FIRST_PASS), info.get(tile, FIELD.FIRST_STAY)
    head = info.get(tile, FIELD.HEAD)
    pipelines.claims.consumer_release(tile)
    _load_stay(
        params.dout_desc, pipelines.dout, tile, q_start, stop_token, first_token, head, OPTIONS
    )
    kv_head = head // OPTIONS.GROUP_SIZE
    for m in range(steps):
        key = first + m * OPTIONS.PASS
        load_fill(params.v_desc, pipelines.v, n, k_start, key_len, key, kv_head)
        n += 1
    return n
