"""Tiles of keys and values are loaded and multiplied: q k for scores, p v for results.

A tile's rows are in two chunks: the low and the high elements of a head (`chunks` in
`gather_scatter.py`), the second of which may be missing; or, with a STEP of 2, if 8-bit numbers are
decoded by pairs or int4 by bytes, the even and the odd ones. With a STEP of 4, if int4 is decoded
by fours, they are in four, each with every fourth element. Each chunk of those that are loaded one
by one is multiplied before the next one is loaded. Values whose columns have scales are in as many
chunks as scales (`column_scales.py`).
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.dequant import decode_pairs, decode_raised_pairs
from torch_paged_attn.backends.triton.common.int4 import (
    decode_fours,
    decode_raised_fours,
    decode_two,
)
from torch_paged_attn.backends.triton.portable.common.column_scales import (
    fold_groups,
    load_groups,
    without_units,
    zero_groups,
)
from torch_paged_attn.backends.triton.portable.common.gather_scatter import (
    load_chunks,
    load_rows,
    zero_chunks,
    zero_chunks_unless,
    zero_unless,
)
from torch_paged_attn.backends.triton.portable.common.named import type_of
from torch_paged_attn.backends.triton.portable.common.products import fold_values, scores


@triton.jit
def zero_values(OPTIONS: tl.constexpr):
    """Sums of values in chunks, before the first tile."""
    if OPTIONS.SCALED_COLUMNS > 0:
        return zero_groups(OPTIONS)
    else:
        acc = zero_chunks(OPTIONS.BLOCK_M, OPTIONS.V_LOW, OPTIONS.V_HIGH)
        if OPTIONS.V_STEP == 4:
            acc = acc + zero_chunks(OPTIONS.BLOCK_M, OPTIONS.V_LOW, OPTIONS.V_LOW)
        return acc


@triton.jit
def score_keys(queries, k_ptr, offsets, OPTIONS: tl.constexpr):
    """q k, (queries, keys), of a tile of queries and the keys at these offsets."""
    CHAIN: tl.constexpr = OPTIONS.CHAIN
    HEAD_DIM: tl.constexpr = OPTIONS.HEAD_DIM
    LOW: tl.constexpr = OPTIONS.K_LOW
    HIGH: tl.constexpr = OPTIONS.K_HIGH
    FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    DTYPE: tl.constexpr = type_of(OPTIONS.DTYPE)
    if OPTIONS.K_STEP == 4:
        fours = load_rows(k_ptr, offsets, None, 0, LOW, LOW, False, "RAW", DTYPE)
        low, high, third, fourth = decode_raised_fours(fours, OPTIONS.HAS_PTX)
        s = scores(queries.low, low, CHAIN)
        s += scores(queries.high, high, CHAIN)
        s += scores(queries.third, third, CHAIN)
        s += scores(queries.fourth, fourth, CHAIN)
    elif OPTIONS.K_STEP == 2:
        if FORMAT == "INT8":
            pairs = load_rows(k_ptr, offsets, None, 0, LOW, LOW, False, "RAW", DTYPE)
            low, high = decode_raised_pairs(pairs, OPTIONS.HAS_PTX)
        else:
            low, high = _load_even_and_odd(k_ptr, offsets, LOW, HEAD_DIM, FORMAT, OPTIONS)
        s = scores(queries.low, low, CHAIN)
        s += scores(queries.high, high, CHAIN)
    else:
        low = load_rows(k_ptr, offsets, None, 0, LOW, HEAD_DIM, False, FORMAT, DTYPE)
        s = scores(queries.low, low, CHAIN)
        if HIGH > 0:
            high = load_rows(k_ptr, offsets, None, LOW, HIGH, HEAD_DIM, False, FORMAT, DTYPE)
            s += scores(queries.high, high, CHAIN)
    return s


@triton.jit
def fold_value_tile(
    acc, shrink, p, v_ptr, offsets, keep, OPTIONS: tl.constexpr, IS_CAREFUL: tl.constexpr
):
    """Add p v, with the values at these offsets, to the chunks of `acc`, which are first multiplied
    by `shrink`. With IS_CAREFUL, values for which `keep` is False count as 0.
    """
    HEAD_DIM_V: tl.constexpr = OPTIONS.HEAD_DIM_V
    LOW: tl.constexpr = OPTIONS.V_LOW
    HIGH: tl.constexpr = OPTIONS.V_HIGH
    FORMAT: tl.constexpr = OPTIONS.V_FORMAT
    DTYPE: tl.constexpr = type_of(OPTIONS.DTYPE)
    IS_PRECISE: tl.constexpr = OPTIONS.IS_PRECISE
    acc_low, acc_high = acc[0], acc[1]
    if OPTIONS.V_STEP == 4:
        fours = load_rows(v_ptr, offsets, None, 0, LOW, LOW, False, "RAW", DTYPE)
        low, high, third, fourth = decode_fours(fours, OPTIONS.HAS_PTX)
        # bytes are numbers, whatever they are: none of them is NaN
        acc_third = fold_values(acc[2], shrink, p, third, IS_PRECISE)
        acc_fourth = fold_values(acc[3], shrink, p, fourth, IS_PRECISE)
    elif OPTIONS.V_STEP == 2:
        low, high = _load_even_and_odd(v_ptr, offsets, LOW, HEAD_DIM_V, FORMAT, OPTIONS)
    else:
        low = load_rows(v_ptr, offsets, None, 0, LOW, HEAD_DIM_V, False, FORMAT, DTYPE)
    if IS_CAREFUL:
        low = zero_unless(keep, low)
    acc_low = fold_values(acc_low, shrink, p, low, IS_PRECISE)
    if HIGH > 0:
        if OPTIONS.V_STEP == 1:
            high = load_rows(v_ptr, offsets, None, LOW, HIGH, HEAD_DIM_V, False, FORMAT, DTYPE)
        if IS_CAREFUL:
            high = zero_unless(keep, high)
        acc_high = fold_values(acc_high, shrink, p, high, IS_PRECISE)
    if OPTIONS.V_STEP == 4:
        return acc_low, acc_high, acc_third, acc_fourth
    else:
        return acc_low, acc_high


@triton.jit
def _load_even_and_odd(
    ptr, offsets, WIDTH: tl.constexpr, DIM: tl.constexpr, FORMAT: tl.constexpr,
    OPTIONS: tl.constexpr,
):  # fmt: skip
    """A tile of rows of DIM elements, of which WIDTH or fewer are even."""
    DTYPE: tl.constexpr = type_of(OPTIONS.DTYPE)
    stored = load_rows(ptr, offsets, None, 0, WIDTH, DIM // 2, False, "RAW", DTYPE)
    if OPTIONS.IS_PAIRED:
        return decode_pairs(stored, FORMAT, OPTIONS.HAS_PTX)
    else:
        return decode_two(stored, DTYPE)


@triton.jit
def load_keys(k_ptr, offsets, OPTIONS: tl.constexpr):
    """A tile of keys in two chunks."""
    FORMAT: tl.constexpr = OPTIONS.K_FORMAT
    if OPTIONS.K_STEP == 2:
        return _load_even_and_odd(k_ptr, offsets, OPTIONS.K_LOW, OPTIONS.HEAD_DIM, FORMAT, OPTIONS)
    else:
        return load_chunks(
            k_ptr, offsets, None, OPTIONS.K_LOW, OPTIONS.K_HIGH, OPTIONS.HEAD_DIM, False, FORMAT,
            type_of(OPTIONS.DTYPE),
        )  # fmt: skip


@triton.jit
def load_values(v_ptr, offsets, OPTIONS: tl.constexpr):
    """A tile of values in chunks, before they are multiplied: with q_latent they serve as keys too,
    and a loop without stages need not wait twice.
    """
    FORMAT: tl.constexpr = OPTIONS.V_FORMAT
    if OPTIONS.SCALED_COLUMNS > 0:
        return load_groups(v_ptr, offsets, None, False, FORMAT, OPTIONS)
    elif OPTIONS.V_STEP == 2:
        return _load_even_and_odd(
            v_ptr, offsets, OPTIONS.V_LOW, OPTIONS.HEAD_DIM_V, FORMAT, OPTIONS
        )
    else:
        return load_chunks(
            v_ptr, offsets, None, OPTIONS.V_LOW, OPTIONS.V_HIGH, OPTIONS.HEAD_DIM_V, False,
            FORMAT, type_of(OPTIONS.DTYPE),
        )  # fmt: skip


@triton.jit
def fold_values_loaded(
    acc, shrink, p, v, keep, OPTIONS: tl.constexpr, IS_CAREFUL: tl.constexpr
):  # fmt: skip
    """`fold_value_tile` for values that have been loaded already."""
    low, high = v
    acc_low, acc_high = acc
    if IS_CAREFUL:
        low, high = zero_chunks_unless(keep, (low, high), OPTIONS.V_HIGH)
    acc_low = fold_values(acc_low, shrink, p, low, OPTIONS.IS_PRECISE)
    if OPTIONS.V_HIGH > 0:
        acc_high = fold_values(acc_high, shrink, p, high, OPTIONS.IS_PRECISE)
    return acc_low, acc_high


@triton.jit
def fold_scaled_values(
    acc, units, shrink, p, v, scales, keep, OPTIONS: tl.constexpr, IS_CAREFUL: tl.constexpr
):  # fmt: skip
    """`fold_values_loaded` for values whose columns have scales, which count as 0 as well; and the
    new units.
    """
    if IS_CAREFUL:
        kept, kept_scales = (), ()
        for c in tl.static_range(OPTIONS.HEAD_DIM_V // OPTIONS.SCALED_COLUMNS):
            kept = kept + (zero_unless(keep, v[c]),)  # type: ignore[assignment]  # noqa: RUF005
            kept_scales = kept_scales + (tl.where(keep, scales[c], 0.0),)  # type: ignore[assignment]  # noqa: RUF005
        v, scales = kept, kept_scales
    return fold_groups(acc, units, shrink, p, v, scales, OPTIONS)


@triton.jit
def result_chunks(acc, units, OPTIONS: tl.constexpr):
    """The chunks of sums of values as those of a row of results, and by what each row's have to be
    multiplied.
    """
    if OPTIONS.SCALED_COLUMNS > 0:
        return without_units(acc, units, OPTIONS), tl.full([OPTIONS.BLOCK_M], 1.0, tl.float32)
    elif OPTIONS.V_STEP == 4:
        low, high, third, fourth = acc
        low = tl.interleave(
            tl.interleave(low, third), tl.interleave(high * 0.0625, fourth * 0.0625)
        )
        return (low, high), units[0]
    elif OPTIONS.V_STEP == 2:
        return (tl.interleave(acc[0], acc[1]), acc[1]), units[0]
    else:
        return acc, units[0]
