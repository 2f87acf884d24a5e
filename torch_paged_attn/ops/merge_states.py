"""Contract of `paged_attn::merge_states`: attention over the union of two disjoint key sets."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.ops import paths
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.checks import (
    FLOAT,
    check_devices,
    check_dim,
    check_dtype,
    check_shape,
)

OP = "merge_states"


def check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Raise for metadata the contract forbids."""
    check_parts(OP, out_a, lse_a, out_b, lse_b)


def check_parts(op: str, out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """The rules for two parts, for the backward too."""
    check_dim(op, "out_a", out_a, "(total_q, num_heads, head_dim_v)")
    check_dtype(op, "out_a", out_a, FLOAT)
    check_dtype(op, "out_b", out_b, (out_a.dtype,))
    check_shape(op, "out_b", out_b, tuple(out_a.shape), "out_a's shape")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        check_dtype(op, name, lse, (torch.float32,))
        check_shape(op, name, lse, (out_a.shape[1], out_a.shape[0]), "(num_heads, total_q)")
    check_devices(op, out_a.device, {"lse_a": lse_a, "out_b": out_b, "lse_b": lse_b})


def check_values(*_args: Tensor) -> None:
    """Every value is allowed."""


def fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """What the op returns, in shape and dtype."""
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


class MergeDerivative:
    """The derivative of `merge_states`: a call of its backward, which every device has."""

    def check(self, asking: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Every call has one."""

    def save(
        self, ctx: Any, args: tuple[Any, ...], options: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        ctx.save_for_backward(*args, *results)

    def backward(
        self, ctx: Any, asked: Sequence[bool], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        dout, dlse = gradients
        saved = ctx.saved_tensors
        if dout is None:
            dout = torch.zeros_like(saved[4])
        operator = torch.ops.paged_attn.merge_states_backward.default
        function = paths.profiled("merge_states_backward", operator)
        found = function(dout, dlse, *saved)
        return tuple(x if is_asked else None for x, is_asked in zip(found, asked, strict=True))


_merge_states = define(
    "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b)"
    " -> (Tensor out, Tensor softmax_lse)",
    check=check,
    check_values=check_values,
    fake=fake,
    derivative=MergeDerivative(),
)


def merge_states(
    out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor
) -> tuple[Tensor, Tensor]:
    """Merge attention over two disjoint key sets into attention over their union.

    `softmax_lse = logaddexp(lse_a, lse_b)` and `out` is the mean of `out_a` and `out_b` weighted by
    `exp(lse - softmax_lse)`. Prefix plus new tokens, shared-prefix cascades and context parallelism
    are compositions of `flash_varlen` and this. A part that saw no key (lse -inf) has no weight,
    whatever its `out` holds; two of them merge to `(0, -inf)`. Give a sink to one part only.

    Args:
        out_a, out_b: `(total_q, num_heads, head_dim_v)` float32, bfloat16 or float16, any strides.
        lse_a, lse_b: `(num_heads, total_q)` float32, natural log, any strides.

    Returns:
        `out`, like `out_a`, computed in float32, and `softmax_lse`, like `lse_a`; both contiguous.

    Raises:
        ValueError: a shape, dtype or device outside the above.

    Source: FlashInfer (arXiv 2501.01005), section 2.2.
    """
    return _merge_states(out_a, lse_a, out_b, lse_b)
