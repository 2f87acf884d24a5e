"""A consumer of the kernel for latent attention: four warps that compute half of a result's
columns.

A result of 64 rows and 512 columns in float32 fills half of a multiprocessor's registers. So two
consumers hold half of it each, and take turns with blocks of keys (FlashMLA's "seesaw"): each
computes the scores of every other block, and gives the other one the probabilities. Rows'
references go from block to block in the order of the keys.

While one consumer computes its softmax, products of the other one run. The first consumer's scores
are asked for first, and its softmax ends while the second one's scores are multiplied. The second
one's softmax is computed while the first block's values are multiplied.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.common.softmax import LN2
from torch_paged_attn.backends.triton.hopper.common.scores import mask_window
from torch_paged_attn.backends.triton.hopper.common.softmax import (
    partial_sum,
    rescale,
    scale_rows,
    update_softmax,
)
from torch_paged_attn.backends.triton.hopper.common.tma import store_rows
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.mla.pipeline import HALF, KEYS, ROWS


class LatentRows(NamedTuple):
    """The rows of a tile, as values of the kernel."""

    position: Any  # by row
    key_len: Any
    full_stop: Any  # keys before this one are seen by all rows


@gluon.jit
def probabilities(
    s, n, start, m_i, l_i, rows, params, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr
):  # fmt: skip
    """Fold the scores of block W of pair n, whose first key is `start`, into the rows' references
    and sums; see `update_softmax`, also for what is returned."""
    if OPTIONS.OF_LISTS:
        s = pipelines.seen.hide(s, n, W)
    elif start + KEYS > rows.full_stop:
        s = mask_window(s, start, rows, params.scalars, OPTIONS)
    return update_softmax(s, m_i, l_i, params.scalars.scale_log2)


@gluon.jit
def send_block(n, p, m_i, shrink, pipelines, W: gl.constexpr):
    """Give the other consumer the probabilities of this one's block of pair n, and references and
    factors of the rows after it."""
    # until here, warps of this consumer read the columns whose place probabilities take
    thread_barrier()
    pipelines.k.rope(n, W).store(p)
    pipelines.exchange.of(W, 0).store(m_i)
    pipelines.exchange.of(W, 1).store(shrink)
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(pipelines.exchange.sent.index(W), count=1)


@gluon.jit
def receive_block(n, like, pipelines, W: gl.constexpr):
    """References and factors of the rows after the other consumer's block of pair n, once they are
    there, in the layout of `like`. Its probabilities are there, too."""
    mbarrier.wait(pipelines.exchange.sent.index(1 - W), n & 1)
    m_i = pipelines.exchange.of(1 - W, 0).load(like.type.layout)
    return m_i, pipelines.exchange.of(1 - W, 1).load(like.type.layout)


@gluon.jit
def scale_sums(l_i, shrink):
    """Partial sums of rows, times the rows' factors."""
    rows: gl.constexpr = gl.SliceLayout(1, l_i.type.layout)
    return l_i * gl.expand_dims(gl.convert_layout(shrink, rows, True), 1)


@gluon.jit
def add_half_of_scores(
    s, n, pipelines, OPTIONS: gl.constexpr, QUARTER: gl.constexpr, exists=True
):  # fmt: skip
    """Ask for the products of queries and a quarter of the keys of pair n, added to scores `s`: one
    for each column box, when it has arrived. A block's first product overwrites s. If there is no
    pair n, for any numbers at once."""
    COLUMN_BOXES: gl.constexpr = OPTIONS.COLUMN_BOXES
    WIDTH: gl.constexpr = HALF // COLUMN_BOXES
    SIDE: gl.constexpr = 1 if QUARTER == 1 or QUARTER == 2 else 0
    for i in gl.static_range(COLUMN_BOXES):
        pipelines.k.wait(n, QUARTER, i, exists)
        if OPTIONS.OF_LISTS:
            fence_async_shared()  # products read in another way what threads have copied
        q = pipelines.q.half(n, SIDE).slice(i * WIDTH, WIDTH, dim=1)
        k = pipelines.k.half(n, QUARTER).slice(i * WIDTH, WIDTH, dim=1).permute((1, 0))
        s = warpgroup_mma(q, k, s, use_acc=QUARTER % 2 + i > 0, is_async=True)
    return s


@gluon.jit
def add_rest_of_scores(s, n, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr, exists=True):
    """Ask for the products of block W's other quarter, and of the columns that are no values."""
    s = add_half_of_scores(s, n, pipelines, OPTIONS, 2 * W + 1, exists)
    if OPTIONS.HAS_ROPE:
        q = pipelines.q.rope.index(0).reshape([ROWS, KEYS])
        s = warpgroup_mma(q, pipelines.k.rope(n, W).permute((1, 0)), s, is_async=True)
    return s


