"""Lists of latent keys on Hopper for few heads, in Gluon.

A product has 64 rows at least, and few heads would fill a small part of them. So rows are keys and
columns of values here, and heads are columns: scores (keys, heads) and results (columns of values,
heads), of 8 or 16 heads. One consumer, four warps, has all columns of values; the producer is
`producer.py`.

Latents of 8 bits are converted to bfloat16 by other warps (`stages_8bit.py`). A scale multiplies
the scores, and the weights, of its columns: no latent is multiplied by one, and none is rounded. So
scores are products of each 128 columns, and a block has weights for each.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.common.softmax import LN2, finite_or_zero
from torch_paged_attn.backends.triton.hopper.common.softmax import RESCALE_THRESHOLD
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.mla.pipeline import HALF, KEYS, ROPE, opaque_zero
from torch_paged_attn.backends.triton.hopper.selected.consumer import add_sink
from torch_paged_attn.backends.triton.hopper.selected.stages_8bit import (
    GROUPS,
    SCALE_STAGES,
    SCALED,
)

# heads of the smallest tile, which takes the time of its copies
LEAST_HEADS = gl.constexpr(8)


@gluon.constexpr_function
def products_layout(heads):
    """Of scores, (KEYS, heads), and results, (HALF, heads)."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, heads, 16])


@gluon.jit
def _add_scores(s, n, pipelines, OPTIONS: gl.constexpr, QUARTER: gl.constexpr):
    """Ask for the products of a quarter of the keys of pair n and queries, added to scores `s`."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    COLUMN_BOXES: gl.constexpr = OPTIONS.COLUMN_BOXES
    WIDTH: gl.constexpr = HALF // COLUMN_BOXES
    SIDE: gl.constexpr = 1 if QUARTER == 1 or QUARTER == 2 else 0
    queries = pipelines.q.halves.index(SIDE + opaque_zero(n)).reshape([HEADS, HALF])
    for i in gl.static_range(COLUMN_BOXES):
        pipelines.k.wait(n, QUARTER, i)
        fence_async_shared()  # products read in another way what threads have copied
        k = pipelines.k.half(n, QUARTER).slice(i * WIDTH, WIDTH, dim=1)
        q = queries.slice(i * WIDTH, WIDTH, dim=1).permute((1, 0))
        s = warpgroup_mma(k, q, s, use_acc=QUARTER % 2 + i > 0, is_async=True)
    if QUARTER % 2 == 1 and OPTIONS.HAS_ROPE:
        q = pipelines.q.rope.index(0).reshape([HEADS, ROPE]).permute((1, 0))
        s = warpgroup_mma(pipelines.k.rope(n, QUARTER // 2), q, s, is_async=True)
    return s


@gluon.jit
def thread_sums(p):
    """(4, 8, heads): the part of a head's sum over keys that each thread adds up."""
    return gl.sum(gl.reshape(p, [4, 2, 8, p.shape[1]]), 1)


@gluon.jit
def fold_few(s, m_i, l_i, params):
    """Fold scores of a block, (KEYS, heads), into the heads' references and partial sums. Returns
    the weights, both, and the factors of earlier sums."""
    m_new = gl.maximum(m_i, gl.max(s, 0) * params.scalars.scale_log2)
    m_new = gl.where(m_new > m_i + RESCALE_THRESHOLD, m_new, m_i)
    shift = finite_or_zero(m_new)
    p = gl.exp2(s * params.scalars.scale_log2 - gl.expand_dims(shift, 0))
    shrink = gl.exp2(m_i - shift)
    sums = thread_sums(p)
    of_sums = gl.convert_layout(shrink, gl.SliceLayout(0, gl.SliceLayout(0, sums.type.layout)))
    l_i = l_i * gl.expand_dims(gl.expand_dims(of_sums, 0), 0) + sums
    return p, m_new, l_i, shrink


