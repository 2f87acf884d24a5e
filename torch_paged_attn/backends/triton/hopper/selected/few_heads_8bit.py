"""Lists of latents of 8 bits on Hopper for few heads, in Gluon: as `few_heads.py`, with
latents that other warps convert to bfloat16 (`stages_8bit.py`).

A scale multiplies the scores, and the weights, of its columns: no latent is multiplied by one, and
none is rounded. So scores are products of each 128 columns, and a block has weights for each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.hopper.common.work_info import thread_barrier
from torch_paged_attn.backends.triton.hopper.mla.pipeline import HALF, KEYS, ROPE, opaque_zero
from torch_paged_attn.backends.triton.hopper.selected.few_heads import fold_few, products_layout
from torch_paged_attn.backends.triton.hopper.selected.stages_8bit import (
    GROUPS,
    SCALE_STAGES,
    SCALED,
)


@gluon.jit
def _ask_for_scores(block, C: gl.constexpr, pipelines, zeros, OPTIONS: gl.constexpr):
    """Scores of group C of a block's columns, not yet scaled."""
    fill = GROUPS * block + C
    pipelines.k.consumer_wait(fill)
    side = C * SCALED // HALF + opaque_zero(block)
    q = pipelines.q.halves.index(side).reshape([OPTIONS.PACKED_HEADS, HALF])
    q = q.slice(C * SCALED % HALF, SCALED, dim=1).permute((1, 0))
    return warpgroup_mma(pipelines.k.tile(fill), q, zeros, use_acc=False, is_async=True)


@gluon.jit
def _scores(block, n, scales, pipelines, OPTIONS: gl.constexpr, BLOCK: gl.constexpr):
    """Scores of a block, which is block BLOCK of pair n."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    zeros = gl.zeros([KEYS, HEADS], gl.float32, products_layout(HEADS))
    a = _ask_for_scores(block, 0, pipelines, zeros, OPTIONS)
    b = _ask_for_scores(block, 1, pipelines, zeros, OPTIONS)
    c = _ask_for_scores(block, 2, pipelines, zeros, OPTIONS)
    d = _ask_for_scores(block, 3, pipelines, zeros, OPTIONS)
    pipelines.ropes.consumer_wait(block)
    fence_async_shared()  # products read in another way what threads have copied
    q = pipelines.q.rope.index(0).reshape([HEADS, ROPE]).permute((1, 0))
    s = warpgroup_mma(pipelines.ropes.tile(block), q, zeros, use_acc=False, is_async=True)
    a, b, c, d, s = warpgroup_mma_wait(0, deps=[a, b, c, d, s])
    s += a * scale_of(scales, 0, OPTIONS) + b * scale_of(scales, 1, OPTIONS)
    s += c * scale_of(scales, 2, OPTIONS) + d * scale_of(scales, 3, OPTIONS)
    s = pipelines.seen.hide(s, n, BLOCK, 1)
    pipelines.ropes.consumer_release(block)
    return s


@gluon.jit
def scale_of(scales, C: gl.constexpr, OPTIONS: gl.constexpr):
    """Scales of group C of a block's keys, (KEYS, 1)."""
    return scales.slice(C, 1, dim=1).load(products_layout(OPTIONS.PACKED_HEADS))


@gluon.jit
def fold_converted(
    n, m_i, l_i, values, params, pipelines, OPTIONS: gl.constexpr, BLOCK: gl.constexpr
):
    """Fold block BLOCK of pair n into the heads' references, partial sums of weights, and sums of
    values of each group of columns."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    keys, weights = pipelines.k, pipelines.weights
    result: gl.constexpr = values[0].type.layout
    block = 2 * n + BLOCK
    scales = pipelines.scales.index(block % SCALE_STAGES)
    s = _scores(block, n, scales, pipelines, OPTIONS, BLOCK)
    p, m_i, l_i, shrink = fold_few(s, m_i, l_i, params)
    for i in gl.static_range(GROUPS):
        x = (p * scale_of(scales, i, OPTIONS)).to(weights.dtype)
        weights.slice(i * HEADS, HEADS).store(gl.permute(x, (1, 0)))
    fence_async_shared()
    thread_barrier()
    gain = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(0, result)), 0)
    a = _add_values(values[0] * gain, block, 0, keys, weights, OPTIONS)
    b = _add_values(values[1] * gain, block, 1, keys, weights, OPTIONS)
    c = _add_values(values[2] * gain, block, 2, keys, weights, OPTIONS)
    d = _add_values(values[3] * gain, block, 3, keys, weights, OPTIONS)
    for i in gl.static_range(GROUPS):
        a, b, c, d = warpgroup_mma_wait(GROUPS - 1 - i, deps=[a, b, c, d])
        keys.consumer_release(GROUPS * block + i)
    return m_i, l_i, (a, b, c, d)


@gluon.jit
def _add_values(acc, block, C: gl.constexpr, keys, weights, OPTIONS: gl.constexpr):
    """Ask for the products of group C of a block's values and its weights."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    v = keys.tile(GROUPS * block + C).permute((1, 0))
    p = weights.slice(C * HEADS, HEADS).permute((1, 0))
    return warpgroup_mma(v, p, acc, is_async=True)
