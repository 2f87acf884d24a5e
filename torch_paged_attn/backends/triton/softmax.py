"""The running softmax (FlashAttention-2, arXiv 2307.08691, algorithm 1), in base two."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def finite_or_zero(m):
    """A row that has seen no key has m = -inf; shifting by 0 instead avoids inf - inf."""
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def fold_scores(m_i, l_i, s, factor, IS_PRECISE: tl.constexpr):
    """Fold a tile of scores into the row maxima and sums; `exp2(factor * s)` is what they stand
    for.

    Returns the probabilities under the new maxima, those, the sums, and what the old tiles shrink
    by.
    """
    m_new = tl.maximum(m_i, tl.max(s, 1))
    shift = finite_or_zero(m_new)
    if IS_PRECISE:
        p = tl.exp2((s - shift[:, None]) * factor)
    else:
        p = tl.exp2(s * factor - (shift * factor)[:, None])  # one fused multiply-add
    shrink = tl.exp2((m_i - shift) * factor)
    return p, m_new, l_i * shrink + tl.sum(p, 1), shrink


@triton.jit
def with_sink(m, l_i, sink):
    """Add one logit to the denominator: new maximum, new sum, and what the numerator shrinks by."""
    m_new = tl.maximum(m, sink)
    shift = finite_or_zero(m_new)
    shrink = tl.exp2((m - shift) * LOG2E)
    return m_new, l_i * shrink + tl.exp2((sink - shift) * LOG2E), shrink
