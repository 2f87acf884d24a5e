"""Lists of latents of 8 bits on Hopper for few heads, in Gluon: as `few_heads.py`, with
latents that become operands of products in registers, as in `mla/consumer_8bit.py`. A
multiprocessor has two programs, so that one converts while products of the other run.

Latents and queries are read as pairs of columns: even columns are multiplied apart from odd ones.
A scale multiplies the scores, and the weights, of its columns: no latent is multiplied by one, and
none is rounded. So scores are products of each 128 columns, and a block has weights for each.

Latents, and so weights times scales, are float16. These are stored times a power of two, one for
all heads and columns, by which the largest scale of the keys so far becomes 2**6 to 2**7.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.common.dequant import decode_pairs, float16_range
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.mla.pipeline import HALF, KEYS, ROPE, opaque_zero
from torch_paged_attn.backends.triton.hopper.selected.few_heads import (
    finish_few,
    fold_few,
    products_layout,
    scale_of,
    thread_sums,
)
from torch_paged_attn.backends.triton.hopper.selected.stages_8bit import (
    BLOCKS,
    GROUPS,
    PAIRS,
    SCALE_STAGES,
    stage_of,
)

# weights are at most 2**RESCALE_THRESHOLD, and float16 is less than 2**16
ROOM = gl.constexpr(2.0**-8)


@gluon.constexpr_function
def _by_warp():
    """Of a block's scales, (KEYS, GROUPS): each warp has all of them."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [32, 0]],
        lane_bases=[[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]],
        warp_bases=[[0, 0], [0, 0]],
        block_bases=[],
        shape=[64, 4],
    )


@gluon.jit
def _take_queries(queries, split, OPTIONS: gl.constexpr):
    """Put the latent columns of a tile's queries as float16 where they lie, even columns apart from
    odd ones: `split`, (2, heads, HALF). Returns the factors of scores, by head, of a row that was
    multiplied by a power of two."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    low = queries.halves.index(0).reshape([HEADS, HALF]).load(layout).to(gl.float32)
    high = queries.halves.index(1).reshape([HEADS, HALF]).load(layout).to(gl.float32)
    largest = gl.maximum(gl.max(gl.abs(low), 1), gl.max(gl.abs(high), 1))
    enlarge, factor = float16_range(largest)
    enlarge = gl.expand_dims(enlarge, 1)
    thread_barrier()  # all columns are read
    _split_columns(low * enlarge, split, 0)
    _split_columns(high * enlarge, split, HALF // 2)
    fence_async_shared()
    thread_barrier()
    return gl.convert_layout(factor, gl.SliceLayout(0, products_layout(HEADS)))


@gluon.jit
def _split_columns(x, split, FIRST: gl.constexpr):
    even, odd = gl.split(gl.reshape(x.to(gl.float16), [x.shape[0], HALF // 2, 2]))
    split.index(0).slice(FIRST, HALF // 2, dim=1).store(even)
    split.index(1).slice(FIRST, HALF // 2, dim=1).store(odd)


@gluon.jit
def _scores(n, scales, factor, pipelines, split, OPTIONS: gl.constexpr, BLOCK: gl.constexpr):
    """Scores of block BLOCK of pair n."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    stored, ropes = pipelines.stored, pipelines.ropes
    layout: gl.constexpr = products_layout(HEADS)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    zeros = gl.zeros([KEYS, HEADS], gl.float32, layout)
    # another one for each block of a pair: the compiler would keep what it has found for the first
    zero = opaque_zero(2 * n + BLOCK)
    of_even, of_odd = split.index(zero), split.index(1 + zero)
    rope_stage, rope_phase = stage_of(n, ropes, BLOCK, BLOCKS)
    mbarrier.wait(ropes.full.index(rope_stage), rope_phase)  # scales have arrived, too
    s = zeros
    before = zeros
    operands = (zeros, zeros)
    for i in gl.static_range(GROUPS):
        stage, phase = stage_of(n, stored, GROUPS * BLOCK + i, BLOCKS * GROUPS)
        mbarrier.wait(stored.full.index(stage), phase)
        pairs = stored.tiles.index(stage).load(operand)
        even, odd = decode_pairs(pairs, "E4M3", True)
        q_even = of_even.slice(i * PAIRS, PAIRS, dim=1).permute((1, 0))
        q_odd = of_odd.slice(i * PAIRS, PAIRS, dim=1).permute((1, 0))
        x = warpgroup_mma(even, q_even, zeros, use_acc=False, is_async=True)
        x = warpgroup_mma(odd, q_odd, x, is_async=True)
        if i > 0:
            # an operand's registers are free only when its product has ended
            done = warpgroup_mma_wait(2, deps=(before, operands[0], operands[1]))
            s += done[0] * scale_of(scales, i - 1, OPTIONS)
        before = x
        operands = (even, odd)
    fence_async_shared()  # products read in another way what threads have copied
    q = pipelines.q.rope.index(0).reshape([HEADS, ROPE]).permute((1, 0))
    r = warpgroup_mma(ropes.tiles.index(rope_stage), q, zeros, use_acc=False, is_async=True)
    done = warpgroup_mma_wait(1, deps=(before, operands[0], operands[1]))
    s += done[0] * scale_of(scales, GROUPS - 1, OPTIONS)
    s = s * gl.expand_dims(factor, 0) + warpgroup_mma_wait(0, deps=(r,))
    return pipelines.seen.hide(s, n, BLOCK, 1)


