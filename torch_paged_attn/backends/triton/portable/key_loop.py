"""The loop over tiles of keys: scores, the running softmax, and the sum of weighted values."""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.dequant import decode_pairs, decode_raised_pairs
from torch_paged_attn.backends.triton.portable.dropout import dropout_keep
from torch_paged_attn.backends.triton.portable.gather_scatter import (
    find_pages,
    load_rows,
    zero_unless,
)
from torch_paged_attn.backends.triton.portable.logits import softcapped, with_alibi
from torch_paged_attn.backends.triton.portable.mask import visible
from torch_paged_attn.backends.triton.portable.products import fold_values, scores
from torch_paged_attn.backends.triton.softmax import fold_scores


@triton.jit
def has_nan(x):
    """Whether any element is NaN. In one step: Triton 3.6 cannot compile two for sm_100."""
    return tl.max((x != x).to(tl.int32)) > 0


@triton.jit
def attend_keys(
    q_low,
    q_high,
    k_ptr,
    v_ptr,
    block_table_ptr,
    col_ptr,
    bias_rows,
    rng_ptr,
    b,
    head,
    token,
    position,
    exists,
    slope,
    i_start,
    i_stop,
    start,
    stop,
    full_start,
    full_stop,
    key_len,
    num_pages,
    stride_k_page,
    stride_k_slot,
    stride_v_page,
    stride_v_slot,
    stride_col,
    stride_bias_key,
    bias_width,
    left,
    right,
    scale,
    raised,
    factor,
    softcap,
    dropout_threshold,
    dropout_scale,
    HEAD_DIM: tl.constexpr,
    K_LOW: tl.constexpr,
    K_HIGH: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    K_BLOCK: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    BIAS: tl.constexpr,
    RAW_SCORES: tl.constexpr,
    CHAIN: tl.constexpr,
    FIRST_PHASE: tl.constexpr,
    K_FORMAT: tl.constexpr,
    IS_V_LIKE_K: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    HAS_PTX: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend a tile of queries to keys of number `i_start` to `i_stop`, in tiles of BLOCK_N (with a
    layout: to the blocks listed there).

    Queries, keys and values come in two chunks, the second of which may be missing: the low and the
    high elements of a head, or of pairs the even and the odd ones. Returns row maxima, row sums,
    and the sums of weighted values in two chunks.
    """
    IS_PRECISE: tl.constexpr = q_low.dtype == tl.float32
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc_low = tl.zeros([BLOCK_M, V_LOW], tl.float32)
    # carried along, but unused, where one chunk holds a row of v
    acc_high = tl.zeros([BLOCK_M, V_HIGH if V_HIGH > 0 else 1], tl.float32)

    # phases: 0 from the left edge of a window, 1 what every row sees, 2 up to the last key
    i_full = i_start
    if FIRST_PHASE == 0:
        i_full = tl.minimum(tl.maximum(tl.cdiv(full_start, BLOCK_N), i_start), i_stop)
    i_tail = i_full
    if FIRST_PHASE < 2:
        i_tail = tl.minimum(tl.maximum(full_stop // BLOCK_N, i_full), i_stop)

    # A key that no query sees counts as 0, whatever it holds. A bias may hide one among others: all
    # values are read as they are, and only where that gave NaN, again and with care.
    ATTEMPTS: tl.constexpr = 1 if BIAS == "" else 2
    for attempt in tl.static_range(ATTEMPTS):
        if attempt == 1:
            is_bad = has_nan(acc_low) | has_nan(acc_high)
            m_i = tl.where(is_bad, float("-inf"), m_i)
            l_i = tl.where(is_bad, 0.0, l_i)
            acc_low = tl.where(is_bad, 0.0, acc_low)
            acc_high = tl.where(is_bad, 0.0, acc_high)
            i_full = tl.where(is_bad, i_full, i_start)
            i_tail = tl.where(is_bad, i_tail, i_start)
            i_stop = tl.where(is_bad, i_stop, i_start)
        for phase in tl.static_range(FIRST_PHASE, 3):
            if phase == 0:
                i_first = i_start
                i_last = i_full
            elif phase == 1:
                i_first = i_full
                i_last = i_tail
            else:
                i_first = i_tail
                i_last = i_stop
            for i in tl.range(i_first, i_last):
                if K_BLOCK > 0:
                    PER_BLOCK: tl.constexpr = K_BLOCK // BLOCK_N
                    col = tl.load(col_ptr + (i // PER_BLOCK) * stride_col)
                    # blocks past the last key are ignored, and so are bad ones
                    past_end = tl.cdiv(key_len, K_BLOCK)
                    col = tl.where((col < 0) | (col > past_end), past_end, col)
                    n0 = col * K_BLOCK + (i % PER_BLOCK) * BLOCK_N
                else:
                    n0 = i * BLOCK_N
                j = n0 + tl.arange(0, BLOCK_N)
                page, slot = find_pages(
                    block_table_ptr, n0, start, stop, num_pages, BLOCK_N, PAGE_SIZE, phase == 1
                )

                seen = exists[:, None]
                if phase != 1:
                    in_range = (j >= start) & (j < stop)
                    seen = visible(position, j, in_range, left, right, HAS_LEFT, HAS_RIGHT)
                    if BIAS != "":
                        seen = seen & exists[:, None]

                k_rows = page * stride_k_page + slot * stride_k_slot
                if IS_PAIRED:
                    pairs = load_rows(k_ptr, k_rows, None, 0, K_LOW, K_LOW, False, "RAW", DTYPE)
                    if K_FORMAT == "INT8":
                        k_low, k_high = decode_raised_pairs(pairs, HAS_PTX)
                    else:
                        k_low, k_high = decode_pairs(pairs, K_FORMAT, HAS_PTX)
                else:
                    k_low = load_rows(
                        k_ptr, k_rows, None, 0, K_LOW, HEAD_DIM, False, K_FORMAT, DTYPE
                    )
                s = scores(q_low, k_low, CHAIN)
                if IS_PAIRED:
                    s += scores(q_high, k_high, CHAIN)
                elif K_HIGH > 0:
                    k_high = load_rows(
                        k_ptr, k_rows, None, K_LOW, K_HIGH, HEAD_DIM, False, K_FORMAT, DTYPE
                    )
                    s += scores(q_high, k_high, CHAIN)

                if BIAS != "":
                    # After the product, which would wait for it. Loads are wide: nothing of them
                    # is masked but what the tensor does not have.
                    columns = j.to(tl.int64) * stride_bias_key
                    has_bias = exists[:, None]
                    if phase != 1:
                        has_bias = has_bias & (j < bias_width)[None, :]
                    bias = tl.load(bias_rows[:, None] + columns[None, :], mask=has_bias, other=0)
                    if BIAS == "bool":
                        allowed = bias != 0
                    else:
                        bias = bias.to(tl.float32)
                        allowed = bias != float("-inf")
                    # at first, rows that do not exist see what they like: they are not written
                    seen = allowed if phase == 1 and attempt == 0 else seen & allowed

                if IS_PAIRED and K_FORMAT == "INT8":
                    s = s * scale[:, None] - raised[:, None]
                elif not RAW_SCORES:
                    s = s * scale[:, None]
                if HAS_SOFTCAP:
                    s = softcapped(s, softcap, IS_PRECISE)
                if HAS_ALIBI:
                    s = with_alibi(s, slope, position, j)
                if BIAS == "float":
                    s = s + bias
                if phase != 1 or attempt == 1 or BIAS == "bool":
                    # select, never add: a masked key may hold NaN (which the first attempt at a
                    # bias of -inf finds in what comes out)
                    s = tl.where(seen, s, float("-inf"))

                p, m_i, l_i, shrink = fold_scores(m_i, l_i, s, factor, IS_PRECISE)
                if rng_ptr is not None:
                    survives = dropout_keep(rng_ptr, dropout_threshold, b, head, token, n0, BLOCK_N)
                    p = tl.where(survives, p * dropout_scale, 0.0)
                p = p.to(DTYPE)

                v_rows = k_rows
                if not IS_V_LIKE_K:
                    v_rows = page * stride_v_page + slot * stride_v_slot
                if IS_PAIRED:
                    pairs = load_rows(v_ptr, v_rows, None, 0, V_LOW, V_LOW, False, "RAW", DTYPE)
                    v_low, v_high = decode_pairs(pairs, K_FORMAT, HAS_PTX)
                else:
                    v_low = load_rows(
                        v_ptr, v_rows, None, 0, V_LOW, HEAD_DIM_V, False, K_FORMAT, DTYPE
                    )
                if attempt == 1:
                    keep = tl.max(seen.to(tl.int32), 0) > 0
                    v_low = zero_unless(keep, v_low)
                acc_low = fold_values(acc_low, shrink, p, v_low, IS_PRECISE)
                if IS_PAIRED or V_HIGH > 0:
                    if not IS_PAIRED:
                        v_high = load_rows(
                            v_ptr, v_rows, None, V_LOW, V_HIGH, HEAD_DIM_V, False, K_FORMAT, DTYPE
                        )
                    if attempt == 1:
                        v_high = zero_unless(keep, v_high)
                    acc_high = fold_values(acc_high, shrink, p, v_high, IS_PRECISE)
    return m_i, l_i, acc_low, acc_high
