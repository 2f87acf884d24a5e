"""dK and dV of wide heads: 64 keys stay, and each of two consumers computes half of the columns.

dK and dV of 64 keys, 256 columns each, fill the registers of two consumers. So both work on the
same keys. Each computes P and dS of half of a tile's queries and leaves them in shared memory. When
both have, each multiplies P and dS of all queries by its columns of dO and Q. These products are
asked for together with the scores of the next tile.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.hopper.backward.dkdv_steps import meet
from torch_paged_attn.backends.triton.hopper.backward.work import FIELD, slope_of
from torch_paged_attn.backends.triton.hopper.common.clear import clear_before
from torch_paged_attn.backends.triton.hopper.common.scores import ask_for_scores, probabilities


@gluon.jit
def _ask_for_scores(
    pipelines, n, row, first_live, k, v, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):
    """Ask for S^T and dP^T of a consumer's half of the queries of fill n, whose first is `row`."""
    STAY: gl.constexpr = OPTIONS.STAY
    HALF: gl.constexpr = OPTIONS.PASS // OPTIONS.CONSUMERS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    zeros = gl.zeros([STAY, HALF], gl.float32, scores)
    queries, douts = pipelines.q, pipelines.dout
    q = queries.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH])
    dout = douts.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH_V])
    queries.consumer_wait(n)
    if OPTIONS.HAS_RIGHT and row < first_live:
        clear_before(q, first_live - row)
        douts.consumer_wait(n)
        clear_before(dout, first_live - row)
    own = q.slice(INDEX * HALF, HALF, dim=0).permute((1, 0))
    s = ask_for_scores(k, own, zeros, OPTIONS)
    douts.consumer_wait(n)
    own = dout.slice(INDEX * HALF, HALF, dim=0).permute((1, 0))
    dp = warpgroup_mma(v, own, zeros, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def _probabilities_of(
    s, pipelines, n, row, keys, slope, params, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """Put P^T of a consumer's half of the queries of fill n into shared memory. Returns what
    dP^T - D is multiplied by to give dS^T (see `scores.probabilities`)."""
    HALF: gl.constexpr = OPTIONS.PASS // OPTIONS.CONSUMERS
    first_key, context_len, key_len = keys
    statistics = pipelines.statistics.index(n % OPTIONS.FIRST_STAGES)
    lse = statistics.slice(INDEX * HALF, HALF, dim=1).load(s.type.layout)
    position = context_len + row + INDEX * HALF
    p, weight = probabilities(s, lse, first_key, position, key_len, slope, params, OPTIONS, True)
    tile = pipelines.p.index(n % OPTIONS.DS_STAGES)
    tile.slice(INDEX * HALF, HALF, dim=1).store(p.to(pipelines.p.dtype))
    return weight


@gluon.jit
def _leave_gradient(weight, dp, pipelines, n, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Put dS^T of the same queries into shared memory."""
    HALF: gl.constexpr = OPTIONS.PASS // OPTIONS.CONSUMERS
    statistics = pipelines.statistics.index(n % OPTIONS.FIRST_STAGES)
    delta = statistics.slice(OPTIONS.PASS + INDEX * HALF, HALF, dim=1).load(dp.type.layout)
    ds = weight * (dp - delta)
    tile = pipelines.ds.index(n % OPTIONS.DS_STAGES)
    tile.slice(INDEX * HALF, HALF, dim=1).store(ds.to(pipelines.ds.dtype))
    fence_async_shared()


@gluon.constexpr_function
def _columns_of(width, columns, consumers, index):
    """How many columns of dK a consumer computes, from width / consumers * index on: `width` in
    shared memory, of which `columns` hold numbers (`support.columns_of`). It is a power of two,
    as products need."""
    share = width // consumers
    return min(share, columns - index * share)


@gluon.jit
def _multiply(pipelines, n, dk, dv, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Ask for the products that the queries of fill n add to a consumer's columns of dK and dV."""
    COLUMNS: gl.constexpr = _columns_of(OPTIONS.WIDTH, OPTIONS.COLUMNS, OPTIONS.CONSUMERS, INDEX)
    COLUMNS_V: gl.constexpr = OPTIONS.WIDTH_V // OPTIONS.CONSUMERS
    q = pipelines.q.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH])
    q = q.slice(INDEX * OPTIONS.WIDTH // OPTIONS.CONSUMERS, COLUMNS, dim=1)
    dout = pipelines.dout.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH_V])
    dout = dout.slice(INDEX * COLUMNS_V, COLUMNS_V, dim=1)
    at = n % OPTIONS.DS_STAGES
    dv = warpgroup_mma(pipelines.p.index(at), dout, dv, is_async=True)
    dk = warpgroup_mma(pipelines.ds.index(at), q, dk, is_async=True)
    return dk, dv


