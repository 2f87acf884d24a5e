"""`selected_attention` of latents whose columns have scales (`common/column_scales.py`), beside the
rope keys.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.softmax import LOG2E, fold_scores, quotient, with_sink
from torch_paged_attn.backends.triton.portable.common.column_scales import (
    add_group_scores,
    fold_groups,
    load_groups,
    without_units,
    zero_groups,
)
from torch_paged_attn.backends.triton.portable.common.gather_scatter import load_chunks, store_rows
from torch_paged_attn.backends.triton.portable.common.logits import softcapped
from torch_paged_attn.backends.triton.portable.common.named import type_of
from torch_paged_attn.backends.triton.portable.common.products import chunk_scores
from torch_paged_attn.backends.triton.portable.selected.kernel import store_lse
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedSizes,
    find_keys,
    find_split,
    range_of_split,
    row_offsets,
)


@triton.jit(do_not_specialize=SelectedSizes._fields)
def _selected_latents_kernel(
    pointers, results,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, scalars, OPTIONS: tl.constexpr,
):  # fmt: skip
    """The arguments are those of `_selected_fwd_kernel`."""
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    GROUPS: tl.constexpr = OPTIONS.HEAD_DIM_V // OPTIONS.SCALED_COLUMNS
    K_FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    V_FORMAT: tl.constexpr = OPTIONS.V_FORMAT
    Q_FORMAT: tl.constexpr = OPTIONS.Q_FORMAT
    split, kv_head, head_tile, token, queries = find_split(pointers, strides, sizes, OPTIONS)
    q_rows = token.row * strides.latent_token + queries.head.to(tl.int64) * strides.latent_head
    latents = load_groups(pointers.q_latent, q_rows, queries.exists, True, Q_FORMAT, OPTIONS)
    begin, stop = range_of_split(split, token, sizes, OPTIONS)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)
    acc = zero_groups(OPTIONS)
    units = (tl.zeros([BLOCK_M], tl.float32),) * GROUPS
    for n0 in tl.range(begin, stop, OPTIONS.BLOCK_N):
        page, slot, is_seen = find_keys(n0, token, pointers, strides, sizes, scalars, OPTIONS)
        k_rows = row_offsets(page, slot, strides.k_page, strides.k_slot) + kv_head * strides.k_head
        k = load_chunks(
            pointers.k, k_rows, is_seen, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, True,
            K_FORMAT, type_of(OPTIONS.DTYPE),
        )  # fmt: skip
        v_rows = row_offsets(page, slot, strides.v_page, strides.v_slot) + kv_head * strides.v_head
        v = load_groups(pointers.v, v_rows, is_seen, True, V_FORMAT, OPTIONS)
        of_rows = row_offsets(page, slot, strides.v_descale_page, strides.v_descale_slot)
        scale_ptr = pointers.v_descale + kv_head * strides.v_descale_head + of_rows
        s = chunk_scores((queries.low, queries.high), k, OPTIONS.K_HIGH, OPTIONS.CHAIN)
        s = s * (scalars.scale * queries.k_scale)
        s, scales = add_group_scores(
            s, latents, v, scalars.scale * queries.latent_scale, scale_ptr,
            strides.v_descale_column, is_seen, True, OPTIONS,
        )  # fmt: skip
        if OPTIONS.HAS_SOFTCAP:
            s = softcapped(s, scalars.softcap, OPTIONS.IS_PRECISE, type_of(OPTIONS.DTYPE))
        s = tl.where(is_seen[None, :], s, float("-inf"))
        p, m_i, l_i, shrink = fold_scores(
            m_i, l_i, s, LOG2E, OPTIONS.IS_PRECISE, False, IS_FUSED=True
        )
        acc, units = fold_groups(acc, units, shrink, p, v, scales, OPTIONS)
    acc = without_units(acc, units, OPTIONS)

    r = head_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    is_stored = r < OPTIONS.GROUP_SIZE
    gain = tl.full([BLOCK_M], 1.0, tl.float32)
    divisor = gain
    at = token.row * OPTIONS.NUM_HEADS + queries.head
    if OPTIONS.IS_SPLIT:
        at += split * tl.cast(sizes.total_q, tl.int64) * OPTIONS.NUM_HEADS
        tl.store(results.lse + at, m_i, mask=is_stored)
        tl.store(results.sums + at, l_i, mask=is_stored)
    else:
        if pointers.sinks is not None:
            # rows of padding belong to no sequence and get no sink
            sink = tl.load(pointers.sinks + queries.head, mask=queries.exists, other=float("-inf"))
            m_i, l_i, gain = with_sink(m_i, l_i, sink)
        divisor = store_lse(m_i, l_i, token, queries, is_stored, results, sizes)
    OUT_FORMAT: tl.constexpr = "NATIVE" if OPTIONS.IS_SPLIT else OPTIONS.OUT_FORMAT
    COLUMNS: tl.constexpr = OPTIONS.SCALED_COLUMNS
    to = results.out + at.to(tl.int64) * OPTIONS.HEAD_DIM_V
    for c in tl.static_range(GROUPS):
        x = quotient(acc[c] * gain[:, None], divisor, OPTIONS.IS_PRECISE)
        store_rows(
            to, x, is_stored, c * COLUMNS, COLUMNS, OPTIONS.HEAD_DIM_V, results.out_scale,
            OUT_FORMAT,
        )  # fmt: skip
