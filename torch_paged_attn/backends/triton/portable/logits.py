"""What happens to a tile of scores between the product and the softmax.

Rows and keys come in shapes that broadcast with the tile: (rows, 1) and (1, keys), or, where a
backward has its keys in rows, (1, rows) and (keys, 1).
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.softmax import LOG2E, small_tanh


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
def _softcapped(s, softcap, IS_PRECISE: tl.constexpr, DTYPE: tl.constexpr):
    """Squash logits into (-softcap, softcap)."""
    if IS_PRECISE:
        return softcap * _tanh(s / softcap)
    else:
        t = s * (2.0 * LOG2E / softcap)
        # off by a few 2**-24 of softcap, far less than what probabilities are rounded by; but
        # softmax_lse of float16 queries, if logits are a small part of softcap, would show it
        squashed = softcap - 2.0 * softcap / (tl.exp2(t) + 1.0)
        if tl.float16 == DTYPE:
            small, is_small = small_tanh(t)
            squashed = tl.where(is_small, softcap * small, squashed)
        return squashed


@triton.jit
def _with_alibi(s, slope, position, j):
    """Take off `slope` for every step between a row's position and key j."""
    distance = tl.abs(position - j).to(tl.float32)
    return s - slope * distance


@triton.jit
def load_bias(bias_rows, exists, j, strides, OPTIONS: tl.constexpr, IS_INSIDE: tl.constexpr):
    """A tile of the bias (of a mask: nothing to add), and True where it allows a key. Loads are
    wide: nothing of them is masked but what the tensor does not have.
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
    """Products of queries and keys as scores, if the scale does not join the exponent."""
    if OPTIONS.IS_PAIRED and OPTIONS.K_FORMAT == "INT8":
        return s * scale - raised
    elif not OPTIONS.RAW_SCORES:
        return s * scale
    else:
        return s


@triton.jit
def logits(s, bias, slope, position, j, pointers, scalars, OPTIONS: tl.constexpr):
    """Scores as what the softmax is of, up to `scalars.factor`, and as they are before ALiBi and
    bias.
    """
    IS_PRECISE: tl.constexpr = OPTIONS.IS_PRECISE
    if OPTIONS.HAS_SOFTCAP:
        s = _softcapped(s, scalars.softcap, IS_PRECISE, OPTIONS.DTYPE)
    capped = s
    if pointers.alibi is not None:
        s = _with_alibi(s, slope, position, j)
    if OPTIONS.BIAS == "float":
        s = s + bias
    return s, capped
