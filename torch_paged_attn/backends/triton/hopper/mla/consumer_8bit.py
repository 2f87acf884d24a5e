"""A consumer of the kernel for latent attention with keys of 8 bits: four warps.

Its products are transposed: their rows are keys, or columns of values, and their columns are rows
of queries. A product's left operand may lie in registers, so keys are converted there, on their way
from shared memory to the tensor cores, and no 16-bit keys are stored.

Either one consumer computes all 512 columns of the result of up to 32 rows of queries, or two
consumers compute half of the columns each (`mla_bytes.FORMS`). Two take turns with blocks of keys:
each computes the scores of every other block, and puts the probabilities where both read them.
Queries become float16 first (`stages_8bit.py`).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.common.dequant import decode_pairs
from torch_paged_attn.backends.triton.common.softmax import LN2, finite_or_zero
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.forward.producer import wait_for_kernel_before
from torch_paged_attn.backends.triton.hopper.mla.pipeline import opaque_zero
from torch_paged_attn.backends.triton.hopper.mla.stages_8bit import (
    KEYS,
    LATENT,
    SLICE,
    meet_consumers,
    take_queries,
)

# a row's reference, when it is set, is its maximum less BELOW; later it is at most RAISED more
# below the maximum. So probabilities are up to 2**15. Those below 2**-14 lose digits in float16
BELOW, RAISED = gl.constexpr(7.0), gl.constexpr(8.0)


class Seen(NamedTuple):
    """Which keys the rows of queries of a tile see, as values of the kernel."""

    position: Any  # of the first row
    key_len: Any
    full_stop: Any  # keys before this one are seen by all


@gluon.jit
def _ask_for_scores(n, fill, pipelines, OPTIONS: gl.constexpr):
    """Scores (KEYS, ROWS) of the block of keys of fill `fill`, not yet scaled. n is any number
    >= 0: see `opaque_zero`."""
    ROWS: gl.constexpr = OPTIONS.ROWS
    FORMAT: gl.constexpr = OPTIONS.FORMAT
    # pairs of columns that are converted and multiplied at a time: few where a result of 128
    # registers is held meanwhile
    PAIRS: gl.constexpr = 64 if ROWS // OPTIONS.CONSUMERS < 32 else 32
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    keys, q = pipelines.k, pipelines.q
    stage = fill % keys.STAGES
    latent = keys.latent_pairs.index(stage)
    of_even, of_odd = q.latent.index(opaque_zero(n)), q.latent.index(1 + opaque_zero(n))
    s = gl.zeros([KEYS, ROWS], gl.float32, scores)
    before = s
    for i in gl.static_range(LATENT // 2 // PAIRS):
        pairs = latent.slice(i * PAIRS, PAIRS, dim=1).load(operand)
        even, odd = decode_pairs(pairs, FORMAT, True)
        q_even = of_even.slice(i * PAIRS, PAIRS, dim=1).permute((1, 0))
        q_odd = of_odd.slice(i * PAIRS, PAIRS, dim=1).permute((1, 0))
        s = warpgroup_mma(even, q_even, s, use_acc=i > 0, is_async=True)
        # an operand's registers are free only when its product has ended
        if i > 0:
            warpgroup_mma_wait(1, deps=(before,))
        s = warpgroup_mma(odd, q_odd, s, is_async=True)
        warpgroup_mma_wait(1, deps=(even,))
        before = odd
    pairs = keys.rope_pairs.index(stage).load(operand)
    even, odd = decode_pairs(pairs, FORMAT, True)
    q_even = q.rope.index(opaque_zero(n)).permute((1, 0))
    q_odd = q.rope.index(1 + opaque_zero(n)).permute((1, 0))
    s = warpgroup_mma(even, q_even, s, is_async=True)
    s = warpgroup_mma(odd, q_odd, s, is_async=True)
    done = warpgroup_mma_wait(0, deps=(s, even, odd, before))
    return done[0]


@gluon.jit
def _partial_sum(p):
    """Sums over keys of a block, (KEYS, ROWS), but for those that would take several threads:
    (4, 8, ROWS)."""
    return gl.sum(gl.reshape(p, [4, 2, 8, p.shape[1]]), 1)


@gluon.jit
def _scale_sums(l_i, shrink):
    """Partial sums times a factor for each row of queries."""
    inner: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, l_i.type.layout))
    shrink = gl.convert_layout(shrink, inner)
    return l_i * gl.expand_dims(gl.expand_dims(shrink, 0), 0)


@gluon.jit
def _scale_columns(acc, factor):
    """acc times a factor for each row of queries, which are its columns."""
    columns: gl.constexpr = gl.SliceLayout(0, acc.type.layout)
    return acc * gl.expand_dims(gl.convert_layout(factor, columns), 0)


@gluon.jit
def _references(n, s, start, m_i, seen, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr):
    """The exponents in base two of a block's scores, -inf for hidden keys, and the rows' references
    after this block and, of two consumers, the other one's. `start`: the block's first key; n:
    number of the consumer's block."""
    by_row: gl.constexpr = m_i.type.layout
    # loaded for every block: there are no registers to keep them
    factor = pipelines.shared.factors.load(by_row)
    x = s * gl.expand_dims(factor, 0)
    if start + KEYS > seen.full_stop:
        key = start + gl.arange(0, KEYS, gl.SliceLayout(1, s.type.layout))
        stop = gl.full([OPTIONS.ROWS], 0, gl.int32, by_row) + seen.key_len
        if OPTIONS.IS_CAUSAL:
            token = gl.arange(0, OPTIONS.ROWS, by_row) // OPTIONS.PACKED_HEADS
            stop = gl.minimum(stop, seen.position + 1 + token)
        x = gl.where(gl.expand_dims(key, 1) < gl.expand_dims(stop, 0), x, -float("inf"))
    largest = gl.max(x, 0)
    if OPTIONS.CONSUMERS == 2:
        pipelines.shared.rows.index(W).store(largest)
        meet_consumers(n, pipelines.meetings.found, W)
        largest = gl.maximum(largest, pipelines.shared.rows.index(1 - W).load(by_row))
    return x, gl.where(largest - BELOW > m_i + RAISED, largest - BELOW, m_i)


