"""A consumer of the kernel for lists of latent keys: as in `mla/consumer.py`, four warps that
compute half of a result's columns and the scores of every other block.

Tiles follow each other without a pause: a consumer asks for the scores of the next tile's first
block before it stores the result of this one. So queries are released as soon as a tile's last
scores are there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from torch_paged_attn.backends.triton.common.softmax import LN2, with_sink
from torch_paged_attn.backends.triton.hopper.common.softmax import partial_sum, rescale, scale_rows
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD
from torch_paged_attn.backends.triton.hopper.mla.consumer import (
    add_half_of_scores,
    add_rest_of_scores,
    all_sums,
    first_values,
    next_scores,
    receive_block,
    scale_sums,
    second_values,
    store_part,
)
from torch_paged_attn.backends.triton.hopper.mla.pipeline import HALF, KEYS, ROWS


@gluon.constexpr_function
def _stored_layout():
    """Of this consumer's (ROWS, HALF) results: a thread's rows are those of its products, of which
    it stores 16 bytes at a time."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], [0, 32], [0, 64], [0, 128]],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, 256],
    )


@gluon.jit
def _store_rows(x, token, first_head, params, W: gl.constexpr):
    """Store this consumer's columns of heads of a token."""
    layout: gl.constexpr = _stored_layout()
    x = gl.convert_layout(x, layout)
    head = first_head + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    column = W * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
    row = (token.to(gl.int64) * params.scalars.num_heads + head) * (2 * HALF)
    to = params.pointers.out + gl.expand_dims(row, 1) + gl.expand_dims(column, 0)
    gl.store(to, x, mask=gl.expand_dims(head < params.scalars.num_heads, 1))


@gluon.jit
def add_sink(reference, total, head, has_sink, params):
    """References, in base e, and sums of weights of rows with their sinks, if a call has any, and
    factors of the rows' sums of values."""
    gain = 1.0
    if params.pointers.sinks is not None:
        sink = gl.load(params.pointers.sinks + head, mask=has_sink, other=-float("inf"))
        reference, total, gain = with_sink(reference, total, sink)
    return reference, total, gain


@gluon.jit
def _finish_tile(m_i, l_i, acc, tile, params, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr):
    """Store this consumer's columns of a tile's result, or of its part, and the rows' lse."""
    work_info = pipelines.work_info
    total = all_sums(l_i, tile, m_i, pipelines.exchange, W)
    token = work_info.get(tile, WORD.Q_START)
    first_head = work_info.get(tile, WORD.HEAD)
    part = work_info.get(tile, WORD.FIRST_PART)
    head = first_head + gl.arange(0, ROWS, m_i.type.layout)
    exists = head < params.scalars.num_heads
    if part >= 0:
        store_part(acc, m_i, total, part, exists, params, W)
    else:
        has_sink = exists & (work_info.get(tile, WORD.BATCH) < params.sizes.batch)
        reference, total, gain = add_sink(m_i * LN2, total, head, has_sink, params)
        if W == 0:
            lse = params.pointers.lse + head.to(gl.int64) * params.sizes.total_q + token
            gl.store(lse, reference + gl.log2(total) * LN2, mask=exists)
        share = gl.where(total > 0.0, gain / total, 0.0)
        _store_rows(
            scale_rows(acc, share).to(pipelines.k.halves.dtype), token, first_head, params, W
        )


@gluon.jit
def _first_blocks(n, pairs, s, m_i, l_i, acc, params, pipelines, OPTIONS: gl.constexpr):
    """The first consumer's work on `pairs` pairs of blocks, from pair n on, whose first scores are
    `s`; the products with values of the last pair's second block are only asked for. Returns the
    number of the last pair, and the rows' references, partial sums, and sums of values."""
    scores: gl.constexpr = s.type.layout
    zeros = gl.zeros([ROWS, KEYS], gl.float32, scores)
    if pairs == 1:
        pipelines.q.release()
    m_i, l_i, acc, shrink = first_values(n, s, 0, m_i, l_i, acc, None, params, pipelines, OPTIONS)
    for i in range(1, pairs):
        n, _, s, acc = next_scores(n, 0, zeros, acc, shrink, pipelines, OPTIONS)
        if i == pairs - 1:
            pipelines.q.release()
        m_i, l_i, acc, shrink = first_values(
            n, s, 0, m_i, l_i, acc, None, params, pipelines, OPTIONS
        )
    return n, m_i, l_i, rescale(acc, shrink)


