"""dK and dV, and in one pass dQ, of narrow heads: all products of a tile are asked for together.

Registers hold P (and dS, which one pass has in shared memory) of a tile of queries beside the
scores of the next. So the next scores, and the products that are left of this tile, run while the
next probabilities are computed, and nothing is under way where a loop ends.

The order in one pass matters to the assembler: products whose operand lies in registers come first,
or it takes them one by one.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.hopper.backward_key_steps import (
    as_operand,
    ask_for_dp,
    leave,
    meet,
    pass_by,
    probabilities_of,
    wait_for_queries,
)
from torch_paged_attn.backends.triton.hopper.backward_work import slope_of
from torch_paged_attn.backends.triton.hopper.scores import ask_for_scores


@gluon.jit
def _start_gradients(
    s, dp_pending, n, row, keys, slope, params, pipelines, OPTIONS: gl.constexpr,
    MAY_HIDE: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """From the scores of fill n to P^T, as an operand, and dS^T, while LEFT products that were asked
    for after dP^T are under way; dP^T is less D."""
    weight, p16 = probabilities_of(s, n, row, keys, slope, params, pipelines, OPTIONS, MAY_HIDE)
    dp = warpgroup_mma_wait(LEFT, deps=[dp_pending])
    return p16, (weight * dp).to(pipelines.k.tiles.dtype)


@gluon.jit
def _show_gradient(ds, n, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """dS^T of fill n where both consumers read it, once both have come here."""
    STAY: gl.constexpr = OPTIONS.STAY
    tile = pipelines.ds.index(n % OPTIONS.DS_STAGES)
    tile.slice(INDEX * STAY, STAY, dim=0).store(ds)
    fence_async_shared()
    meet()


@gluon.jit
def two_results_at_once(
    k, v, dk, dv, n, steps, skipped, seen, first, first_live, head, b, keys, params, pipelines,
    OPTIONS: gl.constexpr, MAY_HIDE: gl.constexpr,
):  # fmt: skip
    """dK and dV of a tile, for a consumer that has a use for `seen` of the `steps` tiles of each
    head, after `skipped` ones. P and dS are operands in registers. It lets go of a tile of another
    head while it holds the last of this one."""
    gl.static_assert(OPTIONS.GROUP_SIZE == 1 or OPTIONS.SECOND_STAGES >= 3)
    STAY: gl.constexpr = OPTIONS.STAY
    PASS: gl.constexpr = OPTIONS.PASS
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PASS, 16])
    zeros = gl.zeros([STAY, PASS], gl.float32, scores)
    queries, douts = pipelines.q, pipelines.dout
    if seen == 0:
        n = pass_by(pipelines, n, steps * GROUP_SIZE)
    else:
        m = 0
        slope = slope_of(b, head, params)
        n = pass_by(pipelines, n, skipped)
        first += skipped * PASS
        q = wait_for_queries(pipelines, n, first, first_live, OPTIONS)
        s_pending = ask_for_scores(k, q.permute((1, 0)), zeros, OPTIONS)
        dp_pending = ask_for_dp(v, zeros, n, pipelines, OPTIONS)
        s = warpgroup_mma_wait(1, deps=[s_pending])
        p16, ds = _start_gradients(
            s, dp_pending, n, first, keys, slope, params, pipelines, OPTIONS, MAY_HIDE, 0
        )
        ds = as_operand(ds, OPTIONS)
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
            dp_pending = ask_for_dp(v, zeros, n, pipelines, OPTIONS)
            dv_pending = warpgroup_mma(
                p16, douts.tile(n_was).reshape([PASS, WIDTH_V]), dv, is_async=True
            )
            dk_pending = warpgroup_mma(
                ds, queries.tile(n_was).reshape([PASS, WIDTH]), dk, is_async=True
            )
            s = warpgroup_mma_wait(3, deps=[s_pending])
            p_next, ds_next = _start_gradients(
                s, dp_pending, n, row, keys, slope, params, pipelines, OPTIONS, MAY_HIDE, 2
            )
            dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[dv_pending, dk_pending, p16, ds])
            douts.consumer_release(n_was)
            queries.consumer_release(n_was)
            p16 = p_next
            ds = as_operand(ds_next, OPTIONS)
        dout = douts.tile(n).reshape([PASS, WIDTH_V])
        dv_pending = warpgroup_mma(p16, dout, dv, is_async=True)
        q = queries.tile(n).reshape([PASS, WIDTH])
        dk_pending = warpgroup_mma(ds, q, dk, is_async=True)
        dv, dk, p16, ds = warpgroup_mma_wait(0, deps=[dv_pending, dk_pending, p16, ds])
        douts.consumer_release(n)
        queries.consumer_release(n)
        n = pass_by(pipelines, n + 1, steps - skipped - seen)
    return dk, dv, n


@gluon.jit
def three_results_at_once(
    k, v, own, dk, dv, n, steps, first, first_live, head, b, keys, statistics_tile, params,
    pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """dK and dV of a tile, and the parts of dQ, of a consumer's `own` columns of the keys. Between
    two meetings of the consumers all five products run; dS is read from shared memory by two."""
    STAY: gl.constexpr = OPTIONS.STAY
    PASS: gl.constexpr = OPTIONS.PASS
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    COLUMNS: gl.constexpr = WIDTH // OPTIONS.CONSUMERS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PASS, 16])
    of_q: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    zeros = gl.zeros([STAY, PASS], gl.float32, scores)
    zeros_q = gl.zeros([PASS, COLUMNS], gl.float32, of_q)
    queries, douts = pipelines.q, pipelines.dout
    for g in range(OPTIONS.GROUP_SIZE):
        slope = slope_of(b, head + g, params)
        if steps > 0:
            q = wait_for_queries(pipelines, n, first, first_live, OPTIONS)
            s_pending = ask_for_scores(k, q.permute((1, 0)), zeros, OPTIONS)
            dp_pending = ask_for_dp(v, zeros, n, pipelines, OPTIONS)
            s = warpgroup_mma_wait(1, deps=[s_pending])
            p16, ds_next = _start_gradients(
                s, dp_pending, n, first, keys, slope, params, pipelines, OPTIONS, True, 0
            )
            _show_gradient(ds_next, n, pipelines, OPTIONS, INDEX)
            for m in range(1, steps):
                row = first + m * PASS
                q_was = queries.tile(n).reshape([PASS, WIDTH])
                dout_was = douts.tile(n).reshape([PASS, WIDTH_V])
                shown = pipelines.ds.index(n % OPTIONS.DS_STAGES)
                q = wait_for_queries(pipelines, n + 1, row, first_live, OPTIONS)
                douts.consumer_wait(n + 1)
                dout = douts.tile(n + 1).reshape([PASS, WIDTH_V])
                statistics = pipelines.statistics.index((n + 1) % OPTIONS.FIRST_STAGES)
                start = zeros - statistics.slice(PASS, PASS, dim=1).load(scores)
                dv_pending = warpgroup_mma(p16, dout_was, dv, is_async=True)
                s_pending = ask_for_scores(k, q.permute((1, 0)), zeros, OPTIONS)
                dp_pending = warpgroup_mma(v, dout.permute((1, 0)), start, is_async=True)
                ds = shown.slice(INDEX * STAY, STAY, dim=0)
                dk_pending = warpgroup_mma(ds, q_was, dk, is_async=True)
                dq_pending = warpgroup_mma(
                    shown.permute((1, 0)), own, zeros_q, use_acc=False, is_async=True
                )
                s, dv, p16 = warpgroup_mma_wait(3, deps=[s_pending, dv_pending, p16])
                douts.consumer_release(n)
                p16, ds_next = _start_gradients(
                    s, dp_pending, n + 1, row, keys, slope, params, pipelines, OPTIONS, True, 2
                )
                dk, dq = warpgroup_mma_wait(0, deps=[dk_pending, dq_pending])
                queries.consumer_release(n)
                leave(dq, n, head + g, m - 1, statistics_tile, params, pipelines, OPTIONS, INDEX)
                n += 1
                _show_gradient(ds_next, n, pipelines, OPTIONS, INDEX)
            dv_pending = warpgroup_mma(
                p16, douts.tile(n).reshape([PASS, WIDTH_V]), dv, is_async=True
            )
            shown = pipelines.ds.index(n % OPTIONS.DS_STAGES)
            ds = shown.slice(INDEX * STAY, STAY, dim=0)
            q = queries.tile(n).reshape([PASS, WIDTH])
            dk_pending = warpgroup_mma(ds, q, dk, is_async=True)
            dq_pending = warpgroup_mma(
                shown.permute((1, 0)), own, zeros_q, use_acc=False, is_async=True
            )
            dv, dk, p16, dq = warpgroup_mma_wait(0, deps=[dv_pending, dk_pending, p16, dq_pending])
            douts.consumer_release(n)
            queries.consumer_release(n)
            leave(dq, n, head + g, steps - 1, statistics_tile, params, pipelines, OPTIONS, INDEX)
            n += 1
    return dk, dv, n