@gluon.jit
def _share_probabilities(x, m_i, l_i, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr):
    """Put a block's probabilities into shared memory, from its exponents `x`, and say so to the
    other consumer. Returns the partial sums with them."""
    SLICES: gl.constexpr = KEYS // SLICE
    ROWS: gl.constexpr = OPTIONS.ROWS
    p = gl.exp2(x - gl.expand_dims(finite_or_zero(m_i), 0))
    l_i += _partial_sum(p)
    p = gl.permute(gl.reshape(p.to(gl.float16), [SLICES, SLICE, ROWS]), (0, 2, 1))
    own = pipelines.shared.p.slice(W * SLICES * ROWS, SLICES * ROWS)
    own.store(gl.reshape(p, [SLICES * ROWS, SLICE]))
    fence_async_shared()
    thread_barrier()
    if OPTIONS.CONSUMERS == 2:
        mbarrier.arrive(pipelines.meetings.sent.index(W), count=1)
    return l_i


@gluon.jit
def _add_values(
    fill, even_acc, odd_acc, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr, BLOCK: gl.constexpr
):
    """Add to the sums the products of the values of fill `fill`, of this consumer's columns, and
    the probabilities that consumer BLOCK left. Even columns are added to one, odd ones to the
    other."""
    ROWS: gl.constexpr = OPTIONS.ROWS
    FORMAT: gl.constexpr = OPTIONS.FORMAT
    OWN: gl.constexpr = even_acc.shape[0]
    SLICES: gl.constexpr = KEYS // SLICE
    operand: gl.constexpr = gl.DotOperandLayout(0, even_acc.type.layout, 2)
    keys = pipelines.k
    values = keys.latent_pairs.index(fill % keys.STAGES)
    before = even_acc
    for i in gl.static_range(SLICES):
        pairs = values.slice(i * SLICE, SLICE).slice(W * OWN, OWN, dim=1)
        even, odd = decode_pairs(pairs.permute((1, 0)).load(operand), FORMAT, True)
        p = pipelines.shared.p.slice((BLOCK * SLICES + i) * ROWS, ROWS).permute((1, 0))
        even_acc = warpgroup_mma(even, p, even_acc, is_async=True)
        if i > 0:
            warpgroup_mma_wait(1, deps=(before,))
        odd_acc = warpgroup_mma(odd, p, odd_acc, is_async=True)
        warpgroup_mma_wait(1, deps=(even,))
        before = odd
    done = warpgroup_mma_wait(0, deps=(even_acc, odd_acc, before))
    return done[0], done[1]


