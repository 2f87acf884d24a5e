"""The accuracy rule (`accuracy.py`) for the gradients of `merge_states`."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_paged_attn import reference
from torch_paged_attn.reference import GOLDEN
from torch_paged_attn.testing.accuracy import assert_close_as_baseline
from torch_paged_attn.testing.scales import EPS_FLOAT32


@dataclasses.dataclass(frozen=True)
class MergeGradients:
    """What the results of one backward are judged by, each for (out_a, lse_a, out_b, lse_b).

    golden: in float64, from float64 `out` and `softmax_lse`
    baseline: in float32, from the rounded `out` of the forward, rounded to the results' dtypes
    sizes: golden's sums with each term replaced by its magnitude
    """

    golden: tuple[Tensor, ...]
    baseline: tuple[Tensor, ...]
    sizes: tuple[Tensor, ...]

    @classmethod
    def by_reference(
        cls, parts: Sequence[Tensor], dout: Tensor, dlse: Tensor, out: Tensor, lse: Tensor
    ) -> "MergeGradients":
        """parts: (out_a, lse_a, out_b, lse_b); out, lse: the forward's results for them."""
        out_a, lse_a, out_b, lse_b = parts
        exact = reference.merge_states(out_a, lse_a, out_b, lse_b, precision=GOLDEN)
        backward = reference.merge_states_backward
        return cls(
            golden=backward(dout, dlse, out_a, lse_a, out_b, lse_b, *exact, precision=GOLDEN),
            baseline=backward(dout, dlse, out_a, lse_a, out_b, lse_b, out, lse),
            # the weights depend on lse only and are positive, so lse keeps its sign
            sizes=backward(
                *(dout.abs(), dlse.abs(), out_a.abs(), lse_a, out_b.abs(), lse_b, -out.abs(), lse),
                precision=GOLDEN,
            ),
        )


def assert_accurate_merge_gradients(found: Sequence[Tensor], truth: MergeGradients) -> None:
    """Raise AssertionError unless the gradients fulfil the accuracy rule."""
    of_16_bits = [x.dtype for x in truth.baseline if x.dtype.itemsize < 4]
    # the gradient of lse contains the difference of a part's `out` and the forward's rounded `out`
    saved = 0.4 * torch.finfo(of_16_bits[0]).eps if of_16_bits else 0.0
    for x, golden, baseline, size in zip(
        found, truth.golden, truth.baseline, truth.sizes, strict=True
    ):
        assert x.dtype == baseline.dtype, f"{x.dtype}, not {baseline.dtype}"
        luck = ((saved if x.dim() == 2 else 0.0) + 4.0 * EPS_FLOAT32) * size
        allowed = (baseline.double() - golden).abs()
        assert_close_as_baseline(x, golden, allowed, luck, slack=0.0)
