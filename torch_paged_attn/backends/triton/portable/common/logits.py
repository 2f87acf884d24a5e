"""From a tile of products q k to final logits: scale, softcap, ALiBi and bias.

Rows and keys have shapes that broadcast with the tile: (rows, 1) and (1, keys), or (1, rows) and
(keys, 1) in the backward, where tiles are transposed.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.softmax import LOG2E, small_tanh
from torch_paged_attn.backends.triton.portable.common.named import type_of


@triton.jit
def _tanh(x):
    """tanh to about two units in the last place (the split and polynomial of Cephes' tanhf)."""
    size = tl.abs(x)
    large = 1.0 - 2.0 / (tl.exp(2.0 * tl.minimum(size, 20.0)) + 1.0)
    square = x * x
    series = -5.70498872745e-3 * square + 2.06390887954e-2
    series = series * square - 5.37397155531e-2
    series = series * square + 1.33314422036e-1
    series = series * square - 3.33332819422e-1
    return tl.where(size < 0.625, x + x * square * series, tl.where(x < 0.0, -large, large))


@triton.jit
def softcapped(s, softcap, IS_PRECISE: tl.constexpr, DTYPE: tl.constexpr):
    """softcap * tanh(s / softcap)."""
    if IS_PRECISE:
        return softcap * _tanh(s / softcap)
    else:
        t = s * (2.0 * LOG2E / softcap)
        # the error is a few 2**-24 of softcap, much less than that of rounded probabilities. With
        # float16 queries and logits much smaller than softcap, softmax_lse would be too inaccurate
        squashed = softcap - 2.0 * softcap / (tl.exp2(t) + 1.0)
        if tl.float16 == DTYPE:
            small, is_small = small_tanh(t)
            squashed = tl.where(is_small, softcap * small, squashed)
        return squashed


@triton.jit
def _with_alibi(s, slope, position, j):
    """s - slope * |position - j|."""
    distance = tl.abs(position - j).to(tl.float32)
    return s - slope * distance


@triton.jit
def load_bias(bias_rows, exists, j, strides, OPTIONS: tl.constexpr, IS_INSIDE: tl.constexpr):
    """A tile of the bias (0 for a bool mask), and True where it does not hide the key. Only
    elements outside the tensor are masked, so that loads are wide.
    """
    columns = j.to(tl.int64) * strides.bias_key
    has_bias = exists
    if not IS_INSIDE:
        has_bias = has_bias & (j < strides.bias_width)
    bias = tl.load(bias_rows + columns, mask=has_bias, other=0)
    if OPTIONS.BIAS == "bool":
        return 0.0, bias != 0
    else:
        bias = bias.to(tl.float32)
        return bias, bias != float("-inf")


@triton.jit
def scaled(s, scale, raised, OPTIONS: tl.constexpr):
    """Products q k times the scale, unless RAW_SCORES, where the softmax includes the scale."""
    if OPTIONS.IS_PAIRED and (OPTIONS.K_FORMAT == "INT8" or OPTIONS.K_STEP == 4):
        return s * scale - raised
    elif not OPTIONS.RAW_SCORES:
        return s * scale
    else:
        return s


@triton.jit
def logits(s, bias, slope, position, j, pointers, scalars, OPTIONS: tl.constexpr):
    """Final logits (which the softmax multiplies by `scalars.factor`), and the logits before ALiBi
    and bias.
    """
    if OPTIONS.HAS_SOFTCAP:
        s = softcapped(s, scalars.softcap, OPTIONS.IS_PRECISE, type_of(OPTIONS.DTYPE))
    capped = s
    if pointers.alibi is not None:
        s = _with_alibi(s, slope, position, j)
    if OPTIONS.BIAS == "float":
        s = s + bias
    return s, capped
