"""The one rule that decides whether a result is right, on every device.

Golden is the formula in float64 from the same (quantised) inputs; baseline is the formula in
float32 with the contract's own rounding points. A kernel may be as far from golden as the baseline
is, plus what the last rounding costs. Three things are judged, and softmax_lse as a fourth:

- all numbers: the maximum finds lost rows, the mean finds precision bugs;
- the error of each row (one query of one head), its length: finds a key that one row lost;
- how far that error points along the row itself: finds a row that is scaled, whose error, a small
  part of each number, hides among the roundings of these. Roundings do not point anywhere.

`scales.py` says what a row's rounding errors are as large as, and what the baseline's luck is.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.reference import BASELINE, GOLDEN
from torch_paged_attn.testing.scales import EPS_FLOAT32, Observer

# softmax_lse may be this far off, and four roundings of itself
LSE_TOLERANCE = 2e-5

# two float64 formulas may be this far apart, for numbers up to 1
FLOAT64_TOLERANCE = 1e-12

# a sum of terms below 2**-126
FLUSHED = 2.0**-116


@dataclasses.dataclass(frozen=True)
class Truth:
    """Golden results of one call, and how far from them a kernel may be, in float64.

    `allowed` is the baseline's error and `luck` what each number owes to chance, shaped as `out`;
    `row_error` and `row_along` are allowed of a row, `(total_q, num_heads)`: the length of its
    error, and its product with the row. `lse_allowed` is shaped as `softmax_lse`.
    """

    out: Tensor
    softmax_lse: Tensor
    allowed: Tensor
    luck: Tensor
    row_error: Tensor
    row_along: Tensor
    lse_allowed: Tensor

    @classmethod
    def of(
        cls,
        reference: Callable[..., tuple[Tensor, Tensor]],
        *args: Any,
        cuts_off: bool = False,
        **kwargs: Any,
    ) -> "Truth":
        """Run `reference` on CPU copies of the arguments at both precisions. `cuts_off`: products
        of float8 queries and keys may be added up as Hopper does."""
        args = tuple(a.cpu() if isinstance(a, Tensor) else a for a in args)
        observer = Observer(cuts_off)
        golden = dataclasses.replace(GOLDEN, observe=observer)
        out, lse = reference(*args, **kwargs, precision=golden)
        baseline, baseline_lse = reference(*args, **kwargs, precision=BASELINE)
        scales = observer.scales(out)
        error = baseline.double() - out
        allowed = error.abs()
        if torch.finfo(baseline.dtype).eps <= EPS_FLOAT32:
            allowed = allowed.maximum(scales.logits)
        lse_error = (baseline_lse.double() - lse).masked_fill(lse == float("-inf"), 0.0).abs()
        return cls(
            out,
            lse,
            allowed,
            observer.luck(out, scales),
            scales.row_error.maximum(2.0 * error.norm(dim=-1)),
            scales.row_along.maximum(2.0 * (error * out).sum(-1).abs()),
            1.1 * lse_error.maximum(scales.lse.T) + observer.exponential,
        )

    @classmethod
    def joined(cls, truths: list["Truth"]) -> "Truth":
        """Several truths as one, their rows laid end to end."""
        names = [field.name for field in dataclasses.fields(cls)]
        along = {name: 1 if "lse" in name else 0 for name in names}
        return cls(*(torch.cat([getattr(t, n) for t in truths], along[n]) for n in names))


def assert_accurate(out: Tensor, softmax_lse: Tensor, truth: Truth) -> None:
    """Raise AssertionError unless `out` and `softmax_lse` are as right as the contract asks."""
    assert_close_as_baseline(out, truth.out, truth.allowed, truth.luck)
    assert_rows(out, truth.out, truth.row_error, truth.row_along)
    _assert_lse(softmax_lse, truth)


def assert_close_as_baseline(
    actual: Tensor, golden: Tensor, allowed: Tensor, luck: Tensor, slack: float = 1 / 8
) -> None:
    """The rule for all numbers of a tensor; `slack` is granted to the mean, in eps of a number."""
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
    max_allowed = 2.0 * (allowed.max() + eps * size.max() + luck.max())
    mean_allowed = 1.1 * allowed.mean() + luck.mean() / math.sqrt(rows)
    mean_allowed += (slack + 1 / rows) * eps * size.mean()
    where = _largest(error)
    assert error.max() <= max_allowed, (
        f"max error {error.max():.3g} at {where}, allowed {max_allowed:.3g}:"
        f" got {result[where]:.6g}, golden {golden[where]:.6g}"
    )
    assert error.mean() <= mean_allowed, (
        f"mean error {error.mean():.3g}, allowed {mean_allowed:.3g}"
    )


def assert_as_right_as(actual: Tensor, golden: Tensor, peer: Tensor) -> None:
    """The rule for what no reference of ours computes, such as the gradients of a whole model.

    `golden` is it in float64, and `peer` what another implementation of the same precision as
    `actual` makes of it: `actual` may be as far from golden as that is. The peer's error is a draw
    of luck as well, so the mean is granted an eps of a number.
    """
    golden = golden.detach().cpu().double()
    error = (peer.detach().cpu().double() - golden).abs()
    assert_close_as_baseline(actual.detach(), golden, error, torch.zeros_like(golden), slack=1.0)


def assert_same_in_float64(found: Tensor, wanted: Tensor) -> None:
    """The rule for golden itself: two formulas in float64, which differ in the order of sums."""
    assert found.shape == wanted.shape, f"shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    assert found.dtype == wanted.dtype == torch.float64, f"{found.dtype}, {wanted.dtype}"
    if found.numel() == 0:
        return
    error, largest = (found - wanted).abs().max(), wanted.abs().max()
    assert error <= FLOAT64_TOLERANCE * (1.0 + largest), f"off by {error:.3g} of {largest:.3g}"


def assert_rows(out: Tensor, golden: Tensor, row_error: Tensor, row_along: Tensor) -> None:
    """Each row's error, how long it is and how far it points along the row."""
    if out.numel() == 0:
        return
    result = out.cpu().double()
    error = result - golden
    # each number may be rounded by half a unit in its last place
    info = torch.finfo(out.dtype)
    rounding = 0.5 * info.eps * golden.abs().clamp(min=info.tiny)
    # and be 0 where its terms are: chips, and XLA, flush what float32 has no full precision for
    rounding = rounding.maximum(torch.where(golden.abs() < FLUSHED, golden.abs(), 0.0))
    for name, found, allowed in (
        ("error", error.norm(dim=-1), row_error + rounding.norm(dim=-1)),
        (
            "error along itself",
            (error * golden).sum(-1).abs(),
            row_along + (rounding * golden.abs()).sum(-1),
        ),
    ):
        excess = found - allowed
        where = _largest(excess)
        assert excess[where] <= 0.0, (
            f"row {where[0]} of head {where[1]}: {name} {found[where]:.3g},"
            f" allowed {allowed[where]:.3g}; the row is {golden[where].norm():.3g} long"
        )


