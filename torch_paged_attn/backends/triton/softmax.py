"""The running softmax (FlashAttention-2, arXiv 2307.08691, algorithm 1), in base two."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite_or_zero(m):
    """A row that has seen no key has m = -inf; shifting by 0 instead avoids inf - inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def exp(x):
    """exp of x <= 0 to about one unit in the last place (Cephes' expf); chips are coarser.

    Below -87 it is 0. NaN stays NaN, as it would not through a maximum.
    """
    # rounded to a whole number of octaves by adding 1.5 * 2**23
    octaves = (x * LOG2E + 12582912.0) - 12582912.0
    r = tl.fma(octaves, -0.693359375, x)
    r = tl.fma(octaves, 2.12194440e-4, r)
    series = tl.fma(r, 1.9875691500e-4, 1.3981999507e-3)
    series = tl.fma(series, r, 8.3334519073e-3)
    series = tl.fma(series, r, 4.1665795894e-2)
    series = tl.fma(series, r, 1.6666665459e-1)
    series = tl.fma(series, r, 5.0000001201e-1)
    value = tl.fma(series, r * r, r) + 1.0
    power = ((octaves.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, value * power)


@triton.jit
def small_tanh(t):
    """tanh(x), x = t ln(2) / 2, to two units in the last place where |x| < 0.18, and whether it is:
    a quotient of exponentials loses, of a small tanh, what float32 has no room for beside 1."""
    square = t * t
    # least squares
    series = tl.fma(square, 6.54616042e-04, -1.38750154e-02)
    return t * tl.fma(series, square, 0.34657359), square < 0.27


@triton.jit
def fold_scores(
    m_i, l_i, s, factor, IS_PRECISE: tl.constexpr, IS_HUGE: tl.constexpr, IS_FUSED: tl.constexpr
):  # fmt: skip
    """Fold a tile of scores into the row maxima and sums; `exp2(factor * s)` is what they stand
    for. With IS_HUGE scores may be any float32: times `factor`, some would be infinite. IS_FUSED:
    the compiler fuses products and sums.

    Returns the probabilities under the new maxima, those, the sums, and what the old tiles shrink
    by.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))
    shift = finite_or_zero(m_new)
    if IS_PRECISE:
        p = exp(s - shift[:, None])
    elif not IS_FUSED and not IS_HUGE:
        p = tl.exp2(tl.fma(s, factor, -(shift * factor)[:, None]))
    elif IS_HUGE:
        p = tl.exp2((s - shift[:, None]) * factor)
    else:
        p = tl.exp2(s * factor - (shift * factor)[:, None])  # one fused multiply-add
    shrink = exp(m_i - shift) if IS_PRECISE else tl.exp2((m_i - shift) * factor)
    return p, m_new, l_i * shrink + tl.sum(p, 1), shrink


@triton.jit
def quotient(acc, total, IS_PRECISE: tl.constexpr):
    """Rows divided by their totals: rounded correctly, as Triton's `/` is not, where it counts."""
    if not IS_PRECISE:
        return acc * (1.0 / total)[:, None]
    return tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))


@triton.jit
def with_sink(m, l_i, sink):
    """Add one logit to the denominator: new maximum, new sum, and what the numerator shrinks by."""
    m_new = tl.maximum(m, sink)
    shift = finite_or_zero(m_new)
    shrink = tl.exp2((m - shift) * LOG2E)
    return m_new, l_i * shrink + tl.exp2((sink - shift) * LOG2E), shrink