@gluon.jit
def _add_values(n, values, weights, stored, OPTIONS: gl.constexpr, BLOCK: gl.constexpr):
    """Add to the sums of even and of odd columns of each group the products of values of block
    BLOCK of pair n and weights."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    operand: gl.constexpr = gl.DotOperandLayout(0, products_layout(HEADS), 2)
    found = ()
    operands = (values[0], values[0])
    for i in gl.static_range(GROUPS):
        stage, _ = stage_of(n, stored, GROUPS * BLOCK + i, BLOCKS * GROUPS)
        pairs = stored.tiles.index(stage).permute((1, 0)).load(operand)
        even, odd = decode_pairs(pairs, "E4M3", True)
        thread_barrier()  # all threads have read it
        mbarrier.arrive(stored.empty.index(stage), count=1)
        p = weights.slice(i * HEADS, HEADS).permute((1, 0))
        of_even = warpgroup_mma(even, p, values[2 * i], is_async=True)
        of_odd = warpgroup_mma(odd, p, values[2 * i + 1], is_async=True)
        if i > 0:
            warpgroup_mma_wait(2, deps=operands)
        found = found + (of_even, of_odd)  # type: ignore[assignment]  # noqa: RUF005
        operands = (even, odd)
    done = warpgroup_mma_wait(0, deps=found + operands)
    return done[: 2 * GROUPS]


@gluon.jit
def _fold_block(
    n, m_i, l_i, unit, factor, values, params, pipelines, split, OPTIONS: gl.constexpr,
    BLOCK: gl.constexpr,
):  # fmt: skip
    """Fold block BLOCK of pair n into the heads' references, partial sums of weights, and sums of
    values. `unit`: by which these are multiplied."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    weights = pipelines.weights
    scales = pipelines.scales.index((2 * n + BLOCK) % SCALE_STAGES)
    s = _scores(n, scales, factor, pipelines, split, OPTIONS, BLOCK)
    p, m_i, l_i, shrink = fold_few(s, m_i, l_i, params)
    enlarge, _ = float16_range(gl.max(gl.max(scales.load(_by_warp()), 1), 0))
    new_unit = gl.minimum(unit, enlarge * ROOM)
    for i in gl.static_range(GROUPS):
        x = (p * (scale_of(scales, i, OPTIONS) * new_unit)).to(gl.float16)
        weights.slice(i * HEADS, HEADS).store(gl.permute(x, (1, 0)))
    fence_async_shared()
    thread_barrier()
    ropes = pipelines.ropes
    mbarrier.arrive(ropes.empty.index(stage_of(n, ropes, BLOCK, BLOCKS)[0]), count=1)
    gain = gl.expand_dims(shrink * (new_unit / unit), 0)
    scaled = ()
    for i in gl.static_range(2 * GROUPS):
        scaled = scaled + (values[i] * gain,)  # type: ignore[assignment]  # noqa: RUF005
    values = _add_values(n, scaled, weights, pipelines.stored, OPTIONS, BLOCK)
    return m_i, l_i, new_unit, values


@gluon.jit
def consume_pairs(params, pipelines, OPTIONS: gl.constexpr):
    """Compute every tile of queries."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    split = pipelines.split
    layout: gl.constexpr = products_layout(HEADS)
    by_head: gl.constexpr = gl.SliceLayout(0, layout)
    work_info = pipelines.work_info
    n = 0
    tile = 0
    pipelines.q.wait(0)
    pairs = work_info.get(0, WORD.NUM_KV_TILES)
    while pairs > 0:
        factor = _take_queries(pipelines.q, split, OPTIONS)
        m_i = gl.full([HEADS], -float("inf"), gl.float32, by_head)
        l_i = thread_sums(gl.zeros([KEYS, HEADS], gl.float32, layout))
        zeros = gl.zeros([PAIRS, HEADS], gl.float32, layout)
        values = (zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros)
        unit, _ = float16_range(gl.max(gl.zeros([HEADS], gl.float32, by_head), 0))
        for _ in range(pairs):
            m_i, l_i, unit, values = _fold_block(
                n, m_i, l_i, unit, factor, values, params, pipelines, split, OPTIONS, 0
            )
            m_i, l_i, unit, values = _fold_block(
                n, m_i, l_i, unit, factor, values, params, pipelines, split, OPTIONS, 1
            )
            n += 1
        pipelines.q.release()
        found = ()
        for i in gl.static_range(GROUPS):
            x = gl.permute(gl.join(values[2 * i], values[2 * i + 1]), (0, 2, 1))
            x = gl.reshape(x, [2 * PAIRS, HEADS]) * (1.0 / unit)
            found = found + (x,)  # type: ignore[assignment]  # noqa: RUF005
        finish_few(tile, m_i, l_i, found, params, pipelines, OPTIONS)
        tile += 1
        pipelines.q.wait(tile)
        pairs = work_info.get(tile, WORD.NUM_KV_TILES)
