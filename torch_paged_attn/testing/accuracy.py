"""The accuracy rule: whether a result is right, on every device.

*Golden* is the formula in float64 from the same (quantised) inputs. *Baseline* is the formula in
float32, rounded where the contract lets a kernel round. A kernel's error against golden may be
about as large as the baseline's, plus that of rounding the result. Four things are judged:

- the maximum and the mean of all numbers' errors: the maximum finds wrong rows, the mean finds
  lost precision;
- for each row (one query of one head) the Euclidean norm of its error: finds a row that misses one
  key;
- for each row the dot product of its error with the row itself: finds a row that is scaled by a
  factor near 1. Each number's error is then smaller than its rounding error, but all errors have
  the direction of the row, while rounding errors have random directions;
- softmax_lse.

The rounding errors of one baseline are a random sample: with a few numbers only they may be small
by chance. What is granted for that is called `luck`. `scales.py` derives it and the bounds of rows.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.reference import BASELINE, GOLDEN
from torch_paged_attn.testing.scales import EPS_FLOAT32, Observer, luck_of_mean

# the largest error of softmax_lse, besides 4 eps of its own size
LSE_TOLERANCE = 2e-5

# the largest difference of two float64 formulas, for numbers up to 1
FLOAT64_TOLERANCE = 1e-12

# up to this size a sum may consist of terms below 2**-126, which devices may flush to 0
FLUSHED = 2.0**-116


@dataclasses.dataclass(frozen=True)
class Truth:
    """Golden results of one call, and the errors that a kernel may have, all in float64.

    out: `(total_q, num_heads, head_dim_v)`, golden
    softmax_lse: `(num_heads, total_q)`, golden
    allowed: of out's shape, the baseline's errors
    luck: of out's shape, how much smaller than usual the baseline's errors may be by chance
    row_error: `(total_q, num_heads)`, the largest norm of a row's error
    row_along: `(total_q, num_heads)`, the largest dot product of a row's error with the row
    lse_allowed: of softmax_lse's shape, the baseline's errors
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
        """Run `reference`, at both precisions, on copies of the arguments on the CPU.

        cuts_off: whether products of float8 queries and keys may be added up with less than float32
            precision, as Hopper's tensor cores do
        """
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
        """The truth of several calls whose results are concatenated along the rows."""
        names = [field.name for field in dataclasses.fields(cls)]
        along = {name: 1 if "lse" in name else 0 for name in names}
        return cls(*(torch.cat([getattr(t, n) for t in truths], along[n]) for n in names))


def assert_accurate(out: Tensor, softmax_lse: Tensor, truth: Truth) -> None:
    """Raise AssertionError unless `out` and `softmax_lse` fulfil the accuracy rule."""
    assert_close_as_baseline(out, truth.out, truth.allowed, truth.luck)
    assert_rows(out, truth.out, truth.row_error, truth.row_along)
    _assert_lse(softmax_lse, truth)


def assert_close_as_baseline(
    actual: Tensor,
    golden: Tensor,
    allowed: Tensor,
    luck: Tensor,
    slack: float = 1 / 8,
    of_mean: float | None = None,
) -> None:
    """Raise AssertionError unless the maximum and the mean of a tensor's errors fulfil the rule.

    golden, allowed, luck: float64 of actual's shape, see `Truth`
    slack: further mean error, in eps of actual's dtype times the mean of |golden|
    of_mean: the luck of the mean; None: rows are independent
    """
    assert actual.shape == golden.shape, (
        f"shape {tuple(actual.shape)}, golden {tuple(golden.shape)}"
    )
    if actual.numel() == 0:
        return
    eps = torch.finfo(actual.dtype).eps
    result = actual.cpu().double()
    assert result.isfinite().all(), f"{(~result.isfinite()).sum()} values are not finite"
    error, size = (result - golden).abs(), golden.abs()
    rows = max(1, int(luck.any(-1).sum()))  # rows that see no key have no luck
    max_allowed = 2.0 * (allowed.max() + eps * size.max() + luck.max())
    of_mean = luck_of_mean(luck) if of_mean is None else of_mean
    mean_allowed = _allowed_mean(allowed, of_mean, (slack + 1 / rows) * eps * size)
    where = _largest(error)
    assert error.max() <= max_allowed, (
        f"max error {error.max():.3g} at {where}, allowed {max_allowed:.3g}:"
        f" got {result[where]:.6g}, golden {golden[where]:.6g}"
    )
    assert error.mean() <= mean_allowed, (
        f"mean error {error.mean():.3g}, allowed {mean_allowed:.3g}"
    )


def _allowed_mean(allowed: Tensor, luck: float, rounding: Tensor) -> Tensor:
    """The largest mean error: a tenth more than the baseline's, and what luck and rounding add."""
    return 1.1 * allowed.mean() + luck + rounding.mean()


