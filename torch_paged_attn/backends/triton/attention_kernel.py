"""Attention forward for every GPU that Triton knows: packed or paged keys, prefill, decode and
mixes.

FlashAttention-2's loop (arXiv 2307.08691). One program works on one tile: up to TOKENS neighbouring
queries of one sequence times PACK query heads that share a KV head, stacked to BLOCK_M rows, so
that decode with grouped heads fills a matrix instruction and every key is loaded once for all of
them. The keys come in tiles of BLOCK_N; those that every row sees need no mask and go first through
the middle phase. With IS_SPLIT the keys of a tile are shared by several programs, each leaving a
partial result in float32 for `combine.py`. With a layout, a program's tiles of keys are the listed
blocks of its row.

Scores and sums are float32; probabilities are rounded to DTYPE, the type of the products.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.key_loop import attend_keys
from torch_paged_attn.backends.triton.mask import full_range, key_range
from torch_paged_attn.backends.triton.rows import load_rows, store_rows
from torch_paged_attn.backends.triton.softmax import quotient, with_sink
from torch_paged_attn.backends.triton.tile import find_tile, key_span, query_span
from torch_paged_attn.backends.triton.work import count_splits, find_work

# sizes that differ from call to call: a kernel is not compiled anew for each of their divisors
VARYING = (
    "total_q",
    "max_keys",
    "num_pages",
    "batch",
    "layout_rows",
    "nnz",
    "left",
    "right",
    "dropout_threshold",
    "programs",
    "min_tiles",
    "fixed_tiles",
)


@triton.jit(do_not_specialize=VARYING)
def _attention_fwd_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    lse_ptr,
    parts_ptr,
    part_lse_ptr,
    plan_ptr,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
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
    stride_alibi_batch,
    stride_alibi_head,
    stride_q_descale_batch,
    stride_q_descale_head,
    stride_k_descale_batch,
    stride_k_descale_head,
    stride_v_descale_batch,
    stride_v_descale_head,
    total_q,
    max_keys,
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
    programs,
    min_tiles,
    fixed_tiles,
    HEAD_DIM: tl.constexpr,
    K_LOW: tl.constexpr,
    K_HIGH: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    V_LOW: tl.constexpr,
    V_HIGH: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    PACK: tl.constexpr,
    TOKENS: tl.constexpr,
    SLACK: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    Q_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr,
    LAYOUT_GROUP: tl.constexpr,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    BIAS: tl.constexpr,
    RAW_SCORES: tl.constexpr,
    IS_PRECISE: tl.constexpr,
    FIRST_PHASE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    SEARCH_WIDTH: tl.constexpr,
    IS_ONE_LOOK: tl.constexpr,
    Q_FORMAT: tl.constexpr,
    K_FORMAT: tl.constexpr,
    OUT_FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    HAS_LAYOUT: tl.constexpr = K_BLOCK > 0
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + PACK - 1) // PACK
    if IS_SPLIT:
        # programs without work come last, not between the others
        heads = num_heads // GROUP_SIZE * HEAD_TILES
        number = tl.program_id(0) // heads
        head_program = tl.program_id(0) % heads
        b, tile, piece = find_work(
            number,
            cu_seqlens_q_ptr,
            cu_seqlens_k_ptr,
            seqused_k_ptr,
            batch,
            total_q,
            max_keys,
            programs,
            min_tiles,
            fixed_tiles,
            PAGE_SIZE > 0,
            TOKENS,
            HAS_LAYOUT,
            BLOCK_N,
            SEARCH_WIDTH,
            IS_ONE_LOOK,
        )
        if b > batch:
            return
    else:
        head_program = tl.program_id(1)
        # the last tiles of a causal sequence see the most keys: they start first
        number = tl.num_programs(0) - 1 - tl.program_id(0)
        b, tile = find_tile(number, cu_seqlens_q_ptr, batch, TOKENS, SLACK)
    kv_head = head_program // HEAD_TILES
    head_tile = head_program % HEAD_TILES
    q_start, q_stop = query_span(b, cu_seqlens_q_ptr, batch, total_q)
    k_start, key_len = key_span(
        b, cu_seqlens_q_ptr, cu_seqlens_k_ptr, seqused_k_ptr, batch, max_keys, PAGE_SIZE > 0
    )
    if IS_SPLIT:
        splits = count_splits(key_len, piece, fixed_tiles, BLOCK_N)
        split = tile % splits
        tile = tile // splits
        is_part = splits > 1
    else:
        is_part = False
    query_len = q_stop - q_start
    past = key_len - query_len
    first_token = tile * TOKENS
    if HAS_LAYOUT:
        # tiles start at positions that are multiples of TOKENS: one tile, one row of the layout
        first_token += (past & -TOKENS) - past
    if first_token >= query_len:
        return

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
        i_stop = tl.maximum(last_col * PER_BLOCK, i_start)
    else:
        i_start = start // BLOCK_N
        i_stop = tl.where(start < stop, tl.cdiv(stop, BLOCK_N), i_start)
    if IS_SPLIT:
        share = tl.maximum(tl.cdiv(i_stop - i_start, splits), tl.maximum(min_tiles, fixed_tiles))
        # boundaries of fixed splits are counted from key 0: they do not move with a window
        i_base = i_start
        if not HAS_LAYOUT:
            i_base = tl.where(fixed_tiles > 0, 0, i_start)
        i_start = tl.maximum(i_start, i_base + split * share)
        i_stop = tl.maximum(tl.minimum(i_stop, i_base + (split + 1) * share), i_start)

    q_rows = row64 * stride_q_token + head.to(tl.int64) * stride_q_head
    q_low = load_rows(q_ptr, q_rows, exists, 0, K_LOW, HEAD_DIM, True, Q_FORMAT, DTYPE)
    q_high = q_low
    if K_HIGH > 0:
        q_high = load_rows(q_ptr, q_rows, exists, K_LOW, K_HIGH, HEAD_DIM, True, Q_FORMAT, DTYPE)
    if not RAW_SCORES:
        if q_descale_ptr is not None:
            q_descale_ptr += b * stride_q_descale_batch + kv_head * stride_q_descale_head
            scale = scale * tl.load(q_descale_ptr, mask=b < batch, other=0.0)
        if k_descale_ptr is not None:
            k_descale_ptr += b * stride_k_descale_batch + kv_head * stride_k_descale_head
            scale = scale * tl.load(k_descale_ptr, mask=b < batch, other=0.0)
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

    m_i, l_i, acc_low, acc_high = attend_keys(
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
        left,
        right,
        scale,
        factor,
        softcap,
        dropout_threshold,
        dropout_scale,
        HEAD_DIM,
        K_LOW,
        K_HIGH,
        HEAD_DIM_V,
        V_LOW,
        V_HIGH,
        PAGE_SIZE,
        K_BLOCK,
        HAS_LEFT,
        HAS_RIGHT,
        HAS_SOFTCAP,
        alibi_ptr is not None,
        BIAS,
        RAW_SCORES,
        IS_PRECISE,
        FIRST_PHASE,
        K_FORMAT,
        DTYPE,
        BLOCK_M,
        BLOCK_N,
    )

    # `factor` in base two is `unit` in base e
    m = m_i * (factor * 0.6931471805599453)
    shrink = tl.full([BLOCK_M], 1.0, tl.float32)
    if sinks_ptr is not None:
        # the sink counts once: in the combining pass if there is one
        has_sink = exists & (b < batch) & (not is_part)
        sink = tl.load(sinks_ptr + head, mask=has_sink, other=float("-inf"))
        m, l_i, shrink = with_sink(m, l_i, sink)
    total = tl.where(l_i == 0.0, 1.0, l_i)
    lse = tl.where(l_i == 0.0, float("-inf"), m + tl.log(total))
    gain = shrink
    if v_descale_ptr is not None:
        v_descale_ptr += b * stride_v_descale_batch + kv_head * stride_v_descale_head
        gain = gain * tl.load(v_descale_ptr, mask=b < batch, other=0.0)

    out_row = out_ptr + (row64 * num_heads + head) * HEAD_DIM_V
    whole = exists & (not is_part)
    tl.store(lse_ptr + head.to(tl.int64) * total_q + row64, lse, mask=whole)
    out_low = quotient(acc_low * gain[:, None], total)
    store_rows(out_row, out_low, whole, 0, V_LOW, HEAD_DIM_V, out_scale_ptr, OUT_FORMAT)
    if V_HIGH > 0:
        out_high = quotient(acc_high * gain[:, None], total)
        store_rows(out_row, out_high, whole, V_LOW, V_HIGH, HEAD_DIM_V, out_scale_ptr, OUT_FORMAT)
    if IS_SPLIT:
        # where a row's parts begin, and how many there are: the same for all heads
        plan = plan_ptr + 2 * row64
        announces = exists & (head_program == 0) & (split == 0) & (r % PACK == 0)
        tl.store(plan, number * BLOCK_M + r, mask=announces)
        tl.store(plan + 1, splits, mask=announces)
        part = (tl.cast(number, tl.int64) * heads + head_program) * BLOCK_M + r
        exists = exists & is_part
        tl.store(part_lse_ptr + part, lse, mask=exists)
        # a split without keys leaves no result: its lse says so
        exists = exists & (i_start < i_stop)
        part_row = parts_ptr + part * HEAD_DIM_V
        store_rows(part_row, out_low, exists, 0, V_LOW, HEAD_DIM_V, None, "NATIVE")
        if V_HIGH > 0:
            store_rows(part_row, out_high, exists, V_LOW, V_HIGH, HEAD_DIM_V, None, "NATIVE")