@gluon.jit
def first_values(n, s, start, m_i, l_i, acc, rows, params, pipelines, OPTIONS: gl.constexpr):
    """From the scores of the first block of pair n to the sums with this block's values. Returns
    the rows' references and partial sums after the second block, `acc` after the first one, and
    the factor of `acc` before values of the second block are added."""
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    p, m_i, l_i, shrink = probabilities(s, n, start, m_i, l_i, rows, params, pipelines, OPTIONS, 0)
    p = p.to(pipelines.k.halves.dtype)
    send_block(n, p, m_i, shrink, pipelines, 0)
    p = gl.convert_layout(p, operand)
    pending = warpgroup_mma(p, pipelines.k.half(n, 0), rescale(acc, shrink), is_async=True)
    m_i, shrink = receive_block(n, m_i, pipelines, 0)
    l_i = scale_sums(l_i, shrink)
    acc = warpgroup_mma_wait(0, deps=[pending])
    pipelines.k.release(0)
    return m_i, l_i, acc, shrink


@gluon.jit
def next_scores(n, start, zeros, acc, shrink, pipelines, OPTIONS: gl.constexpr):
    """The next pair and its first key, and the scores of its first block, which are asked for
    before the products with values of pair n's second block end; and the sums with these values."""
    keys = pipelines.k
    acc = rescale(acc, shrink)
    pending = warpgroup_mma(keys.rope(n, 1), keys.half(n, 3), acc, is_async=True)
    n += 1
    start += 2 * KEYS
    s = add_half_of_scores(zeros, n, pipelines, OPTIONS, 0)
    acc = warpgroup_mma_wait(OPTIONS.COLUMN_BOXES, deps=[pending])
    keys.release(3)
    s = add_rest_of_scores(s, n, pipelines, OPTIONS, 0)
    return n, start, warpgroup_mma_wait(0, deps=[s]), acc


@gluon.jit
def second_values(n, s, start, m_i, l_i, acc, rows, params, pipelines, OPTIONS: gl.constexpr):
    """From the scores of the second block of pair n to the sums with both blocks' values."""
    keys = pipelines.k
    operand: gl.constexpr = gl.DotOperandLayout(0, acc.type.layout, 2)
    # this product runs while the softmax below is computed
    pending = warpgroup_mma(keys.rope(n, 0), keys.half(n, 1), acc, is_async=True)
    p, m_i, l_i, shrink = probabilities(s, n, start, m_i, l_i, rows, params, pipelines, OPTIONS, 1)
    p = p.to(keys.halves.dtype)
    send_block(n, p, m_i, shrink, pipelines, 1)
    acc, p, shrink = warpgroup_mma_wait(0, deps=[pending, p, shrink])
    keys.release(1)
    p = gl.convert_layout(p, operand)
    pending = warpgroup_mma(p, keys.half(n, 2), rescale(acc, shrink), is_async=True)
    acc = warpgroup_mma_wait(0, deps=[pending])
    keys.release(2)
    return m_i, l_i, acc


@gluon.jit
def _first_blocks(n, pairs, start, m_i, l_i, acc, rows, params, pipelines, OPTIONS: gl.constexpr):
    """The first consumer's work on `pairs` pairs of blocks, from pair n and key `start` on: it
    computes the scores of the first block of each pair. Returns the number of the pair after them,
    and the rows' references, partial sums of weights, and sums of values."""
    scores: gl.constexpr = m_i.type.layout.parent
    keys = pipelines.k
    zeros = gl.zeros([ROWS, KEYS], gl.float32, scores)
    s = add_half_of_scores(zeros, n, pipelines, OPTIONS, 0)
    s = add_rest_of_scores(s, n, pipelines, OPTIONS, 0)
    s = warpgroup_mma_wait(0, deps=[s])
    m_i, l_i, acc, shrink = first_values(
        n, s, start, m_i, l_i, acc, rows, params, pipelines, OPTIONS
    )
    for _ in range(1, pairs):
        n, start, s, acc = next_scores(n, start, zeros, acc, shrink, pipelines, OPTIONS)
        m_i, l_i, acc, shrink = first_values(
            n, s, start, m_i, l_i, acc, rows, params, pipelines, OPTIONS
        )
    acc = rescale(acc, shrink)
    pending = warpgroup_mma(keys.rope(n, 1), keys.half(n, 3), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[pending])
    keys.release(3)
    return n + 1, m_i, l_i, acc


@gluon.jit
def _second_blocks(n, pairs, start, m_i, l_i, acc, rows, params, pipelines, OPTIONS: gl.constexpr):
    """The same for the second consumer, which computes the scores of each pair's second block."""
    scores: gl.constexpr = m_i.type.layout.parent
    zeros = gl.zeros([ROWS, KEYS], gl.float32, scores)
    start += KEYS
    for _ in range(pairs):
        s = add_half_of_scores(zeros, n, pipelines, OPTIONS, 2)
        s = add_rest_of_scores(s, n, pipelines, OPTIONS, 1)
        m_i, shrink = receive_block(n, m_i, pipelines, 1)
        l_i = scale_sums(l_i, shrink)
        s = warpgroup_mma_wait(0, deps=[s])
        acc = rescale(acc, shrink)
        m_i, l_i, acc = second_values(n, s, start, m_i, l_i, acc, rows, params, pipelines, OPTIONS)
        start += 2 * KEYS
        n += 1
    return n, m_i, l_i, acc