@gluon.jit
def _second_blocks(n, pairs, s, m_i, l_i, acc, params, pipelines, OPTIONS: gl.constexpr):
    """The same for the second consumer, which computes the scores of each pair's second block; no
    products are pending. Returns the number of the pair after the last one."""
    scores: gl.constexpr = s.type.layout
    zeros = gl.zeros([ROWS, KEYS], gl.float32, scores)
    if pairs == 1:
        pipelines.q.release()
    m_i, shrink = receive_block(n, m_i, pipelines, 1)
    l_i = scale_sums(l_i, shrink)
    acc = rescale(acc, shrink)
    m_i, l_i, acc = second_values(n, s, 0, m_i, l_i, acc, None, params, pipelines, OPTIONS)
    n += 1
    for i in range(1, pairs):
        s = add_half_of_scores(zeros, n, pipelines, OPTIONS, 2)
        s = add_rest_of_scores(s, n, pipelines, OPTIONS, 1)
        m_i, shrink = receive_block(n, m_i, pipelines, 1)
        l_i = scale_sums(l_i, shrink)
        s = warpgroup_mma_wait(0, deps=[s])
        if i == pairs - 1:
            pipelines.q.release()
        acc = rescale(acc, shrink)
        m_i, l_i, acc = second_values(n, s, 0, m_i, l_i, acc, None, params, pipelines, OPTIONS)
        n += 1
    return n, m_i, l_i, acc


@gluon.jit
def consume_lists(params, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr):
    """As consumer W, compute columns W * HALF to (W + 1) * HALF of every tile of queries."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    keys, queries, work_info = pipelines.k, pipelines.q, pipelines.work_info
    zeros = gl.zeros([ROWS, KEYS], gl.float32, scores)
    n = 0
    tile = 0
    queries.wait(0)
    pairs = work_info.get(0, WORD.NUM_KV_TILES)  # a program has a tile at least
    s = add_half_of_scores(zeros, n, pipelines, OPTIONS, 2 * W)
    s = add_rest_of_scores(s, n, pipelines, OPTIONS, W)
    s = warpgroup_mma_wait(0, deps=[s])
    while pairs > 0:
        m_i = gl.full([ROWS], -float("inf"), gl.float32, by_row)
        l_i = partial_sum(zeros)
        acc = gl.zeros([ROWS, HALF], gl.float32, result)
        if W == 0:
            n, m_i, l_i, acc = _first_blocks(n, pairs, s, m_i, l_i, acc, params, pipelines, OPTIONS)
            pending = warpgroup_mma(keys.rope(n, 1), keys.half(n, 3), acc, is_async=True)
            n += 1
            queries.wait(tile + 1)
            pairs = work_info.get(tile + 1, WORD.NUM_KV_TILES)
            next_s = add_half_of_scores(zeros, n, pipelines, OPTIONS, 0, pairs > 0)
            acc = warpgroup_mma_wait(OPTIONS.COLUMN_BOXES, deps=[pending])
            keys.release(3)
            next_s = add_rest_of_scores(next_s, n, pipelines, OPTIONS, 0, pairs > 0)
        else:
            n, m_i, l_i, acc = _second_blocks(
                n, pairs, s, m_i, l_i, acc, params, pipelines, OPTIONS
            )
            queries.wait(tile + 1)
            pairs = work_info.get(tile + 1, WORD.NUM_KV_TILES)
            next_s = add_half_of_scores(zeros, n, pipelines, OPTIONS, 2, pairs > 0)
            next_s = add_rest_of_scores(next_s, n, pipelines, OPTIONS, 1, pairs > 0)
        _finish_tile(m_i, l_i, acc, tile, params, pipelines, OPTIONS, W)
        s = warpgroup_mma_wait(0, deps=[next_s])
        tile += 1