@gluon.jit
def _all_sums(l_i, m_i, tile, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr):
    """The rows' sums of weights over the blocks of all consumers. `tile`: number of the program's
    tile."""
    total = gl.convert_layout(gl.sum(gl.sum(l_i, 1), 0), m_i.type.layout)
    if OPTIONS.CONSUMERS == 2:
        rows = pipelines.shared.rows
        rows.index(W).store(total)
        meet_consumers(tile, pipelines.meetings.ended, W)
        # in one order, so that both divide by the same number
        total = rows.index(0).load(m_i.type.layout) + rows.index(1).load(m_i.type.layout)
    return total


@gluon.jit
def _store(even_acc, odd_acc, pointers, exists, W: gl.constexpr):
    """Store the columns 2 * OWN * W to 2 * OWN * (W + 1) of rows that begin at `pointers`, where
    `exists`."""
    OWN: gl.constexpr = even_acc.shape[0]
    values = gl.join(even_acc, odd_acc).to(pointers.dtype.element_ty)
    layout: gl.constexpr = values.type.layout
    by_pair: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    by_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
    by_half: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(0, layout))
    pair = W * OWN + gl.arange(0, OWN, by_pair)
    at = gl.expand_dims(gl.expand_dims(gl.convert_layout(pointers, by_row), 0), 2)
    at = at + 2 * gl.expand_dims(gl.expand_dims(pair, 1), 2)
    at = at + gl.expand_dims(gl.expand_dims(gl.arange(0, 2, by_half), 0), 0)
    exists = gl.convert_layout(exists.to(gl.int32), by_row) != 0
    gl.store(at, values, mask=gl.expand_dims(gl.expand_dims(exists, 0), 2))


@gluon.jit
def _finish(
    even_acc, odd_acc, m_i, total, of_values, params, work_info, OPTIONS: gl.constexpr,
    W: gl.constexpr,
):  # fmt: skip
    """Store this consumer's columns of a tile's result, or its sums for `combine.py` if the
    program has only a part of the tile's keys. `of_values`: the descale of values."""
    ROWS: gl.constexpr = OPTIONS.ROWS
    by_row: gl.constexpr = m_i.type.layout
    q_start = work_info.get(0, WORD.Q_START)
    part = work_info.get(0, WORD.FIRST_PART)
    r = gl.arange(0, ROWS, by_row)
    token = work_info.get(0, WORD.FIRST_TOKEN) + r // OPTIONS.PACKED_HEADS
    head = work_info.get(0, WORD.HEAD) + r % OPTIONS.PACKED_HEADS
    exists = (token < work_info.get(0, WORD.STOP_TOKEN)) & (head < params.scalars.num_heads)
    if part >= 0:
        factor = gl.full([ROWS], 1.0, gl.float32, by_row) * of_values
        even_acc, odd_acc = _scale_columns(even_acc, factor), _scale_columns(odd_acc, factor)
        rows = params.pointers.parts + part.to(gl.int64) * (ROWS * LATENT)
        _store(even_acc, odd_acc, rows + r * LATENT, exists, W)
        if W == 0:
            references = params.pointers.parts + gl.num_programs(0).to(gl.int64) * (
                2 * ROWS * LATENT
            )
            gl.store(references + part * (2 * ROWS) + r, m_i)
            gl.store(references + part * (2 * ROWS) + ROWS + r, total)
    else:
        if W == 0:
            row = params.pointers.lse + head.to(gl.int64) * params.sizes.total_q
            gl.store(row + q_start + token, m_i * LN2 + gl.log2(total) * LN2, mask=exists)
        factor = gl.where(total > 0.0, 1.0 / total, 0.0) * of_values
        even_acc, odd_acc = _scale_columns(even_acc, factor), _scale_columns(odd_acc, factor)
        at = (q_start + token).to(gl.int64) * params.scalars.num_heads + head
        _store(even_acc, odd_acc, params.pointers.out + at * LATENT, exists, W)


