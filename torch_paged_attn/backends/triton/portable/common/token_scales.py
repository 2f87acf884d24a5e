"""Scales of a cache by token and head: those of keys multiply scores, those of values the weights
(probabilities) of values, so that no row of keys or values is multiplied by one.

Weights become factors of a matrix product. In float16 the smallest of them would lose their bits,
or all of them where scales are small. So weights are in units, one for each row of queries and a
power of two: that of the largest weight so far.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.common.gather_scatter import page_at


@triton.jit
def scales_of_head(tile, kv_head, pointers, strides, sizes, OPTIONS: tl.constexpr):
    """Pointers to the scales of a sequence's keys and values for a KV head, by page and slot as the
    keys are; 0 for scales that are not by token.
    """
    k_scales, v_scales = 0, 0
    if OPTIONS.K_BY_TOKEN:
        k_scales = _scales_of_head(
            pointers.k_descale, strides.k_descale_page, strides.k_descale_head,
            strides.k_descale_slot, tile, kv_head, pointers, sizes, OPTIONS,
        )  # fmt: skip
    if OPTIONS.V_BY_TOKEN:
        v_scales = _scales_of_head(
            pointers.v_descale, strides.v_descale_page, strides.v_descale_head,
            strides.v_descale_slot, tile, kv_head, pointers, sizes, OPTIONS,
        )  # fmt: skip
    return k_scales, v_scales


@triton.jit
def _scales_of_head(
    scales, stride_page, stride_head, stride_slot, tile, kv_head, pointers, sizes,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    scales += kv_head * stride_head
    if not OPTIONS.IS_PAGED:
        scales += tl.cast(tile.k_start, tl.int64) * stride_slot
    elif OPTIONS.PAGE_SIZE == 0:
        # the sequence's only page; padding rows have none
        table_ptr = pointers.block_table + tl.cast(tile.b, tl.int64) * sizes.stride_table
        page = page_at(table_ptr, sizes.num_pages, tile.b < sizes.batch).to(tl.int64)
        scales += page * stride_page
    return scales


@triton.jit
def in_units(weights, unit, shrink):
    """Weights (rows, keys) in units of their rows, the new units, and the factor of earlier sums.

    unit: the units so far, 0 before the first tile
    shrink: by what earlier weights have to be multiplied
    """
    unit = unit * shrink
    largest = tl.maximum(unit, tl.max(tl.abs(weights), 1))
    # the next power of two: 1 in place of the bits of the mantissa, if there are any
    bits = (largest.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000
    inverse = (0x7F000000 - bits).to(tl.float32, bitcast=True)
    new_unit = bits.to(tl.float32, bitcast=True)
    return weights * inverse[:, None], new_unit, unit * inverse
