"""Plain PyTorch `merge_states`."""

import torch
from torch import Tensor

from torch_paged_attn.reference.attention import FLOAT32, Precision, Sums


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, precision: Precision = FLOAT32
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.merge_states`, plus `precision`."""
    lse = torch.logaddexp(lse_a.to(precision.compute), lse_b.to(precision.compute))
    shift = lse.masked_fill(lse == float("-inf"), 0.0)
    merged = torch.zeros(out_a.shape, dtype=precision.compute, device="cpu")
    weights, values = [], []
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        weight = (part - shift).exp()
        seen = (weight > 0.0).mT[..., None]
        value = out.to(precision.compute).where(seen, 0.0)
        merged += torch.where(seen, weight.mT[..., None] * value, 0.0)
        weights.append(weight)
        values.append(value.transpose(0, 1))
    if precision.observe is not None:
        softmax, parts = torch.stack(weights, -1), torch.stack(values, -2)
        logits = torch.stack([lse_a, lse_b], -1).abs().masked_fill(softmax == 0.0, 0.0)
        rows = slice(0, out_a.shape[0])
        precision.observe(Sums(rows, softmax, softmax, parts, logits, torch.float32))
    return (merged.to(out_a.dtype) if precision.round_out else merged), lse.to(
        torch.float32 if precision.round_out else precision.compute
    )
