"""`merge_states_backward` on Neuron: elementwise, as `merge_states`."""

import torch
from torch import Tensor


def merge_states_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Arguments as in `ops.merge_states`' backward; computed in float32."""
    dout_wide = dout.contiguous().float()
    merged = out.contiguous().float()
    shift = softmax_lse.masked_fill(softmax_lse == float("-inf"), 0.0)
    gradients: list[Tensor] = []
    for part, lse in ((out_a, lse_a), (out_b, lse_b)):
        weight = (lse - shift).exp().contiguous()
        # a part without weight may hold anything, and so may the gradient of an empty row
        has_weight = weight > 0.0
        factor = weight.mT[..., None]
        from_out = torch.where(factor > 0.0, factor * dout_wide, 0.0)
        along = (dout_wide * (part.contiguous().float() - merged)).sum(-1).mT
        if dlse is not None:
            along = along + dlse
        gradients += [
            from_out.to(part.dtype),
            torch.where(has_weight, weight * along, 0.0).contiguous(),
        ]
    return gradients[0], gradients[1], gradients[2], gradients[3]