@gluon.jit
def all_sums(l_i, tile, like, exchange, W: gl.constexpr):
    """The rows' sums of weights over the blocks of both consumers, in the layout of `like`. `tile`:
    number of the program's tile."""
    own = gl.convert_layout(gl.sum(l_i, 1), like.type.layout)
    exchange.of(W, 2).store(own)
    thread_barrier()
    mbarrier.arrive(exchange.ended.index(W), count=1)
    mbarrier.wait(exchange.ended.index(1 - W), tile & 1)
    # in one order, so that both divide by the same number
    first = exchange.of(0, 2).load(like.type.layout)
    return first + exchange.of(1, 2).load(like.type.layout)


@gluon.jit
def store_part(acc, m_i, total, part, exists, params, W: gl.constexpr):
    """Store this consumer's sums of a tile for `combine.py`, as part number `part`."""
    result: gl.constexpr = acc.type.layout
    programs = gl.num_programs(0)
    row = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, result)), 1)
    column = gl.expand_dims(gl.arange(0, HALF, gl.SliceLayout(0, result)), 0)
    values = params.pointers.parts + part.to(gl.int64) * (ROWS * 2 * HALF) + W * HALF
    by_row = gl.convert_layout(exists.to(gl.int32), gl.SliceLayout(1, result))
    gl.store(values + row * (2 * HALF) + column, acc, mask=gl.expand_dims(by_row, 1) != 0)
    if W == 0:
        references = params.pointers.parts + programs.to(gl.int64) * (2 * ROWS * 2 * HALF)
        r = gl.arange(0, ROWS, m_i.type.layout)
        gl.store(references + part * (2 * ROWS) + r, m_i)
        gl.store(references + part * (2 * ROWS) + ROWS + r, total)


@gluon.jit
def consume_latent(params, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr):
    """As consumer W, compute columns W * HALF to (W + 1) * HALF of every tile of queries."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    by_row: gl.constexpr = gl.SliceLayout(1, scores)
    work_info = pipelines.work_info
    r = gl.arange(0, ROWS, by_row)
    n = 0
    tile = 0
    pipelines.q.wait(0)
    pairs = work_info.get(0, WORD.NUM_KV_TILES)
    while pairs > 0:
        key_len = work_info.get(tile, WORD.KEY_LEN)
        context_len = work_info.get(tile, WORD.CONTEXT_LEN)
        first_token = work_info.get(tile, WORD.FIRST_TOKEN)
        start = work_info.get(tile, WORD.FIRST_KEY)
        full_stop = key_len
        if OPTIONS.IS_CAUSAL:
            full_stop = gl.minimum(key_len, context_len + first_token + 1)
        position = context_len + first_token + r // OPTIONS.PACKED_HEADS
        rows = LatentRows(position, key_len, full_stop)
        m_i = gl.full([ROWS], -float("inf"), gl.float32, by_row)
        l_i = partial_sum(gl.zeros([ROWS, KEYS], gl.float32, scores))
        acc = gl.zeros([ROWS, HALF], gl.float32, result)
        if W == 0:
            n, m_i, l_i, acc = _first_blocks(
                n, pairs, start, m_i, l_i, acc, rows, params, pipelines, OPTIONS
            )
        else:
            n, m_i, l_i, acc = _second_blocks(
                n, pairs, start, m_i, l_i, acc, rows, params, pipelines, OPTIONS
            )
        total = all_sums(l_i, tile, m_i, pipelines.exchange, W)
        q_start = work_info.get(tile, WORD.Q_START)
        stop_token = work_info.get(tile, WORD.STOP_TOKEN)
        first_head = work_info.get(tile, WORD.HEAD)
        part = work_info.get(tile, WORD.FIRST_PART)
        token = first_token + r // OPTIONS.PACKED_HEADS
        head = first_head + r % OPTIONS.PACKED_HEADS
        exists = (token < stop_token) & (head < params.scalars.num_heads)
        if part >= 0:
            store_part(acc, m_i, total, part, exists, params, W)
        else:
            if W == 0:
                row = params.pointers.lse + head.to(gl.int64) * params.sizes.total_q
                gl.store(row + q_start + token, m_i * LN2 + gl.log2(total) * LN2, mask=exists)
            # the result takes the place of the queries, which no warp reads any more
            out = pipelines.q.half(n, W)
            share = gl.where(total > 0.0, 1.0 / total, 0.0)
            out.store(scale_rows(acc, share).to(out.dtype))
            fence_async_shared()
            box = pipelines.q.halves.index(W)
            store_rows(params.out_desc, q_start, stop_token, first_token, first_head, box, W * HALF)
            tma.store_wait(0)
        pipelines.q.release()
        tile += 1
        pipelines.q.wait(tile)
        pairs = work_info.get(tile, WORD.NUM_KV_TILES)
