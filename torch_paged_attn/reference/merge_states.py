"""Plain PyTorch `merge_states`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.reference.attention import FLOAT32, Precision, Sums


def merge_states(
    out_a: Tensor | Sequence[Tensor],
    lse_a: Tensor | Sequence[Tensor],
    out_b: Tensor | None = None,
    lse_b: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    precision: Precision = FLOAT32,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.merge_states`, plus `precision`."""
    outs = (out_a, out_b) if isinstance(out_a, Tensor) else out_a
    lses = (lse_a, lse_b) if isinstance(lse_a, Tensor) else lse_a
    return _merge(outs, lses, out_dtype, precision)


def _merge(
    outs: Sequence[Any], lses: Sequence[Any], out_dtype: torch.dtype | None, precision: Precision
) -> tuple[Tensor, Tensor]:
    like = outs[0]
    # FlashAttention-2 gives +inf to a row that saw no key
    lses = [x.masked_fill(x == float("inf"), float("-inf")) for x in lses]
    stacked = torch.stack([x.to(precision.compute) for x in lses])
    lse = stacked.logsumexp(0)
    saw_none = lse == float("-inf")
    # not exp(part - lse): beside numbers of 1e17 the logarithm in `lse` is lost
    shares = stacked.masked_fill(saw_none, 0.0).softmax(0).masked_fill(saw_none, 0.0)
    merged = torch.zeros(like.shape, dtype=precision.compute, device=like.device)
    weights, values = [], []
    for out, weight in zip(outs, shares, strict=True):
        seen = (weight != 0.0).mT[..., None]  # of NaN, too
        value = out.to(precision.compute).where(seen, 0.0)
        merged += torch.where(seen, weight.mT[..., None] * value, 0.0)
        weights.append(weight)
        values.append(value.transpose(0, 1))
    if precision.observe is not None:
        softmax, parts = torch.stack(weights, -1), torch.stack(values, -2)
        logits = torch.stack(list(lses), -1).abs().masked_fill(softmax == 0.0, 0.0)
        rows = slice(0, like.shape[0])
        precision.observe(Sums(rows, softmax, softmax, parts, logits, torch.float32))
    if not precision.round_out:
        return merged, lse
    return merged.to(out_dtype or like.dtype), lse.float()