@gluon.jit
def _descale(pointer, b, stride):
    """A sequence's descale; 1 where none was given."""
    if pointer is None:
        return 1.0
    else:
        return gl.load(pointer + b * stride)


@gluon.jit
def consume_bytes(params, pipelines, OPTIONS: gl.constexpr, W: gl.constexpr):
    """As consumer W, compute its share of the columns of every tile of queries."""
    ROWS: gl.constexpr = OPTIONS.ROWS
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    OWN: gl.constexpr = LATENT // 2 // CONSUMERS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    by_row: gl.constexpr = gl.SliceLayout(0, scores)
    pointers, scalars, work_info = params.pointers, params.scalars, pipelines.work_info
    wait_for_kernel_before()
    n = 0
    tile = 0
    work_info.wait(0)
    steps = work_info.get(0, WORD.NUM_KV_TILES)
    while steps > 0:
        # rows after the last sequence have no descale of their own
        b = gl.minimum(work_info.get(0, WORD.BATCH), params.sizes.batch - 1)
        of_q = _descale(pointers.q_descale, b, scalars.q_descale_batch)
        of_k = _descale(pointers.k_descale, b, scalars.k_descale_batch)
        of_v = _descale(pointers.v_descale, b, scalars.v_descale_batch)
        of_scores = scalars.scale_log2 * of_q * of_k
        take_queries(tile, of_scores, params, pipelines, OPTIONS, W)
        key_len = work_info.get(0, WORD.KEY_LEN)
        first_position = work_info.get(0, WORD.CONTEXT_LEN) + work_info.get(0, WORD.FIRST_TOKEN)
        start = work_info.get(0, WORD.FIRST_KEY) + W * KEYS
        full_stop = key_len
        if OPTIONS.IS_CAUSAL:
            full_stop = gl.minimum(key_len, first_position + 1)
        seen = Seen(first_position, key_len, full_stop)
        m_i = gl.full([ROWS], -float("inf"), gl.float32, by_row)
        l_i = _partial_sum(gl.zeros([KEYS, ROWS], gl.float32, scores))
        even_acc = gl.zeros([OWN, ROWS], gl.float32, scores)
        odd_acc = gl.zeros([OWN, ROWS], gl.float32, scores)
        for _ in range(steps):
            own = CONSUMERS * n + W
            pipelines.k.wait(own)
            s = _ask_for_scores(n, own, pipelines, OPTIONS)
            x, m_new = _references(n, s, start, m_i, seen, pipelines, OPTIONS, W)
            # references change rarely, as with `softmax.RESCALE_THRESHOLD`
            if gl.max((m_new > m_i).to(gl.int32), 0) > 0:
                shrink = gl.exp2(m_i - finite_or_zero(m_new))
                l_i = _scale_sums(l_i, shrink)
                even_acc = _scale_columns(even_acc, shrink)
                odd_acc = _scale_columns(odd_acc, shrink)
            m_i = m_new
            l_i = _share_probabilities(x, m_i, l_i, pipelines, OPTIONS, W)
            even_acc, odd_acc = _add_values(own, even_acc, odd_acc, pipelines, OPTIONS, W, W)
            pipelines.k.release(own)
            if CONSUMERS == 2:
                other = CONSUMERS * n + 1 - W
                pipelines.k.wait(other)
                mbarrier.wait(pipelines.meetings.sent.index(1 - W), n & 1)
                even_acc, odd_acc = _add_values(
                    other, even_acc, odd_acc, pipelines, OPTIONS, W, 1 - W
                )
                pipelines.k.release(other)
            start += KEYS * CONSUMERS
            n += 1
        total = _all_sums(l_i, m_i, tile, pipelines, OPTIONS, W)
        _finish(even_acc, odd_acc, m_i, total, of_v, params, work_info, OPTIONS, W)
        thread_barrier()
        mbarrier.arrive(pipelines.read.index(0), count=1)
        tile += 1
        work_info.wait(tile)
        steps = work_info.get(0, WORD.NUM_KV_TILES)
