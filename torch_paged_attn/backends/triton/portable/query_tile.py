"""One tile of queries against a run of its keys: loads, the loop over keys, results.

A tile is up to TOKENS neighbouring queries of one sequence times PACK query heads that share a KV
head, stacked to BLOCK_M rows, so that decode with grouped heads fills a matrix instruction and
every key is loaded once for all of them.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.dequant import float16_range
from torch_paged_attn.backends.triton.portable.combine import part_lse
from torch_paged_attn.backends.triton.portable.gather_scatter import load_rows, store_rows
from torch_paged_attn.backends.triton.portable.key_loop import attend_keys
from torch_paged_attn.backends.triton.portable.mask import full_range, key_range
from torch_paged_attn.backends.triton.softmax import quotient, with_sink


@triton.jit
def first_query(tile, query_len, key_len, TOKENS: tl.constexpr, HAS_LAYOUT: tl.constexpr):
    """The first query of a sequence's tile, counted from the sequence's own first."""
    first_token = tile * TOKENS
    if HAS_LAYOUT:
        # tiles start at positions that are multiples of TOKENS: one tile, one row of the layout
        past = key_len - query_len
        first_token += (past & -TOKENS) - past
    return first_token


@triton.jit
def attend_tile(
    b,
    head_program,
    first_token,
    unit,
    taken,
    units,
    is_part,
    part,
    q_start,
    query_len,
    k_start,
    key_len,
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
    block_table_ptr,
    crow_ptr,
    col_ptr,
    bias_ptr,
    alibi_ptr,
    sinks_ptr,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    out_scale_ptr,
    rng_ptr,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_table,
    stride_crow_batch,
    stride_crow_head,
    stride_crow,
    stride_col_batch,
    stride_col_head,
    stride_col,
    stride_bias_head,
    stride_bias_token,
    stride_bias_key,
    bias_width,
    stride_alibi_batch,
    stride_alibi_head,
    stride_q_descale_batch,
    stride_q_descale_head,
    stride_k_descale_batch,
    stride_k_descale_head,
    stride_v_descale_batch,
    stride_v_descale_head,
    total_q,
    num_pages,
    batch,
    num_heads,
    layout_rows,
    nnz,
    left,
    right,
    scale,
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
    GROUP_SIZE: tl.constexpr,
    PACK: tl.constexpr,
    TOKENS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    LAYOUT_GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    RAW_SCORES: tl.constexpr,
    CHAIN: tl.constexpr,
    FIRST_PHASE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    ROWS: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    IS_V_LIKE_K: tl.constexpr,
    IS_PAIRED: tl.constexpr,
    HAS_PTX: tl.constexpr,
    IS_Q_NORMED: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attend to units `unit` to `unit + taken` of the tile's `units`, and write the result, or with
    `is_part` partial result number `part`, in float32: ROWS rows of values, their lse elsewhere.
    """
    HAS_LAYOUT: tl.constexpr = K_BLOCK > 0
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + PACK - 1) // PACK
    kv_head = head_program // HEAD_TILES
    head_tile = head_program % HEAD_TILES
    past = key_len - query_len
    r = tl.arange(0, BLOCK_M)
    token = first_token + r // PACK
    in_group = head_tile * PACK + r % PACK
    row = q_start + token
    exists = (r < TOKENS * PACK) & (token >= 0) & (token < query_len) & (in_group < GROUP_SIZE)
    exists = exists & (row >= 0) & (row < total_q)
    head = kv_head * GROUP_SIZE + tl.minimum(in_group, GROUP_SIZE - 1)
    position = past + token
    row64 = row.to(tl.int64)

    # which keys this tile visits, in tiles of BLOCK_N
    first_position = past + tl.maximum(first_token, 0)
    last_position = past + tl.minimum(first_token + TOKENS, query_len) - 1
    start, stop = key_range(
        first_position, last_position, key_len, left, right, HAS_LEFT, HAS_RIGHT
    )
    full_start, full_stop = full_range(
        first_position, last_position, key_len, left, right, HAS_LEFT, HAS_RIGHT
    )
    if HAS_LAYOUT:
        layout_head = (head_tile * PACK + kv_head * GROUP_SIZE) // LAYOUT_GROUP
        layout_row = first_position // Q_BLOCK
        listed = (first_position >= 0) & (layout_row < layout_rows) & (b < batch)
        crow_ptr += tl.cast(b, tl.int64) * stride_crow_batch + layout_head * stride_crow_head
        col_ptr += tl.cast(b, tl.int64) * stride_col_batch + layout_head * stride_col_head
        crow_ptr += layout_row * stride_crow
        PER_BLOCK: tl.constexpr = K_BLOCK // BLOCK_N
        first_col = tl.maximum(tl.load(crow_ptr, mask=listed, other=0), 0)
        last_col = tl.minimum(tl.load(crow_ptr + stride_crow, mask=listed, other=0), nnz)
        i_start = first_col * PER_BLOCK
        i_stop = tl.where(start < stop, tl.maximum(last_col * PER_BLOCK, i_start), i_start)
    else:
        i_start = start // BLOCK_N
        i_stop = tl.where(start < stop, tl.cdiv(stop, BLOCK_N), i_start)
    if IS_SPLIT:
        # a layout's row or a window may hold fewer tiles than there are units: each has its share
        visits = i_stop - i_start
        unit_stop = unit + taken
        if visits != units:
            unit_stop = (visits.to(tl.int64) * unit_stop // units).to(tl.int32)
            unit = (visits.to(tl.int64) * unit // units).to(tl.int32)
        i_stop = i_start + unit_stop
        i_start += unit

    q_rows = row64 * stride_q_token + head.to(tl.int64) * stride_q_head
    Q_DTYPE: tl.constexpr = tl.float32 if IS_Q_NORMED else DTYPE
    STEP: tl.constexpr = 2 if IS_PAIRED else 1
    q_low = load_rows(q_ptr, q_rows, exists, 0, K_LOW, HEAD_DIM, True, Q_FORMAT, Q_DTYPE, STEP)
    q_high = q_low
    if K_HIGH > 0:
        q_high = load_rows(
            q_ptr, q_rows, exists, 1 if IS_PAIRED else K_LOW, K_HIGH, HEAD_DIM, True, Q_FORMAT,
            Q_DTYPE, STEP,
        )  # fmt: skip
    # Inductor hands over numbers in float64
    factor = tl.cast(factor, tl.float32)
    if HAS_SOFTCAP:
        softcap = tl.cast(softcap, tl.float32)
    if rng_ptr is not None:
        dropout_scale = tl.cast(dropout_scale, tl.float32)
    scale = tl.full([BLOCK_M], 1.0, tl.float32) * tl.cast(scale, tl.float32)
    if IS_Q_NORMED:
        largest = tl.max(tl.abs(q_low), 1)
        if K_HIGH > 0:
            largest = tl.maximum(largest, tl.max(tl.abs(q_high), 1))
        enlarge, reduce = float16_range(largest)
        q_low = (q_low * enlarge[:, None]).to(DTYPE)
        q_high = (q_high * enlarge[:, None]).to(DTYPE)
        scale = scale * reduce
    if not RAW_SCORES:
        if q_descale_ptr is not None:
            q_descale_ptr += b * stride_q_descale_batch + kv_head * stride_q_descale_head
            scale = scale * tl.load(q_descale_ptr, mask=b < batch, other=0.0)
        if k_descale_ptr is not None:
            k_descale_ptr += b * stride_k_descale_batch + kv_head * stride_k_descale_head
            scale = scale * tl.load(k_descale_ptr, mask=b < batch, other=0.0)
    raised = 0.0
    if IS_PAIRED and K_FORMAT == "INT8":
        # what 128 more in every element of a key adds to a score
        raised = (
            128.0 * scale * (tl.sum(q_low.to(tl.float32), 1) + tl.sum(q_high.to(tl.float32), 1))
        )
        scale = scale * 16777216.0
    slope = 0.0
    if alibi_ptr is not None:
        alibi_ptr += b * stride_alibi_batch
        slope = tl.load(alibi_ptr + head * stride_alibi_head, mask=exists & (b < batch), other=0.0)
    bias_rows = bias_ptr
    if BIAS != "":
        bias_rows = bias_ptr + row64 * stride_bias_token + head.to(tl.int64) * stride_bias_head
    if PAGE_SIZE > 0:
        block_table_ptr += tl.cast(b, tl.int64) * stride_table
        k_ptr += tl.cast(kv_head, tl.int64) * stride_k_head
        v_ptr += tl.cast(kv_head, tl.int64) * stride_v_head
    else:
        k_ptr += (
            tl.cast(k_start, tl.int64) * stride_k_slot + tl.cast(kv_head, tl.int64) * stride_k_head
        )
        v_ptr += (
            tl.cast(k_start, tl.int64) * stride_v_slot + tl.cast(kv_head, tl.int64) * stride_v_head
        )

    # `start` and `stop` say what a single query sees
    HAS_EDGE_LEFT: tl.constexpr = HAS_LEFT and TOKENS > 1
    HAS_EDGE_RIGHT: tl.constexpr = HAS_RIGHT and TOKENS > 1
    m_i, l_i, acc_low, acc_high = attend_keys(
        q_low, q_high, k_ptr, v_ptr, block_table_ptr, col_ptr, bias_rows, rng_ptr, b, head, token,
        position, exists, slope, i_start, i_stop, start, stop, full_start, full_stop, key_len,
        num_pages, stride_k_page, stride_k_slot, stride_v_page, stride_v_slot, stride_col,
        stride_bias_key, bias_width, left, right, scale, raised, factor, softcap, dropout_threshold,
        dropout_scale, HEAD_DIM, K_LOW, K_HIGH, HEAD_DIM_V, V_LOW, V_HIGH, PAGE_SIZE, K_BLOCK,
        HAS_EDGE_LEFT, HAS_EDGE_RIGHT, HAS_SOFTCAP, alibi_ptr is not None, BIAS, RAW_SCORES, CHAIN,
        FIRST_PHASE, K_FORMAT, IS_V_LIKE_K, IS_PAIRED, HAS_PTX, DTYPE, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    IS_PRECISE: tl.constexpr = q_low.dtype == tl.float32
    # `factor` in base two is as much as this in base e
    m = m_i * (factor * 0.6931471805599453)
    gain = tl.full([BLOCK_M], 1.0, tl.float32)
    if v_descale_ptr is not None:
        v_descale_ptr += b * stride_v_descale_batch + kv_head * stride_v_descale_head
        gain = gain * tl.load(v_descale_ptr, mask=b < batch, other=0.0)
    OUT_LOW: tl.constexpr = 2 * V_LOW if IS_PAIRED else V_LOW
    OUT_HIGH: tl.constexpr = 0 if IS_PAIRED else V_HIGH
    if IS_PAIRED:
        acc_low = tl.interleave(acc_low, acc_high)

    if is_part:
        part_row = part * ROWS + r
        total = tl.where(l_i == 0.0, 1.0, l_i)
        lse = tl.where(l_i == 0.0, float("-inf"), m + tl.log(total))
        tl.store(part_lse(parts_ptr, ROWS, HEAD_DIM_V) + part_row, lse, mask=exists)
        # a run without keys leaves no values: its lse says so
        exists = exists & (i_start < i_stop)
        part_rows = parts_ptr + part_row * HEAD_DIM_V
        out = quotient(acc_low * gain[:, None], total, IS_PRECISE)
        store_rows(part_rows, out, exists, 0, OUT_LOW, HEAD_DIM_V, None, "NATIVE")
        if OUT_HIGH > 0:
            out = quotient(acc_high * gain[:, None], total, IS_PRECISE)
            store_rows(part_rows, out, exists, OUT_LOW, OUT_HIGH, HEAD_DIM_V, None, "NATIVE")
    else:
        if sinks_ptr is not None:
            sink = tl.load(sinks_ptr + head, mask=exists & (b < batch), other=float("-inf"))
            m, l_i, shrink = with_sink(m, l_i, sink)
            gain = gain * shrink
        total = tl.where(l_i == 0.0, 1.0, l_i)
        lse = tl.where(l_i == 0.0, float("-inf"), m + tl.log(total))
        tl.store(lse_ptr + head.to(tl.int64) * total_q + row64, lse, mask=exists)
        out_rows = out_ptr + (row64 * num_heads + head) * HEAD_DIM_V
        out = quotient(acc_low * gain[:, None], total, IS_PRECISE)
        store_rows(out_rows, out, exists, 0, OUT_LOW, HEAD_DIM_V, out_scale_ptr, OUT_FORMAT)
        if OUT_HIGH > 0:
            out = quotient(acc_high * gain[:, None], total, IS_PRECISE)
            store_rows(
                out_rows, out, exists, OUT_LOW, OUT_HIGH, HEAD_DIM_V, out_scale_ptr, OUT_FORMAT
            )
