"""Contract of `paged_attn::merge_states_backward`: the gradients of `merge_states`' inputs."""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.ops._gradients import OnceDifferentiable
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.checks import check_devices, check_dtype, check_shape
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.merge_states import check_parts
from torch_paged_attn.ops.paths import public

OP = "merge_states_backward"


def check(
    dout: Tensor,
    dlse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
) -> None:
    """Raise for metadata that the contract forbids."""
    check_parts(OP, {"out_a": out_a, "out_b": out_b}, {"lse_a": lse_a, "lse_b": lse_b})
    for name, tensor in (("dout", dout), ("out", out)):
        check_dtype(OP, name, tensor, (out_a.dtype,))
        check_shape(OP, name, tensor, tuple(out_a.shape), "out_a's shape")
    lses = {"softmax_lse": softmax_lse} | ({} if dlse is None else {"dlse": dlse})
    for name, tensor in lses.items():
        check_dtype(OP, name, tensor, (torch.float32,))
        check_shape(OP, name, tensor, tuple(lse_a.shape), "lse_a's shape")
    given = {"dout": dout, "dlse": dlse, "out": out, "softmax_lse": softmax_lse}
    check_devices(OP, out_a.device, given)


def check_values(*_args: Any) -> None:
    """Every value is allowed."""


def fake(dout: Tensor, dlse: Tensor | None, *parts: Tensor) -> tuple[Tensor, ...]:
    """Empty results of the op's shapes and dtypes."""
    return tuple(part.new_empty(part.shape) for part in parts[:4])


def composed(
    dout: Tensor,
    dlse: Tensor | None,
    out_a: Tensor,
    lse_a: Tensor,
    out_b: Tensor,
    lse_b: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
) -> tuple[Tensor, ...]:
    """The op in PyTorch operators, for backends without a kernel."""
    gradients = []
    for part, lse in ((out_a, lse_a), (out_b, lse_b)):
        seen = lse.isfinite()
        weight = (lse - softmax_lse).exp()
        dlse_part = (dout.float() * (part.float() - out.float())).sum(-1).mT
        if dlse is not None:
            dlse_part = dlse_part + dlse
        # a row that saw no key has gradient 0, whatever the part and dout hold there
        dout_part = torch.where(seen.mT[..., None], weight.mT[..., None] * dout.float(), 0.0)
        gradients.append(dout_part.to(part.dtype).contiguous())
        gradients.append(torch.where(seen, weight * dlse_part, 0.0).contiguous())
    return tuple(gradients)


_merge_states_backward = operator_of(
    define(
        f"{OP}(Tensor dout, Tensor? dlse, Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b,"
        " Tensor out, Tensor softmax_lse)"
        " -> (Tensor dout_a, Tensor dlse_a, Tensor dout_b, Tensor dlse_b)",
        check=check,
        check_values=check_values,
        fake=fake,
        derivative=OnceDifferentiable(OP),
        composed=composed,
    )
)


@public
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
    """The gradients of `merge_states`' inputs, from the gradients of its results.

    For each part, with `w = exp(lse_part - softmax_lse)`, computed in float32:

        dout_part = w * dout
        dlse_part = w * (dout . (out_part - out) + dlse)

    Both are 0 where the part saw no key (lse -inf or +inf), whatever its `out` and the row of
    `dout` hold.

    Args:
        dout: `(total_q, num_heads, head_dim_v)`, of out_a's dtype; gradient of `out`, any strides.
        dlse: `(num_heads, total_q)` float32; gradient of `softmax_lse`, None stands for zeros.
        out_a, lse_a, out_b, lse_b: the inputs of `merge_states`.
        out, softmax_lse: the results of `merge_states`.

    Returns:
        dout_a, dlse_a, dout_b, dlse_b: like the inputs, contiguous.

    Raises:
        TypeError: an argument of the wrong type, such as a list for a tensor.
        ValueError: a shape, dtype or device outside the above.
        NotImplementedError: autograd differentiates the result; there is no double backward.
    """
    args = dout, dlse, out_a, lse_a, out_b, lse_b, out, softmax_lse
    return call_operator(_merge_states_backward, args, {})
