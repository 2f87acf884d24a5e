"""The accuracy rule (`accuracy.py`) for gradients.

The baseline rounds where a kernel does: P and dX to q's dtype as operands of products, and it reads
the `out` that the forward has rounded; everything else is float32. Baseline and kernel both round
the result, so the rule adds nothing to the mean error for that. Golden uses float64 `out` and
softmax_lse, so the error that comes from rounding these counts as the backward's.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import reference
from torch_paged_attn.backward_call import GRADIENTS, BackwardCall
from torch_paged_attn.reference import BASELINE, GOLDEN
from torch_paged_attn.testing.accuracy import (
    assert_close_as_baseline,
    assert_rows,
    assert_rows_alike,
)
from torch_paged_attn.testing.gradient_scales import GradientObserver
from torch_paged_attn.testing.scales import EPS_FLOAT32

# a probability below float32's normal range may be flushed to 0: the error that this may cause
UNDERFLOW = 2.0**-120


@dataclasses.dataclass(frozen=True)
class Gradient:
    """One golden gradient and the errors that a kernel may have; fields as in `accuracy.Truth`.

    A gradient with one dimension has shape `(n, 1)` here: each number is a row. `luck_of_mean` is
    the luck of the mean of all numbers, which are not independent: the errors of one query may be
    in all of them.
    """

    golden: Tensor
    dtype: torch.dtype
    allowed: Tensor
    luck: Tensor
    luck_of_mean: float
    row_error: Tensor
    row_along: Tensor


@dataclasses.dataclass(frozen=True)
class Gradients:
    """What a backward's results are judged by: name ("dq", ...) -> `Gradient`."""

    of: dict[str, Gradient]

    @classmethod
    def by_reference(
        cls,
        op: str,
        args: dict[str, Any],
        dout: Tensor,
        dlse: Tensor | None,
        output_mask: Sequence[bool] = (True,) * 5,
    ) -> "Gradients":
        """Run the references of `op` and of its backward at both precisions.

        args: the forward's arguments by name; dout, dlse: gradients of its results
        """
        forward, backward = getattr(reference, op), getattr(reference, f"{op}_backward")
        given = dict(args, dout=dout, dlse=dlse, output_mask=tuple(output_mask))
        for name in ("out_dtype", "batch_invariant"):  # the backward does not take these
            given.pop(name, None)
        taken = [forward(**args, precision=precision) for precision in (GOLDEN, BASELINE)]
        calls = [given | {"out": out, "softmax_lse": lse} for out, lse in taken]
        call: BackwardCall = getattr(BackwardCall, op)(**calls[1])
        observer = GradientObserver(call)
        golden = backward(**calls[0], precision=dataclasses.replace(GOLDEN, observe=observer))
        baseline = backward(**calls[1], precision=BASELINE)
        is_float32 = torch.finfo(call.forward.q.dtype).eps <= EPS_FLOAT32
        found = {}
        for name, wanted, exact, rounded in zip(
            GRADIENTS, call.wanted, golden, baseline, strict=True
        ):
            if not wanted:
                continue
            scale = observer.scales[name]
            golden_rows = exact if exact.dim() > 1 else exact[:, None]
            error = rounded.double().reshape(golden_rows.shape) - golden_rows
            allowed = error.abs()
            # a few sums of many errors: the baseline's may be small by chance
            if is_float32 or name == "dsinks":
                allowed = allowed.maximum(scale.off)
            found[name] = Gradient(
                golden_rows,
                rounded.dtype,
                allowed,
                scale.luck + scale.shared,
                scale.luck_of_mean(),
                scale.row_error.maximum(2.0 * error.norm(dim=-1)) + UNDERFLOW,
                scale.row_along.maximum(2.0 * (error * golden_rows).sum(-1).abs())
                + UNDERFLOW * golden_rows.norm(dim=-1),
            )
        return cls(found)


def assert_accurate_gradients(found: Sequence[Tensor], truth: Gradients) -> None:
    """Raise AssertionError unless dq, dk, dv, dbias and dsinks fulfil the accuracy rule."""
    for name, actual in zip(GRADIENTS, found, strict=True):
        if name not in truth.of:
            assert actual.shape == (0,), f"{name}: shape {tuple(actual.shape)}, not asked for"
            continue
        wanted = truth.of[name]
        assert actual.dtype == wanted.dtype, f"{name}: {actual.dtype}, not {wanted.dtype}"
        if actual.dim() == 1:
            actual = actual[:, None]
        try:
            assert_close_as_baseline(
                actual, wanted.golden, wanted.allowed, wanted.luck, 0.0, wanted.luck_of_mean
            )
            assert_rows(actual, wanted.golden, wanted.row_error, wanted.row_along)
            if name == "dq":
                # rows of dq alone have errors that are independent
                assert_rows_alike(actual, wanted.golden, wanted.allowed, wanted.luck)
        except AssertionError as error:
            raise AssertionError(f"{name}: {error}") from None
