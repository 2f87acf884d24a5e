"""The one rule that decides whether a result is right, on every device.

Golden is the formula in float64 from the same (quantised) inputs; baseline is the formula in
float32 with the contract's own rounding points. A kernel may be as far from golden as the baseline
is, plus what the last rounding costs: the maximum finds lost keys and rows, the mean finds
precision bugs.

The baseline may have been lucky, the more so the fewer rows there are: a row's numbers share the
roundings of its probabilities and of its sums. So n rows are granted `luck` over sqrt(n): two
roundings of float32 of the sums of |p v|, which cancellation makes larger than the result, and,
where the result is finer than the probabilities, two standard deviations of what rounding these
does. Their mean is granted one rounding of the result over n.

Nor is it luck alone that a library's routine for small matrices adds eight products where others
add a hundred, or that ALiBi is exact before it is multiplied by log2(e): in float32 no baseline
counts as closer than four standard deviations of what rounding the logits does: they are rounded as
products, scaled and shifted.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.reference import BASELINE, GOLDEN, LOGITS, MAGNITUDE, SPREAD

LSE_TOLERANCE = 1e-3
EPS_FLOAT32 = torch.finfo(torch.float32).eps
# a number's rounding error is as likely anywhere in half a unit in its last place on either side,
# which is half an eps of the number or less: 0.2 eps on average
DEVIATION = 0.2


@dataclasses.dataclass(frozen=True)
class Truth:
    """Golden results of one call, how far from them the baseline is, and what a row of it owes to
    chance, in float64.
    """

    out: Tensor
    softmax_lse: Tensor
    allowed: Tensor
    luck: Tensor

    @classmethod
    def of(
        cls, reference: Callable[..., tuple[Tensor, Tensor]], *args: Any, **kwargs: Any
    ) -> "Truth":
        """Run `reference` on CPU copies of the arguments, whose first is of the probabilities'
        dtype, at both precisions.
        """
        args = tuple(a.cpu() if isinstance(a, Tensor) else a for a in args)
        out, lse = reference(*args, **kwargs, precision=GOLDEN)
        baseline, _ = reference(*args, **kwargs, precision=BASELINE)
        luck = 2.0 * EPS_FLOAT32 * reference(*args, **kwargs, precision=MAGNITUDE)[0]
        eps = torch.finfo([*args, *kwargs.values()][0].dtype).eps
        finest = torch.finfo(baseline.dtype).eps
        if eps > finest:
            luck += 2.0 * DEVIATION * eps * reference(*args, **kwargs, precision=SPREAD)[0]
        allowed = (baseline.double() - out).abs()
        if finest <= EPS_FLOAT32:
            logits = reference(*args, **kwargs, precision=LOGITS)[0]
            allowed = allowed.maximum(4.0 * DEVIATION * EPS_FLOAT32 * logits)
        return cls(out, lse, allowed, luck)


def assert_accurate(out: Tensor, softmax_lse: Tensor, truth: Truth, gradient: bool = False) -> None:
    """Raise AssertionError unless `out` and `softmax_lse` are as right as the contract asks."""
    assert_close_as_baseline(out, truth.out, truth.allowed, truth.luck, gradient)
    lse, golden = softmax_lse.cpu().double(), truth.softmax_lse
    empty = golden == float("-inf")
    assert torch.equal(lse == float("-inf"), empty), "softmax_lse: the rows that see no key differ"
    error = (lse - golden).masked_fill(empty, 0.0).abs()
    worst = error.max().item() if error.numel() else 0.0
    assert worst <= LSE_TOLERANCE, f"softmax_lse is off by {worst:.3g}, allowed {LSE_TOLERANCE}"


def assert_close_as_baseline(
    actual: Tensor, golden: Tensor, allowed: Tensor, luck: Tensor, gradient: bool = False
) -> None:
    """The rule for one tensor; gradients may be 2.5 times as far in the mean."""
    assert actual.shape == golden.shape, (
        f"shape {tuple(actual.shape)}, golden {tuple(golden.shape)}"
    )
    if actual.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    result = actual.cpu().double()
    assert result.isfinite().all(), f"{(~result.isfinite()).sum()} values are not finite"
    error, size = (result - golden).abs(), golden.abs()
    rows = max(1, int(luck.any(-1).sum()))  # but those that see no key
    luck = luck / math.sqrt(rows)
    max_allowed = 2.0 * (allowed.max() + eps * size.max() + luck.max())
    mean_allowed = (2.5 if gradient else 1.1) * allowed.mean() + luck.mean()
    mean_allowed += (eps / 8 + eps / rows) * size.mean()
    where = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
    assert error.max() <= max_allowed, (
        f"max error {error.max():.3g} at {where}, allowed {max_allowed:.3g}:"
        f" got {result[where]:.6g}, golden {golden[where]:.6g}"
    )
    assert error.mean() <= mean_allowed, (
        f"mean error {error.mean():.3g}, allowed {mean_allowed:.3g}"
    )
