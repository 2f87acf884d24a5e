"""The online softmax (FlashAttention-2, arXiv 2307.08691, algorithm 1), with powers of two."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def finite_or_zero(m):
    """`m`, or 0 where it is -inf, as in rows that have seen no key; this avoids inf - inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def exp(x):
    """exp(x) for x <= 0, accurate to about one unit in the last place (Cephes' expf), which the
    GPU's own instruction is not. Below -87 it is 0. NaN stays NaN.
    """
    # adding and subtracting 1.5 * 2**23 rounds to an integer
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
    """tanh(x) with x = t ln(2) / 2, accurate to two units in the last place if |x| < 0.18; and
    whether it is. For small x the usual quotient of exponentials is less accurate, because 1 + x is
    rounded.
    """
    square = t * t
    # coefficients from a least squares fit
    series = tl.fma(square, 6.54616042e-04, -1.38750154e-02)
    return t * tl.fma(series, square, 0.34657359), square < 0.27


@triton.jit
def fold_scores(
    m_i, l_i, s, factor, IS_PRECISE: tl.constexpr, IS_HUGE: tl.constexpr, IS_FUSED: tl.constexpr
):  # fmt: skip
    """Update the row maxima m_i and sums l_i with a tile of scores s, where `exp2(factor * s)` are
    the unnormalised probabilities.

    IS_HUGE: `factor * s` may overflow, as with a large bias. IS_FUSED: the compiler may fuse
    products and sums.

    Returns the tile's probabilities relative to the new maxima, the new maxima and sums, and the
    factor by which earlier results have to be multiplied.
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
    """Rows divided by their totals, with IS_PRECISE correctly rounded, unlike Triton's `/`."""
    if not IS_PRECISE:
        return acc * (1.0 / total)[:, None]
    return tl.div_rn(acc, tl.broadcast_to(total[:, None], acc.shape))


@triton.jit
def with_sink(m, l_i, sink):
    """Add a sink's logit to the denominator. Returns the new maxima and sums, and the factor by
    which the numerators have to be multiplied.
    """
    m_new = tl.maximum(m, sink)
    shift = finite_or_zero(m_new)
    shrink = tl.exp2((m - shift) * LOG2E)
    return m_new, l_i * shrink + tl.exp2((sink - shift) * LOG2E), shrink