def assert_rows_alike(actual: Tensor, golden: Tensor, allowed: Tensor, luck: Tensor) -> None:
    """Raise AssertionError unless the mean fulfils the rule where rows are divided by the size of
    their own errors: in the plain mean a row with many times the others' numbers hides theirs.

    golden, allowed, luck: as in `assert_close_as_baseline`; the rows' errors are independent
    """
    info = torch.finfo(actual.dtype)
    is_seen = luck.any(-1)
    if not is_seen.any():
        return
    size = (luck + allowed).mean(-1, keepdim=True) + info.tiny * info.eps
    error, allowed, luck, golden = (
        (x / size)[is_seen] for x in (actual.cpu().double() - golden, allowed, luck, golden)
    )
    rounding = info.eps / len(error) * golden.abs()
    most, found = _allowed_mean(allowed, luck_of_mean(luck), rounding), error.abs().mean()
    assert found <= most, f"mean error of rows {found:.3g} of their size, allowed {most:.3g}"


def assert_as_right_as(actual: Tensor, golden: Tensor, peer: Tensor) -> None:
    """The rule for results that have no reference here, such as the gradients of a whole model.

    golden: the result in float64
    peer: the result of another implementation in actual's precision. `actual` may be as far from
        golden as it is. Its errors may be small by chance, so the mean may be larger by one eps
    """
    golden = golden.detach().cpu().double()
    error = (peer.detach().cpu().double() - golden).abs()
    assert_close_as_baseline(actual.detach(), golden, error, torch.zeros_like(golden), slack=1.0)


def assert_same_in_float64(found: Tensor, wanted: Tensor) -> None:
    """The rule for two float64 formulas of the same numbers, which add up in different orders."""
    assert found.shape == wanted.shape, f"shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    assert found.dtype == wanted.dtype == torch.float64, f"{found.dtype}, {wanted.dtype}"
    if found.numel() == 0:
        return
    error, largest = (found - wanted).abs().max(), wanted.abs().max()
    assert error <= FLOAT64_TOLERANCE * (1.0 + largest), f"off by {error:.3g} of {largest:.3g}"


def assert_rounded_alike(found: Tensor, wanted: Tensor) -> None:
    """The rule for one formula in one precision, of which two kernels fuse other products with
    sums: results round otherwise by 2.5 units in the last place at most, and float32 sums by 64.
    Numbers that are not finite are equal.
    """
    assert found.shape == wanted.shape, f"shape {tuple(found.shape)}, wanted {tuple(wanted.shape)}"
    assert found.dtype == wanted.dtype, f"{found.dtype}, {wanted.dtype}"
    is_finite = wanted.isfinite()
    assert torch.equal(found[~is_finite], wanted[~is_finite])
    units = 2.5 * torch.finfo(wanted.dtype).eps + 64 * torch.finfo(torch.float32).eps
    found, wanted = found[is_finite].double(), wanted[is_finite].double()
    off = (found - wanted).abs() / (1.0 + wanted.abs())
    assert (off <= units).all(), f"off by {off.max():.3g} of 1 + |wanted|, allowed {units:.3g}"


def assert_rows(out: Tensor, golden: Tensor, row_error: Tensor, row_along: Tensor) -> None:
    """Raise AssertionError unless the norm of each row's error, and its dot product with the row,
    are within `row_error` and `row_along`, plus what rounding the result may add.
    """
    if out.numel() == 0:
        return
    result = out.cpu().double()
    error = result - golden
    # rounding the result changes a number by half a unit in its last place
    info = torch.finfo(out.dtype)
    rounding = 0.5 * info.eps * golden.abs().clamp(min=info.tiny)
    # devices, and XLA, may flush subnormal float32 numbers to 0
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
    """The rule for softmax_lse. Its errors are at most LSE_TOLERANCE, or more if the logits are so
    large that float32 does not allow that. Rows that see no key are exactly -inf.
    """
    lse, golden = softmax_lse.cpu().double(), truth.softmax_lse
    empty = golden == float("-inf")
    assert torch.equal(lse == float("-inf"), empty), "softmax_lse: the rows that see no key differ"
    if empty.all():
        return
    lse, golden, allowed = lse[~empty], golden[~empty], truth.lse_allowed[~empty]
    error, size = (lse - golden).abs(), golden.abs()
    # twice the baseline's error, as for `out`
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
    # not torch.unravel_index, which imports SymPy: seconds of `python -m torch_paged_attn`
    rest, where = int(x.argmax()), []
    for size in reversed(x.shape):
        rest, i = divmod(rest, size)
        where.append(i)
    return tuple(reversed(where))
