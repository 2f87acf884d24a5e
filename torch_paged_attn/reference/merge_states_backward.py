"""Plain PyTorch `merge_states_backward`: arguments as in `ops`, plus `precision`."""

from torch import Tensor

from torch_paged_attn.reference.attention import FLOAT32, Precision


def merge_states_backward(
    dout: Tensor,
    dlse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    precision: Precision = FLOAT32,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients by their formula; `precision=GOLDEN` is float64 throughout."""
    c = precision.compute
    results = []
    for part, lse in ((out_a, lse_a), (out_b, lse_b)):
        seen = lse.isfinite()
        weight = (lse.to(c) - softmax_lse.to(c)).exp().where(seen, 0.0)
        by_row = seen.mT[..., None]
        g, change = (x.to(c).where(by_row, 0.0) for x in (dout, part.to(c) - out.to(c)))
        dlse_part = (g * change).sum(-1).mT
        if dlse is not None:
            dlse_part = dlse_part + dlse.to(c).where(seen, 0.0)
        results += [weight.mT[..., None] * g, weight * dlse_part]
    if precision.round_out:
        inputs = out_a, lse_a, out_b, lse_b
        results = [x.to(y.dtype).contiguous() for x, y in zip(results, inputs, strict=True)]
    dout_a, dlse_a, dout_b, dlse_b = results
    return dout_a, dlse_a, dout_b, dlse_b
