"""Latents whose columns have scales: 8 bits, a scale for each token and SCALED_COLUMNS columns
(DeepSeek's caches of 656 bytes a token).

A scale multiplies the scores, and the weights, of its columns: no latent is multiplied by one. So a
tile is in groups of columns, a product is taken for each, and weights are rounded once.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.int4 import decode_in_order
from torch_paged_attn.backends.triton.portable.common.gather_scatter import load_rows
from torch_paged_attn.backends.triton.portable.common.named import type_of
from torch_paged_attn.backends.triton.portable.common.products import add_product, scores
from torch_paged_attn.backends.triton.portable.common.token_scales import in_units


@triton.jit
def load_groups(
    ptr, offsets, keep, MASKED: tl.constexpr, FORMAT: tl.constexpr, OPTIONS: tl.constexpr
):  # fmt: skip
    """Rows of values' width, in groups; with MASKED, rows for which `keep` is False are 0."""
    COLUMNS: tl.constexpr = OPTIONS.SCALED_COLUMNS
    STOP: tl.constexpr = OPTIONS.HEAD_DIM_V
    found = ()
    DTYPE: tl.constexpr = type_of(OPTIONS.DTYPE)
    for c in tl.static_range(STOP // COLUMNS):
        if FORMAT == "INT4":
            x = load_rows(
                ptr, offsets, keep, c * COLUMNS // 2, COLUMNS // 2, STOP // 2, MASKED, "RAW", DTYPE
            )
            x = decode_in_order(x, DTYPE)
        else:
            x = load_rows(ptr, offsets, keep, c * COLUMNS, COLUMNS, STOP, MASKED, FORMAT, DTYPE)
        found = found + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return found


@triton.jit
def zero_groups(OPTIONS: tl.constexpr):
    """Sums of values of BLOCK_M rows, in groups."""
    x = tl.full([OPTIONS.BLOCK_M, OPTIONS.SCALED_COLUMNS], 0.0, tl.float32)
    return (x,) * (OPTIONS.HEAD_DIM_V // OPTIONS.SCALED_COLUMNS)


@triton.jit
def add_group_scores(
    s, latents, values, factor, scale_ptr, stride, keep, MASKED: tl.constexpr, OPTIONS: tl.constexpr
):  # fmt: skip
    """`s` plus the products of queries and values, times the values' scales and `factor`; and the
    scales, each at its distance `stride` from the one before it.
    """
    scales = ()
    for c in tl.static_range(OPTIONS.HEAD_DIM_V // OPTIONS.SCALED_COLUMNS):
        if MASKED:
            scale = tl.load(scale_ptr + c * stride, mask=keep, other=0.0)
        else:
            scale = tl.load(scale_ptr + c * stride)
        more = scores(latents[c], values[c], OPTIONS.CHAIN)
        s += more * (scale * factor)[None, :]
        scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
    return s, scales


@triton.jit
def fold_groups(acc, units, shrink, p, values, scales, OPTIONS: tl.constexpr):
    """`acc * shrink + (p * scales) @ values`, and the new units: in float16, weights would lose
    their bits where scales are small, so they are in units (`token_scales.py`).
    """
    new_acc, new_units = (), ()
    for c in tl.static_range(OPTIONS.HEAD_DIM_V // OPTIONS.SCALED_COLUMNS):
        weights, factor = p * scales[c][None, :], shrink
        unit = units[c]
        if OPTIONS.DTYPE == "fp16":
            weights, unit, factor = in_units(weights, unit, shrink)
        weights = weights.to(type_of(OPTIONS.DTYPE))
        x = add_product(acc[c] * factor[:, None], weights, values[c], OPTIONS.IS_PRECISE)
        new_acc = new_acc + (x,)  # type: ignore[assignment]  # noqa: RUF005
        new_units = new_units + (unit,)  # type: ignore[assignment]  # noqa: RUF005
    return new_acc, new_units


@triton.jit
def without_units(acc, units, OPTIONS: tl.constexpr):
    """Sums of values that were in units."""
    found = ()
    for c in tl.static_range(OPTIONS.HEAD_DIM_V // OPTIONS.SCALED_COLUMNS):
        x = acc[c]
        if OPTIONS.DTYPE == "fp16":
            x *= units[c][:, None]
        found = found + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return found
