"""A consumer of the Hopper kernel: four warps that own 64 rows of a tile of queries.

FlashAttention-3's loop (arXiv 2407.08608, algorithm 2): the scores of the next keys are asked for
before the values of these are multiplied, and both products run while the softmax is computed.
FlashAttention-4's rescaling: a row keeps its reference until a score exceeds it by far, so that its
result is rarely multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.hopper.block_runs import (
    first_keys,
    is_seen_whole,
    load_entries,
    rows_between,
)
from torch_paged_attn.backends.triton.hopper.producer import (
    BATCH,
    COUNT,
    FIRST_ENTRY,
    FIRST_KEY,
    FIRST_TOKEN,
    HEAD,
    KEY_LEN,
    LISTED,
    PAST,
    Q_START,
    STOP,
    STOP_TOKEN,
    get,
)
from torch_paged_attn.backends.triton.hopper.scores import (
    LN2,
    LOG2E,
    masked,
    masked_by_list,
    softcapped,
    with_alibi,
    with_sink,
)
from torch_paged_attn.backends.triton.hopper.tma import as_matrix, in_atoms, store_rows

# named barriers: Triton uses the first few for its own
TURNS = gl.constexpr(8)

# by how much, in base two, a score may exceed what its row is shifted by: probabilities up to 256
# are rounded like those below 1, and sums are float32
SLACK = gl.constexpr(8.0)

# what Triton 3.6 has as a private method
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


@gluon.jit
def _take_turn(me: gl.constexpr):
    """Wait until the consumer before this one has asked for its products."""
    gl.inline_asm_elementwise(
        "bar.sync $1, 256; mov.b32 $0, 0;", "=r,r", [TURNS + me], gl.int32, False, 1
    )


@gluon.jit
def _pass_turn(me: gl.constexpr, CONSUMERS: gl.constexpr):
    after: gl.constexpr = TURNS + (me + 1) % CONSUMERS
    gl.inline_asm_elementwise(
        "bar.arrive $1, 256; mov.b32 $0, 0;", "=r,r", [after], gl.int32, False, 1
    )


@gluon.jit
def _pin(x):
    """x, computed before what follows.

    The assembler moves a wait for products above everything that does not need their result, and
    nothing would overlap. It does not move it above another barrier that reads x. This one is never
    taken: no maximum has these bits.
    """
    return gl.inline_asm_elementwise(
        "{.reg .pred p; setp.eq.u32 p, $1, 0xFFC12345; mov.b32 $0, $1; @p bar.arrive 15, 128;}",
        "=r,r",
        [x],
        dtype=x.dtype,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _row_max(s):
    """In two steps: every thread has twice as many chains of maxima to work on at once."""
    partial = gl.max(gl.reshape(s, [s.shape[0], s.shape[1] // 8, 8]), 1)
    return gl.convert_layout(gl.max(partial, 1), gl.SliceLayout(1, s.type.layout), True)


@gluon.jit
def _partial_sum(p):
    """(rows, 4): what each thread of a row adds up by itself; the rest waits for the last tile."""
    return gl.sum(gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def _fold(s, m_i, l_i, factor):
    """Fold a tile of scores into the rows' references, which are near their maxima (scaled by
    `factor`, base two), and partial sums."""
    m_new = gl.maximum(m_i, _row_max(s) * factor)
    m_new = _pin(gl.where(m_new > m_i + SLACK, m_new, m_i))
    # a row that has seen no key keeps m = -inf; shifting by 0 instead avoids inf - inf
    shift = gl.where(m_new == -float("inf"), 0.0, m_new)
    p = gl.exp2(s * factor - gl.expand_dims(shift, 1))
    shrink = gl.exp2(m_i - shift)
    total = _partial_sum(p)
    rows: gl.constexpr = gl.SliceLayout(1, total.type.layout)
    l_new = l_i * gl.expand_dims(gl.convert_layout(shrink, rows, True), 1) + total
    return p, m_new, l_new, shrink


@gluon.constexpr_function
def _multiply_unless_one(n):
    """PTX: multiply n registers by as many factors, unless these are 1 in the whole warp. They
    belong to two rows, which take turns by pairs."""
    products = (f"mul.f32 ${i}, ${i}, ${2 * n + i};" for i in range(n))
    return f"""{{
        .reg .pred p;
        setp.neu.f32 p, ${2 * n}, 0f3F800000;
        setp.neu.or.f32 p, ${2 * n + 2}, 0f3F800000, p;
        vote.sync.any.pred p, p, 0xffffffff;
        @!p bra DONE;
        {" ".join(products)}
        DONE:
    }}"""


@gluon.constexpr_function
def _in_place(n):
    """The operands of that: results, which are the first n arguments, and factors."""
    return ",".join(("=f",) * n + tuple(str(i) for i in range(n)) + ("f",) * n)


@gluon.jit
def _rescale(acc, shrink):
    """acc * shrink by rows; where no row of a warp has a new reference, nothing is done."""
    OWN: gl.constexpr = acc.shape[0] * acc.shape[1] // 128  # elements of a thread
    program: gl.constexpr = _multiply_unless_one(OWN)
    operands: gl.constexpr = _in_place(OWN)
    shrink = gl.expand_dims(gl.convert_layout(shrink, gl.SliceLayout(1, acc.type.layout)), 1)
    return gl.inline_asm_elementwise(program, operands, [acc, shrink], gl.float32, False, OWN)


@gluon.jit
def _clear_unseen(v, n0, first_key):
    """Zero the values before the first key that a row sees: 0 times NaN would be NaN."""
    STEP: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(v.shape[0] // STEP):
        rows = v.slice(i * STEP, STEP)
        j = n0 + i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, layout))
        rows.store(gl.where(gl.expand_dims(j >= first_key, 1), rows.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _seen_as(smem, shape: gl.constexpr, layout: gl.constexpr):
    """The same shared memory in another shape."""
    if HAS_REINTERPRET:
        return smem.reinterpret(smem.dtype, shape, layout)
    else:
        return smem._reinterpret(smem.dtype, shape, layout)


@gluon.jit
def _clear_from(tile, first):
    """Zero a tile of atoms from a row on, for the same reason."""
    ATOMS: gl.constexpr = tile.shape[1]
    ACROSS: gl.constexpr = tile.shape[2]
    ROWS: gl.constexpr = tile.shape[3]
    WIDTH: gl.constexpr = tile.shape[4]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    apart: gl.constexpr = [ATOMS, 1, 1, ACROSS, ROWS, WIDTH]
    swizzled: gl.constexpr = tile.layout
    r = gl.arange(0, ACROSS * ROWS, gl.SliceLayout(1, layout))
    for i in range(first // ROWS, ATOMS):
        rows = _seen_as(tile, apart, swizzled).index(i).reshape([ACROSS * ROWS, WIDTH])
        is_seen = gl.expand_dims(i * ROWS + r % ROWS < first, 1)
        rows.store(gl.where(is_seen, rows.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def _logits(
    s, runs, position, slope, squash,
    KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, IS_CAUSAL: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, HAS_ALIBI: gl.constexpr,
):  # fmt: skip
    """Scores as they go to the mask; the keys are `runs`, as the producer loads them."""
    if HAS_SOFTCAP:
        s = softcapped(s, squash)
    if HAS_ALIBI:
        starts = runs
        if Q_BLOCK > 0:
            starts = first_keys(runs, KEYS)
        s = with_alibi(s, starts, position, slope, IS_CAUSAL)
    return s


@gluon.jit
def consume(
    out_desc, lse_ptr, entries_ptr, alibi_ptr, sinks_ptr, queries, keys, values,
    notes, stride_alibi_batch, stride_alibi_head, batch, total_q, left, right, factor, squash,
    alibi_unit,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, WIDTH: gl.constexpr, WIDTH_V: gl.constexpr,
    CONSUMERS: gl.constexpr, PACK: gl.constexpr, IS_CAUSAL: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, TAKE_TURNS: gl.constexpr, ME: gl.constexpr,
):  # fmt: skip
    """Rows [ME * BLOCK_M, ...) of every tile that the producer announces."""
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    result_rows: gl.constexpr = gl.SliceLayout(1, result)
    TOKENS: gl.constexpr = BLOCK_M // PACK
    RUNS: gl.constexpr = BLOCK_N // KEYS
    STEP: gl.constexpr = RUNS if Q_BLOCK > 0 else BLOCK_N
    dtype: gl.constexpr = values.tiles.dtype
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    r = gl.arange(0, BLOCK_M, score_rows)
    n = 0
    drawn = 0
    if TAKE_TURNS and ME == CONSUMERS - 1:
        _pass_turn(ME, CONSUMERS)
    queries.wait_full(0)
    count = get(notes, 0, COUNT)
    while count > 0:
        slot = drawn % queries.STAGES
        first_key = get(notes, slot, FIRST_KEY)
        at = get(notes, slot, STOP) - STEP
        key_len = get(notes, slot, KEY_LEN)
        q_start = get(notes, slot, Q_START)
        stop_token = get(notes, slot, STOP_TOKEN)
        first_token = get(notes, slot, FIRST_TOKEN) + ME * TOKENS
        head = get(notes, slot, HEAD)
        box = queries.tiles.index(slot * CONSUMERS + ME)
        q = box.reshape([BLOCK_M, WIDTH])
        past = get(notes, slot, PAST)
        position = past + first_token + r // PACK
        # rows past the last sequence have no slope and no sink
        b = get(notes, slot, BATCH)
        slope = 0.0
        if alibi_ptr is not None:
            slope_ptr = alibi_ptr + b * stride_alibi_batch + (head + r % PACK) * stride_alibi_head
            slope = gl.load(slope_ptr, mask=(r >= 0) & (b < batch), other=0.0) * alibi_unit
        # tiles of keys within [full_start, full_stop) need no mask
        full_start = 0
        full_stop = key_len
        if HAS_LEFT:
            full_start = past + first_token + TOKENS - 1 - left
        if HAS_RIGHT:
            full_stop = gl.minimum(key_len, past + first_token + right + 1)

        listed = 0
        own_rows = 0
        list_ptr = entries_ptr
        if Q_BLOCK > 0:
            listed = get(notes, slot, LISTED)
            list_ptr = entries_ptr + get(notes, slot, FIRST_ENTRY)
            stop = gl.minimum(first_token + TOKENS, stop_token)
            own_rows = rows_between(past + first_token, past + stop, Q_BLOCK, POSITIONS)

        m_i = gl.full([BLOCK_M], -float("inf"), gl.float32, score_rows)
        l_i = _partial_sum(zeros)
        acc = gl.zeros([BLOCK_M, WIDTH_V], gl.float32, result)
        keys.wait_full(n)
        k = as_matrix(keys.tile(n), BLOCK_N, WIDTH).permute((1, 0))
        s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        keys.release(n)
        if in_atoms(values.tiles.shape) and at + BLOCK_N > key_len:
            values.wait_full(n)
            _clear_from(values.tile(n), key_len - at)
        if queries.STAGES > 1 and drawn > 0:
            # the last tile's result has left shared memory long since
            tma.store_wait(0)
            queries.release(drawn - 1)
        runs = (at,)
        if Q_BLOCK > 0:
            runs = load_entries(list_ptr, at, listed, RUNS)
        s = _logits(
            s, runs, position, slope, squash, KEYS, Q_BLOCK, IS_CAUSAL, HAS_SOFTCAP,
            alibi_ptr is not None,
        )  # fmt: skip
        if Q_BLOCK > 0:
            if not is_seen_whole(runs, own_rows, full_stop, KEYS):
                s = masked_by_list(
                    s, runs, position, key_len, KEYS, Q_BLOCK, POSITIONS, IS_CAUSAL
                )  # fmt: skip
        elif (at + BLOCK_N > full_stop) | (at < full_start):
            s = masked(
                s, at, position, key_len, left, right, IS_CAUSAL, HAS_LEFT, HAS_RIGHT
            )  # fmt: skip
        p, m_i, l_i, shrink = _fold(s, m_i, l_i, factor)
        p = gl.convert_layout(p.to(dtype), operand)

        for _ in range(1, count):
            at -= STEP
            runs = (at,)
            if Q_BLOCK > 0:
                runs = load_entries(list_ptr, at, listed, RUNS)
            keys.wait_full(n + 1)
            if TAKE_TURNS:
                _take_turn(ME)
            k = as_matrix(keys.tile(n + 1), BLOCK_N, WIDTH).permute((1, 0))
            s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
            values.wait_full(n)
            v = as_matrix(values.tile(n), BLOCK_N, WIDTH_V)
            # the tensor cores are busy with the scores meanwhile
            acc = _rescale(acc, shrink)
            pending = warpgroup_mma(p, v, acc, is_async=True)
            if TAKE_TURNS:
                _pass_turn(ME, CONSUMERS)
            s = warpgroup_mma_wait(1, deps=[s])
            keys.release(n + 1)
            s = _logits(
                s, runs, position, slope, squash, KEYS, Q_BLOCK, IS_CAUSAL, HAS_SOFTCAP,
                alibi_ptr is not None,
            )  # fmt: skip
            if Q_BLOCK > 0:
                if not is_seen_whole(runs, own_rows, full_stop, KEYS):
                    s = masked_by_list(
                        s, runs, position, key_len, KEYS, Q_BLOCK, POSITIONS, IS_CAUSAL
                    )  # fmt: skip
            # without a diagonal or a window, only the first tile reaches past the keys
            elif (HAS_LEFT or HAS_RIGHT) and (at + BLOCK_N > full_stop) | (at < full_start):
                s = masked(
                    s, at, position, key_len, left, right, IS_CAUSAL, HAS_LEFT, HAS_RIGHT
                )  # fmt: skip
            p, m_i, l_i, shrink = _fold(s, m_i, l_i, factor)
            acc, p, shrink = warpgroup_mma_wait(0, deps=[pending, p, shrink])
            values.release(n)
            p = gl.convert_layout(p.to(dtype), operand)
            n += 1

        values.wait_full(n)
        v = as_matrix(values.tile(n), BLOCK_N, WIDTH_V)
        if HAS_LEFT and at < first_key:
            _clear_unseen(v, at, first_key)
        # no branch: one here would have the assembler schedule the loop worse
        acc = acc * gl.expand_dims(gl.convert_layout(shrink, result_rows), 1)
        pending = warpgroup_mma(p, v, acc, is_async=True)
        total = gl.convert_layout(gl.sum(l_i, 1), score_rows)
        gain = 1.0
        if sinks_ptr is not None:
            sink_ptr = sinks_ptr + head + r % PACK
            sink = gl.load(sink_ptr, mask=(r >= 0) & (b < batch), other=-float("inf")) * LOG2E
            m_i, total, gain = with_sink(m_i, total, sink)
        lse = (m_i + gl.log2(total)) * LN2
        token = position - past
        row = lse_ptr + (head + r % PACK).to(gl.int64) * total_q + q_start + token
        gl.store(row, lse, mask=token < stop_token)
        share = gl.where(total > 0.0, gain / total, 0.0)
        acc = warpgroup_mma_wait(0, deps=[pending])
        values.release(n)
        n += 1
        # the result leaves from where the queries lay
        out = box
        if WIDTH_V < WIDTH:
            box_shape: gl.constexpr = out_desc.block_shape
            box_layout: gl.constexpr = out_desc.layout
            out = _seen_as(box, box_shape, box_layout)
        acc = acc * gl.expand_dims(gl.convert_layout(share, result_rows), 1)
        out.reshape([BLOCK_M, WIDTH_V]).store(acc.to(dtype))
        fence_async_shared()
        store_rows(out_desc, q_start, stop_token, first_token, head, out)
        if queries.STAGES == 1:
            tma.store_wait(0)
            queries.release(drawn)
        drawn += 1
        queries.wait_full(drawn)
        count = get(notes, drawn % queries.STAGES, COUNT)
    tma.store_wait(0)
