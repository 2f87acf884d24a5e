"""Plain PyTorch `merge_states`."""

import torch
from torch import Tensor

from torch_paged_attn.reference.attention import FLOAT32, Precision


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor, precision: Precision = FLOAT32
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.merge_states`, plus `precision`."""
    lse = torch.logaddexp(lse_a.to(precision.compute), lse_b.to(precision.compute))
    shift = lse.masked_fill(lse == float("-inf"), 0.0)
    merged = torch.zeros(out_a.shape, dtype=precision.compute, device="cpu")
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        weight = (part - shift).exp().mT[..., None]
        real = out.to(precision.compute)
        real = real.abs() if precision.norm else real
        merged += torch.where(weight > 0.0, weight * real, 0.0)
    return (merged.to(out_a.dtype) if precision.round_out else merged), lse.to(
        torch.float32 if precision.round_out else precision.compute
    )
