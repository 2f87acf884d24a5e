"""dK and dV of narrow heads: all products of a step are asked for together.

Registers have room for P and dS of a tile of queries beside the scores of the next tile. So the
next scores, and the two products by P and dS, run while the next probabilities are computed. No
product is under way when a step of the loop ends.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.hopper.backward_key_steps import (
    as_operand,
    ask_for_dp,
    pass_by,
    probabilities_of,
    wait_for_queries,
)
from torch_paged_attn.backends.triton.hopper.backward_work import slope_of
from torch_paged_attn.backends.triton.hopper.scores import ask_for_scores


@gluon.jit
def _start_gradients(
    pending, n, row, keys, slope, params, pipelines, OPTIONS: gl.constexpr,
    MAY_HIDE: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """P^T and dS^T of fill n, as operands. `pending` are its scores S^T, and the product dP^T - D,
    which is under way, as are LEFT products that were asked for after it. `row` is the fill's first
    query. Without MAY_HIDE each of its queries sees each of the keys."""
    s, dp_pending = pending
    weight, p16 = probabilities_of(s, n, row, keys, slope, params, pipelines, OPTIONS, MAY_HIDE)
    dp = warpgroup_mma_wait(LEFT, deps=[dp_pending])
    return p16, as_operand((weight * dp).to(pipelines.k.tiles.dtype), OPTIONS)


@gluon.jit
def two_results_at_once(
    operands, results, n, used, tile, params, pipelines, OPTIONS: gl.constexpr,
    MAY_HIDE: gl.constexpr,
):  # fmt: skip
    """dK and dV of a tile, and the number of the next fill; arguments are as for
    `backward_keys._two_results`. Between two heads a tile of gradients, too, is released while the
    last one of the head before is held: hence three stages."""
    gl.static_assert(OPTIONS.GROUP_SIZE == 1 or OPTIONS.SECOND_STAGES >= 3)
    STAY: gl.constexpr = OPTIONS.STAY
    PASS: gl.constexpr = OPTIONS.PASS
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PASS, 16])
    zeros = gl.zeros([STAY, PASS], gl.float32, scores)
    queries, douts = pipelines.q, pipelines.dout
    k, v = operands
    dk, dv = results
    skipped, seen = used
    keys, first, steps, first_live, head, b, _ = tile
    if seen == 0:
        n = pass_by(pipelines, n, steps * GROUP_SIZE)
    else:
        m = 0
        slope = slope_of(b, head, params)
        n = pass_by(pipelines, n, skipped)
        first += skipped * PASS
        q = wait_for_queries(pipelines, n, first, first_live, OPTIONS)
        s_pending = ask_for_scores(k, q.permute((1, 0)), zeros, OPTIONS)
        dp_pending = ask_for_dp(v, zeros, n, first, pipelines, OPTIONS)
        s = warpgroup_mma_wait(1, deps=[s_pending])
        p16, ds = _start_gradients(
            (s, dp_pending), n, first, keys, slope, params, pipelines, OPTIONS, MAY_HIDE, 0
        )
        for _ in range(1, seen * GROUP_SIZE):
            m += 1
            n_was = n
            n += 1
            if GROUP_SIZE > 1 and m == seen:
                m = 0
                head += 1
                slope = slope_of(b, head, params)
                n = pass_by(pipelines, n, steps - seen)
            row = first + m * PASS
            q = wait_for_queries(pipelines, n, row, first_live, OPTIONS)
            s_pending = ask_for_scores(k, q.permute((1, 0)), zeros, OPTIONS)
            dp_pending = ask_for_dp(v, zeros, n, row, pipelines, OPTIONS)
            dv_pending = warpgroup_mma(
                p16, douts.tile(n_was).reshape([PASS, WIDTH_V]), dv, is_async=True
            )
            dk_pending = warpgroup_mma(
                ds, queries.tile(n_was).reshape([PASS, WIDTH]), dk, is_async=True
            )
            s = warpgroup_mma_wait(3, deps=[s_pending])
            p_next, ds_next = _start_gradients(
                (s, dp_pending), n, row, keys, slope, params, pipelines, OPTIONS, MAY_HIDE, 2
            )
            dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[dv_pending, dk_pending, p16, ds])
            douts.consumer_release(n_was)
            queries.consumer_release(n_was)
            p16 = p_next
            ds = ds_next
        dout = douts.tile(n).reshape([PASS, WIDTH_V])
        dv_pending = warpgroup_mma(p16, dout, dv, is_async=True)
        q = queries.tile(n).reshape([PASS, WIDTH])
        dk_pending = warpgroup_mma(ds, q, dk, is_async=True)
        dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[dv_pending, dk_pending, p16, ds])
        douts.consumer_release(n)
        queries.consumer_release(n)
        n = pass_by(pipelines, n + 1, steps - skipped - seen)
    return dk, dv, n