@gluon.jit
def work_on_split_keys(
    n, tile, steps, params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):
    """As consumer INDEX, compute its share of the columns of dK and dV of a tile."""
    STAY: gl.constexpr = OPTIONS.STAY
    FIRST: gl.constexpr = OPTIONS.WIDTH // OPTIONS.CONSUMERS * INDEX
    COLUMNS: gl.constexpr = _columns_of(OPTIONS.WIDTH, OPTIONS.COLUMNS, OPTIONS.CONSUMERS, INDEX)
    COLUMNS_V: gl.constexpr = OPTIONS.WIDTH_V // OPTIONS.CONSUMERS
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS_V, 16])
    HALF: gl.constexpr = OPTIONS.PASS // OPTIONS.CONSUMERS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    stays: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    info, claims, scalars = pipelines.info, pipelines.claims, params.scalars
    dtype: gl.constexpr = pipelines.k.tiles.dtype
    first, key_len = info.get(tile, FIELD.FIRST_PASS), info.get(tile, FIELD.KEY_LEN)
    first_key = info.get(tile, FIELD.FIRST_STAY)
    context_len, kv_head = info.get(tile, FIELD.CONTEXT_LEN), info.get(tile, FIELD.HEAD)
    first_live = 0
    if OPTIONS.HAS_RIGHT:
        first_live = info.get(tile, FIELD.FIRST_LIVE)
    b = 0
    if params.pointers.alibi_slopes is not None:
        b = info.get(tile, FIELD.BATCH)
    claims.consumer_release(tile)
    keys = first_key, context_len, key_len
    k = pipelines.k.tile(tile).reshape([STAY, OPTIONS.WIDTH])
    v = pipelines.v.tile(tile).reshape([STAY, OPTIONS.WIDTH_V])
    pipelines.k.consumer_wait(tile)
    pipelines.v.consumer_wait(tile)
    if OPTIONS.HAS_LEFT and first_key < context_len - scalars.window_left:
        clear_before(k, context_len - scalars.window_left - first_key)
        clear_before(v, context_len - scalars.window_left - first_key)
    v_operand = v
    if OPTIONS.OPERANDS > 0:
        v_operand = v.load(stays)
    dk = gl.zeros([STAY, COLUMNS], gl.float32, of_k)
    dv = gl.zeros([STAY, COLUMNS_V], gl.float32, of_v)
    for g in range(OPTIONS.GROUP_SIZE):
        slope = slope_of(b, kv_head * OPTIONS.GROUP_SIZE + g, params)
        if steps > 0:
            s_pending, dp_pending = _ask_for_scores(
                pipelines, n, first, first_live, k, v_operand, OPTIONS, INDEX
            )
            s = warpgroup_mma_wait(1, deps=[s_pending])
            weight = _probabilities_of(s, pipelines, n, first, keys, slope, params, OPTIONS, INDEX)
            dp = warpgroup_mma_wait(0, deps=[dp_pending])
            _leave_gradient(weight, dp, pipelines, n, OPTIONS, INDEX)
            meet()
            for m in range(1, steps):
                row = first + m * OPTIONS.PASS
                dk_pending, dv_pending = _multiply(pipelines, n, dk, dv, OPTIONS, INDEX)
                s_pending, dp_pending = _ask_for_scores(
                    pipelines, n + 1, row, first_live, k, v_operand, OPTIONS, INDEX
                )
                s, dk, dv = warpgroup_mma_wait(1, deps=[s_pending, dk_pending, dv_pending])
                pipelines.q.consumer_release(n)
                pipelines.dout.consumer_release(n)
                weight = _probabilities_of(
                    s, pipelines, n + 1, row, keys, slope, params, OPTIONS, INDEX
                )
                dp = warpgroup_mma_wait(0, deps=[dp_pending])
                _leave_gradient(weight, dp, pipelines, n + 1, OPTIONS, INDEX)
                meet()
                n += 1
            dk_pending, dv_pending = _multiply(pipelines, n, dk, dv, OPTIONS, INDEX)
            dk, dv = warpgroup_mma_wait(0, deps=[dk_pending, dv_pending])
            pipelines.q.consumer_release(n)
            pipelines.dout.consumer_release(n)
            n += 1
    meet()
    k.slice(FIRST, COLUMNS, dim=1).store((dk * scalars.scale).to(dtype))
    v.slice(INDEX * COLUMNS_V, COLUMNS_V, dim=1).store(dv.to(dtype))
    fence_async_shared()
    mbarrier.arrive(pipelines.done.index(tile % OPTIONS.STAY_STAGES), count=1)
    return n
