"""dK and dV: tiles of keys stay, queries pass by. In one pass, dQ too.

A program works on 128 keys of one KV head; each of two consumers owns 64 of them. For every tile of
PASS queries, of each head of the group:

    S^T = K Q^T, dP^T = V dO^T           keys are rows, so that P and dS are operands in registers
    P^T = exp2(S^T - lse), dS^T = P^T (dP^T - D)
    dV += P^T dO, dK += dS^T Q
    dQ += dS K                           in one pass: dS of both consumers goes through shared
                                         memory, and each computes half of the columns

The order of products of one pass is FlashAttention-3's (arXiv 2407.08608, algorithm 3).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.hopper.backward.column_parts import (
    as_operand as as_operand_of_sums,
)
from torch_paged_attn.backends.triton.hopper.backward.column_parts import (
    ask_for_sums,
    new_sums,
    store_parts,
    wait_for_scores_and_sums,
    wait_for_sums,
)
from torch_paged_attn.backends.triton.hopper.backward.dkdv_steps import (
    KeyTile,
    as_operand,
    ask_for_dp,
    leave,
    meet,
    probabilities_of,
    seen_tiles,
    wait_for_queries,
)
from torch_paged_attn.backends.triton.hopper.backward.sums import BY_LANE, NONE
from torch_paged_attn.backends.triton.hopper.backward.work import FIELD, pass_by, slope_of
from torch_paged_attn.backends.triton.hopper.common.clear import clear_before
from torch_paged_attn.backends.triton.hopper.common.scores import ask_for_scores


@gluon.jit
def _gradients_of(
    pending, dv, n, row, keys, slope, params, pipelines, OPTIONS: gl.constexpr,
    MAY_HIDE: gl.constexpr,
):  # fmt: skip
    """dS^T of fill n, as an operand, and dV with this fill's part. `pending` are its scores S^T,
    and the product dP^T - D, which is under way. `row` is the fill's first query. Without MAY_HIDE
    each of its queries sees each of the keys."""
    s, dp_pending = pending
    weight, p16 = probabilities_of(s, n, row, keys, slope, params, pipelines, OPTIONS, MAY_HIDE)
    dout = pipelines.dout.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH_V])
    dv_pending = warpgroup_mma(p16, dout, dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=[dp_pending])
    ds = (weight * dp).to(pipelines.k.tiles.dtype)
    ds = as_operand_of_sums(ds, OPTIONS)
    dv, p16 = warpgroup_mma_wait(0, deps=[dv_pending, p16])
    pipelines.dout.consumer_release(n)
    return ds, dv


@gluon.jit
def _start_gradients(
    pending, n, row, keys, slope, params, pipelines, OPTIONS: gl.constexpr,
    MAY_HIDE: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """P^T and dS^T of fill n, as operands; arguments are as for `_gradients_of`. LEFT products that
    were asked for after dP^T - D are under way, too."""
    s, dp_pending = pending
    weight, p16 = probabilities_of(s, n, row, keys, slope, params, pipelines, OPTIONS, MAY_HIDE)
    dp = warpgroup_mma_wait(LEFT, deps=[dp_pending])
    return p16, as_operand((weight * dp).to(pipelines.k.tiles.dtype), OPTIONS)


@gluon.jit
def _ask_for_both(p16, ds, results, n, pipelines, OPTIONS: gl.constexpr):
    """Ask for the products that fill n adds to dV and dK."""
    dk, dv = results
    dout = pipelines.dout.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH_V])
    dv_pending = warpgroup_mma(p16, dout, dv, is_async=True)
    q = pipelines.q.tile(n).reshape([OPTIONS.PASS, OPTIONS.WIDTH])
    return dv_pending, warpgroup_mma(ds, q, dk, is_async=True)


@gluon.jit
def _two_results(
    operands, results, n, used, tile, params, pipelines, OPTIONS: gl.constexpr,
    MAY_HIDE: gl.constexpr,
):  # fmt: skip
    """dK and dV of a tile, and the number of the next fill. Scores of the next queries are asked
    for together with the last product of these queries, and both run while the next probabilities
    are computed.

    AT_ONCE, for narrow heads, registers have room for P and dS of a tile of queries beside the
    scores of the next one. So the next scores, and both products by P and dS, run while the next
    probabilities are computed, and no product is under way when a step of the loop ends. Between
    two heads a tile of gradients, too, is released while the last one of the head before is held:
    hence three stages.

    `operands` are k and v; `results` are dk and dv, zeros. `used`: of each head's tiles of queries,
    the consumer skips the first `skipped` and needs the next `seen`. MAY_HIDE is as for
    `_gradients_of`."""
    STAY: gl.constexpr = OPTIONS.STAY
    AT_ONCE: gl.constexpr = OPTIONS.AT_ONCE
    gl.static_assert(not AT_ONCE or OPTIONS.GROUP_SIZE == 1 or OPTIONS.SECOND_STAGES >= 3)
    PASS: gl.constexpr = OPTIONS.PASS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PASS, 16])
    zeros = gl.zeros([STAY, PASS], gl.float32, scores)
    queries, douts = pipelines.q, pipelines.dout
    k, v = operands
    dk, dv = results
    skipped, seen = used
    keys, first, steps, first_live, head, b, _ = tile
    if seen == 0:
        n = pass_by(queries, douts, n, steps * OPTIONS.GROUP_SIZE)
    else:
        m = 0
        slope = slope_of(b, head, params)
        n = pass_by(queries, douts, n, skipped)
        first += skipped * PASS
        q = wait_for_queries(pipelines, n, first, first_live, OPTIONS)
        s_pending = ask_for_scores(k, q.permute((1, 0)), zeros, OPTIONS)
        dp_pending = ask_for_dp(v, zeros, n, first, pipelines, OPTIONS)
        pending = warpgroup_mma_wait(1, deps=[s_pending]), dp_pending
        if AT_ONCE:
            p16, ds = _start_gradients(
                pending, n, first, keys, slope, params, pipelines, OPTIONS, MAY_HIDE, 0
            )
        else:
            ds, dv = _gradients_of(
                pending, dv, n, first, keys, slope, params, pipelines, OPTIONS, MAY_HIDE
            )
        for _ in range(1, seen * OPTIONS.GROUP_SIZE):
            m += 1
            n_was = n
            n += 1
            if OPTIONS.GROUP_SIZE > 1 and m == seen:
                m = 0
                head += 1
                slope = slope_of(b, head, params)
                n = pass_by(queries, douts, n, steps - seen)
            row = first + m * PASS
            if not AT_ONCE:
                q_was = queries.tile(n_was).reshape([PASS, OPTIONS.WIDTH])
            q = wait_for_queries(pipelines, n, row, first_live, OPTIONS)
            s_pending = ask_for_scores(k, q.permute((1, 0)), zeros, OPTIONS)
            if AT_ONCE:
                dp_pending = ask_for_dp(v, zeros, n, row, pipelines, OPTIONS)
                dv_pending, dk_pending = _ask_for_both(p16, ds, (dk, dv), n_was, pipelines, OPTIONS)
                s = warpgroup_mma_wait(3, deps=[s_pending])
                p_next, ds_next = _start_gradients(
                    (s, dp_pending), n, row, keys, slope, params, pipelines, OPTIONS, MAY_HIDE, 2
                )
                dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[dv_pending, dk_pending, p16, ds])
                douts.consumer_release(n_was)
                queries.consumer_release(n_was)
                p16 = p_next
                ds = ds_next
            else:
                dk_pending = ask_for_sums(ds, q_was, dk, OPTIONS)
                dp_pending = ask_for_dp(v, zeros, n, row, pipelines, OPTIONS)
                s, dk, ds = wait_for_scores_and_sums(s_pending, dk_pending, ds)
                queries.consumer_release(n_was)
                ds, dv = _gradients_of(
                    (s, dp_pending), dv, n, row, keys, slope, params, pipelines, OPTIONS, MAY_HIDE
                )
        if AT_ONCE:
            dv_pending, dk_pending = _ask_for_both(p16, ds, (dk, dv), n, pipelines, OPTIONS)
            dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[dv_pending, dk_pending, p16, ds])
            douts.consumer_release(n)
        else:
            q = queries.tile(n).reshape([PASS, OPTIONS.WIDTH])
            dk, ds = wait_for_sums(ask_for_sums(ds, q, dk, OPTIONS), ds)
        queries.consumer_release(n)
        n = pass_by(queries, douts, n + 1, steps - skipped - seen)
    return dk, dv, n


@gluon.jit
def _three_results(
    operands, own, results, n, tile, params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """dK and dV of a tile, and the number of the next fill; the tile's parts of dQ are sent on
    their way. `operands`, `results` are as for `_two_results`; `own` are all keys of the tile, of
    the columns of dQ that this consumer computes."""
    STAY: gl.constexpr = OPTIONS.STAY
    PASS: gl.constexpr = OPTIONS.PASS
    COLUMNS: gl.constexpr = OPTIONS.WIDTH // OPTIONS.CONSUMERS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PASS, 16])
    of_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    zeros = gl.zeros([STAY, PASS], gl.float32, scores)
    zeros_q = gl.zeros([PASS, COLUMNS], gl.float32, of_q)
    queries, douts = pipelines.q, pipelines.dout
    k, v = operands
    dk, dv = results
    keys, first, steps, first_live, head, b, statistics_tile = tile
    for g in range(OPTIONS.GROUP_SIZE):
        slope = slope_of(b, head + g, params)
        for m in range(steps):
            row = first + m * PASS
            q = wait_for_queries(pipelines, n, row, first_live, OPTIONS)
            dout = douts.tile(n).reshape([PASS, OPTIONS.WIDTH_V])
            s_pending = ask_for_scores(k, q.permute((1, 0)), zeros, OPTIONS)
            douts.consumer_wait(n)
            dp_pending = warpgroup_mma(v, dout.permute((1, 0)), zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(1, deps=[s_pending])
            weight, p16 = probabilities_of(s, n, row, keys, slope, params, pipelines, OPTIONS, True)
            statistics = pipelines.statistics.index(n % OPTIONS.FIRST_STAGES)
            delta = statistics.slice(PASS, PASS, dim=1).load(scores)
            dp = warpgroup_mma_wait(0, deps=[dp_pending])
            ds = (weight * (dp - delta)).to(queries.tiles.dtype)
            ds_tile = pipelines.ds.index(n % OPTIONS.DS_STAGES)
            ds_tile.slice(INDEX * STAY, STAY, dim=0).store(ds)
            ds = as_operand(ds, OPTIONS)
            dv_pending = warpgroup_mma(p16, dout, dv, is_async=True)
            fence_async_shared()
            meet()
            dq_pending = warpgroup_mma(
                ds_tile.permute((1, 0)), own, zeros_q, use_acc=False, is_async=True
            )
            dv, p16 = warpgroup_mma_wait(1, deps=[dv_pending, p16])
            douts.consumer_release(n)
            dk_pending = warpgroup_mma(ds, q, dk, is_async=True)
            dq = warpgroup_mma_wait(1, deps=[dq_pending])
            number = (head + g) * params.sizes.statistics_tiles + statistics_tile + m
            leave(dq, n, number, params, pipelines, OPTIONS, INDEX)
            dk, ds = warpgroup_mma_wait(0, deps=[dk_pending, ds])
            queries.consumer_release(n)
            n += 1
    return dk, dv, n


@gluon.jit
def work_on_keys(n, tile, steps, params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """As consumer INDEX, compute dK and dV of a tile's keys from number INDEX * STAY on."""
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    STAY: gl.constexpr = OPTIONS.STAY
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    DQ_SUMS: gl.constexpr = OPTIONS.DQ_SUMS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, OPTIONS.PASS, 16])
    of_k: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    of_v: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    COLUMNS: gl.constexpr = WIDTH // OPTIONS.CONSUMERS
    stays: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    # whether only those columns of dK are computed that hold numbers
    IN_PARTS: gl.constexpr = DQ_SUMS == NONE and not OPTIONS.AT_ONCE
    info, claims, scalars = pipelines.info, pipelines.claims, params.scalars
    dtype: gl.constexpr = pipelines.q.tiles.dtype
    first = info.get(tile, FIELD.FIRST_PASS)
    first_key = info.get(tile, FIELD.FIRST_STAY) + INDEX * STAY
    context_len = info.get(tile, FIELD.CONTEXT_LEN)
    keys = first_key, context_len, info.get(tile, FIELD.KEY_LEN)
    head = info.get(tile, FIELD.HEAD) * OPTIONS.GROUP_SIZE
    statistics_tile = 0
    if DQ_SUMS == BY_LANE:
        statistics_tile = info.get(tile, FIELD.STATISTICS_TILE)
    first_live = 0
    if OPTIONS.HAS_RIGHT:
        first_live = info.get(tile, FIELD.FIRST_LIVE)
    b = 0
    if params.pointers.alibi_slopes is not None:
        b = info.get(tile, FIELD.BATCH)
    query_len = info.get(tile, FIELD.QUERY_LEN)
    claims.consumer_release(tile)
    k_tile = pipelines.k.tile(tile).reshape([OPTIONS.TILE, WIDTH])
    v_tile = pipelines.v.tile(tile).reshape([OPTIONS.TILE, WIDTH_V])
    k = k_tile.slice(INDEX * STAY, STAY, dim=0)
    v = v_tile.slice(INDEX * STAY, STAY, dim=0)
    own = k_tile.slice(INDEX * COLUMNS, COLUMNS, dim=1)
    pipelines.k.consumer_wait(tile)
    pipelines.v.consumer_wait(tile)
    if OPTIONS.HAS_LEFT and first_key < context_len - scalars.window_left:
        clear_before(k, context_len - scalars.window_left - first_key)
        clear_before(v, context_len - scalars.window_left - first_key)
    k_operand = k
    v_operand = v
    if OPTIONS.OPERANDS > 0:
        v_operand = v.load(stays)
    if OPTIONS.OPERANDS > 1:
        k_operand = k.load(stays)
    operands = k_operand, v_operand
    dk = gl.zeros([STAY, WIDTH], gl.float32, of_k)
    if IN_PARTS:
        dk = new_sums(STAY, OPTIONS)
    results = dk, gl.zeros([STAY, WIDTH_V], gl.float32, of_v)
    of_tile = KeyTile(keys, first, steps, first_live, head, b, statistics_tile)
    if DQ_SUMS == NONE:
        used = seen_tiles(first, steps, query_len, keys, params, OPTIONS)
        if OPTIONS.IS_APART and first_key + STAY <= keys[2]:
            dk, dv, n = _two_results(
                operands, results, n, used, of_tile, params, pipelines, OPTIONS, False
            )
        else:
            dk, dv, n = _two_results(
                operands, results, n, used, of_tile, params, pipelines, OPTIONS, True
            )
    else:
        dk, dv, n = _three_results(
            operands, own, results, n, of_tile, params, pipelines, OPTIONS, INDEX
        )
    # results take the place of keys and values. In one pass both consumers read all keys
    if DQ_SUMS != NONE:
        meet()
    if IN_PARTS:
        store_parts(dk, k, scalars.scale, OPTIONS)
    else:
        k.store((dk * scalars.scale).to(dtype))
    v.store(dv.to(dtype))
    fence_async_shared()
    mbarrier.arrive(pipelines.done.index(tile % OPTIONS.STAY_STAGES), count=1)
    return n