@gluon.jit
def fold_block(n, m_i, l_i, values, params, pipelines, OPTIONS: gl.constexpr, BLOCK: gl.constexpr):
    """Fold block number BLOCK of pair n into the heads' references and partial sums of weights, and
    into the sums of values, whose columns are two halves."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    keys, probabilities = pipelines.k, pipelines.weights
    low, high = values
    result: gl.constexpr = low.type.layout
    s = gl.zeros([KEYS, HEADS], gl.float32, products_layout(HEADS))
    s = _add_scores(s, n, pipelines, OPTIONS, 2 * BLOCK)
    s = _add_scores(s, n, pipelines, OPTIONS, 2 * BLOCK + 1)
    s = warpgroup_mma_wait(0, deps=[s])
    s = pipelines.seen.hide(s, n, BLOCK, 1)
    p, m_new, l_i, shrink = fold_few(s, m_i, l_i, params)
    probabilities.store(gl.permute(p.to(keys.halves.dtype), (1, 0)))
    fence_async_shared()
    thread_barrier()
    gain = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(0, result)), 0)
    p = probabilities.permute((1, 0))
    # a block's quarters have its columns in another order than those of the other block
    LOW: gl.constexpr = 3 * BLOCK
    HIGH: gl.constexpr = 1 + BLOCK
    low, high = low * gain, high * gain
    if HEADS == LEAST_HEADS and BLOCK == 1:  # the quarter first that is loaded first
        high = warpgroup_mma(keys.half(n, HIGH).permute((1, 0)), p, high, is_async=True)
        low = warpgroup_mma(keys.half(n, LOW).permute((1, 0)), p, low, is_async=True)
    else:
        low = warpgroup_mma(keys.half(n, LOW).permute((1, 0)), p, low, is_async=True)
        high = warpgroup_mma(keys.half(n, HIGH).permute((1, 0)), p, high, is_async=True)
    if HEADS == LEAST_HEADS:
        low, high = warpgroup_mma_wait(1, deps=[low, high])
        keys.release(2 * BLOCK)
        low, high = warpgroup_mma_wait(0, deps=[low, high])
    else:
        low, high = warpgroup_mma_wait(0, deps=[low, high])
        keys.release(2 * BLOCK)
    keys.release(2 * BLOCK + 1)
    return m_new, l_i, (low, high)


@gluon.constexpr_function
def _stored_layout(columns):
    """Of a part of the columns, (columns, heads), of which a thread has eight in a row."""
    lanes = min(32, columns // 8)
    return gl.BlockedLayout([8, 1], [lanes, 32 // lanes], [1, 4], [0, 1])


@gluon.jit
def _store_columns(x, to, head, num_heads, FIRST: gl.constexpr):
    """Store columns of a token's heads, (columns, heads), from column FIRST on, as rows of 2 HALF
    each."""
    COLUMNS: gl.constexpr = x.shape[0]
    HEADS: gl.constexpr = x.shape[1]
    layout: gl.constexpr = _stored_layout(COLUMNS)
    x = gl.convert_layout(x.to(to.dtype.element_ty), layout)
    column = FIRST + gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    h = gl.arange(0, HEADS, gl.SliceLayout(0, layout))
    to += gl.expand_dims(h * (2 * HALF), 0) + gl.expand_dims(column, 1)
    gl.store(to, x, mask=gl.expand_dims(head + h < num_heads, 0))


@gluon.jit
def finish_few(tile, m_i, l_i, values, params, pipelines, OPTIONS: gl.constexpr):
    """Store a tile's result and lse, or its part. `values`: sums of equal parts of the columns."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    COLUMNS: gl.constexpr = values[0].shape[0]
    by_head: gl.constexpr = m_i.type.layout
    pointers, work_info = params.pointers, pipelines.work_info
    num_heads = params.scalars.num_heads
    h = gl.arange(0, HEADS, by_head)
    token = work_info.get(tile, WORD.Q_START)
    first_head = work_info.get(tile, WORD.HEAD)
    part = work_info.get(tile, WORD.FIRST_PART)
    head = first_head + h
    exists = head < num_heads
    total = gl.convert_layout(gl.sum(gl.sum(l_i, 0), 0), by_head)
    if part >= 0:
        programs = gl.num_programs(0)
        references = pointers.parts + programs.to(gl.int64) * (2 * HEADS * 2 * HALF)
        gl.store(references + part * (2 * HEADS) + h, m_i)
        gl.store(references + part * (2 * HEADS) + HEADS + h, total)
        parts = pointers.parts + part.to(gl.int64) * (HEADS * 2 * HALF)
        for i in gl.static_range(len(values)):
            _store_columns(values[i], parts, first_head, num_heads, i * COLUMNS)
    else:
        has_sink = exists & (work_info.get(tile, WORD.BATCH) < params.sizes.batch)
        reference, total, gain = add_sink(m_i * LN2, total, head, has_sink, params)
        lse = pointers.lse + head.to(gl.int64) * params.sizes.total_q + token
        gl.store(lse, reference + gl.log2(total) * LN2, mask=exists)
        share = gl.where(total > 0.0, gain / total, 0.0)
        share = gl.expand_dims(
            gl.convert_layout(share, gl.SliceLayout(0, values[0].type.layout)), 0
        )
        out = pointers.out + (token.to(gl.int64) * num_heads + first_head) * (2 * HALF)
        for i in gl.static_range(len(values)):
            _store_columns(values[i] * share, out, first_head, num_heads, i * COLUMNS)


@gluon.jit
def consume_few(params, pipelines, FOLD: gl.constexpr, PARTS: gl.constexpr, OPTIONS: gl.constexpr):
    """Compute every tile of queries. Sums of values are PARTS equal parts of the columns, and FOLD
    adds a block of keys to them."""
    HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    layout: gl.constexpr = products_layout(HEADS)
    by_head: gl.constexpr = gl.SliceLayout(0, layout)
    work_info = pipelines.work_info
    n = 0
    tile = 0
    pipelines.q.wait(0)
    pairs = work_info.get(0, WORD.NUM_KV_TILES)
    while pairs > 0:
        m_i = gl.full([HEADS], -float("inf"), gl.float32, by_head)
        l_i = thread_sums(gl.zeros([KEYS, HEADS], gl.float32, layout))
        values = (gl.zeros([2 * HALF // PARTS, HEADS], gl.float32, layout),) * PARTS
        for _ in range(pairs):
            m_i, l_i, values = FOLD(n, m_i, l_i, values, params, pipelines, OPTIONS, 0)
            m_i, l_i, values = FOLD(n, m_i, l_i, values, params, pipelines, OPTIONS, 1)
            n += 1
        pipelines.q.release()
        finish_few(tile, m_i, l_i, values, params, pipelines, OPTIONS)
        tile += 1
        pipelines.q.wait(tile)
        pairs = work_info.get(tile, WORD.NUM_KV_TILES)


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
