"""`merge_states` on Neuron: elementwise, so that the graph compiler fuses plain PyTorch."""

import torch
from torch import Tensor


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.merge_states`; computed in float32."""
    # the same bits whatever the strides
    out_a, lse_a, out_b, lse_b = (t.contiguous() for t in (out_a, lse_a, out_b, lse_b))
    lse = torch.logaddexp(lse_a, lse_b)
    shift = lse.masked_fill(lse == float("-inf"), 0.0)
    merged = torch.zeros(out_a.shape, dtype=torch.float32, device=out_a.device)
    for out, part in ((out_a, lse_a), (out_b, lse_b)):
        weight = (part - shift).exp().mT[..., None]
        # a part without weight may hold anything
        merged = merged + torch.where(weight > 0.0, weight * out.float(), 0.0)
    return merged.to(out_a.dtype), lse.contiguous()