def _assert_lse(softmax_lse: Tensor, truth: Truth) -> None:
    """The rule in float32, and no more than LSE_TOLERANCE off anywhere, unless logits are so large
    that float32 cannot add them up so closely; rows that see no key exact.
    """
    lse, golden = softmax_lse.cpu().double(), truth.softmax_lse
    empty = golden == float("-inf")
    assert torch.equal(lse == float("-inf"), empty), "softmax_lse: the rows that see no key differ"
    if empty.all():
        return
    lse, golden, allowed = lse[~empty], golden[~empty], truth.lse_allowed[~empty]
    error, size = (lse - golden).abs(), golden.abs()
    # a row may be twice as far off as the baseline's, as in `out`
    cap = (2.0 * allowed).maximum(LSE_TOLERANCE + 4.0 * EPS_FLOAT32 * size)
    where = _largest(error - cap)
    assert error[where] <= cap[where], (
        f"softmax_lse is off by {error[where]:.3g}, allowed {cap[where]:.3g}:"
        f" got {lse[where]:.8g}, golden {golden[where]:.8g}"
    )
    mean_allowed = allowed.mean() + EPS_FLOAT32 * size.mean()
    assert error.mean() <= mean_allowed, (
        f"softmax_lse is off by {error.mean():.3g} in the mean, allowed {mean_allowed:.3g}"
    )


def _largest(x: Tensor) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape))
