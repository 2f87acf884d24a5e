"""What happens to a tile of scores between the product and the softmax."""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.softmax import LOG2E


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
def softcapped(s, softcap, IS_PRECISE: tl.constexpr):
    """Squash logits into (-softcap, softcap)."""
    if IS_PRECISE:
        return softcap * _tanh(s / softcap)
    else:
        # off by a few 2**-24 of softcap, far less than what probabilities of 16 bits are rounded by
        power = tl.exp2(s * (2.0 * LOG2E / softcap))
        return softcap - 2.0 * softcap / (power + 1.0)


@triton.jit
def with_alibi(s, slope, position, j):
    """Take off `slope` for every step between a row's position and key j."""
    distance = tl.abs(position[:, None] - j[None, :]).to(tl.float32)
    return s - slope[:, None] * distance
