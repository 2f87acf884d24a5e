"""Contract of `paged_attn::merge_states`: attention over the union of disjoint key sets."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.ops import paths
from torch_paged_attn.ops._library import define
from torch_paged_attn.ops.accepted import operator_of
from torch_paged_attn.ops.checks import (
    FLOAT,
    check_devices,
    check_dim,
    check_dtype,
    check_shape,
    fail,
    names,
)
from torch_paged_attn.ops.kinds import call_operator
from torch_paged_attn.ops.paths import public

OP = "merge_states"


def check(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    """Raise for metadata that the contract forbids."""
    check_parts(OP, {"out_a": out_a, "out_b": out_b}, {"lse_a": lse_a, "lse_b": lse_b})


def check_parts(op: str, outs: dict[str, Tensor], lses: dict[str, Tensor]) -> None:
    """Raise for forbidden metadata of one or more parts, each tensor under its argument's name."""
    name, first = next(iter(outs.items()))
    check_dim(op, name, first, "(total_q, num_heads, head_dim_v)")
    check_dtype(op, name, first, FLOAT)
    for other, out in outs.items():
        check_dtype(op, other, out, (first.dtype,))
        check_shape(op, other, out, tuple(first.shape), f"{name}'s shape")
    for other, lse in lses.items():
        check_dtype(op, other, lse, (torch.float32,))
        check_shape(op, other, lse, (first.shape[1], first.shape[0]), "(num_heads, total_q)")
    check_devices(op, first.device, {**outs, **lses})


def check_values(*_args: Any, **_options: Any) -> None:
    """Every value is allowed."""


def fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Empty results of the op's shapes and dtypes."""
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)


class MergeDerivative:
    """The derivative of `merge_states`: its backward operator, which every device has."""

    def check(
        self, required: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Every call has a derivative."""

    def save(
        self, ctx: Any, args: tuple[Any, ...], options: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        ctx.save_for_backward(*args, *results)

    def backward(
        self, ctx: Any, needed: Sequence[bool], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        *parts, out, softmax_lse = ctx.saved_tensors
        dout, dlse = gradients
        dout = torch.zeros_like(out) if dout is None else dout
        dtype = parts[0].dtype  # the backward wants parts, out and dout of one dtype
        operator = torch.ops.paged_attn.merge_states_backward.default
        function = paths.profiled("merge_states_backward", operator)

        def of_two(*pair: Tensor) -> tuple[Tensor, ...]:
            return function(dout.to(dtype), dlse, *pair, out.to(dtype), softmax_lse)

        found = self.gradients(parts, of_two)
        return tuple(x if is_needed else None for x, is_needed in zip(found, needed, strict=True))

    def gradients(
        self, parts: list[Tensor], of_two: Callable[..., tuple[Tensor, ...]]
    ) -> Sequence[Tensor]:
        """The gradients of all arguments. `of_two` returns those of two parts."""
        return of_two(*parts)


_merge_states = operator_of(
    define(
        "merge_states(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b)"
        " -> (Tensor out, Tensor softmax_lse)",
        check=check,
        check_values=check_values,
        fake=fake,
        derivative=MergeDerivative(),
        autocast=True,
    )
)


def check_list(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> None:
    """Raise for metadata that the contract forbids."""
    if not outs:
        fail(OP, "outs", "no tensors", "at least one tensor")
    if len(lses) != len(outs):
        fail(OP, "lses", len(lses), f"{len(outs)} tensors, as many as outs")
    check_parts(
        OP,
        {f"outs[{i}]": out for i, out in enumerate(outs)},
        {f"lses[{i}]": lse for i, lse in enumerate(lses)},
    )
    if out_dtype is not None and out_dtype not in FLOAT:
        fail(OP, "out_dtype", names((out_dtype,)), names(FLOAT))


def fake_list(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Empty results of the op's shapes and dtypes."""
    out, lse = outs[0], lses[0]
    return out.new_empty(out.shape, dtype=out_dtype or out.dtype), lse.new_empty(lse.shape)


def composed_list(
    outs: Sequence[Tensor], lses: Sequence[Tensor], *, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """The op in PyTorch operators, for backends without a kernel. Parts are added in order."""
    # torch's operators may round differently for other strides
    outs, lses = [x.contiguous() for x in outs], [x.contiguous() for x in lses]
    stacked = torch.stack(lses)
    stacked = stacked.masked_fill(stacked == float("inf"), float("-inf"))
    lse = stacked.logsumexp(0)
    saw_none = lse == float("-inf")
    # not exp(part - lse): beside numbers of 1e8 the logarithm in `lse` is lost
    shares = stacked.masked_fill(saw_none, 0.0).softmax(0).masked_fill(saw_none, 0.0)
    merged = torch.zeros_like(outs[0], dtype=torch.float32)
    for out, share in zip(outs, shares, strict=True):
        weight = share.mT[..., None]
        # the rows of a part that has weight 0 may hold NaN
        merged = merged + torch.where(weight == 0.0, 0.0, weight * out.float())
    return merged.to(out_dtype or outs[0].dtype), lse


class ListDerivative(MergeDerivative):
    """The derivative of `merge_states.list`.

    The gradient of a part depends on this part and on the merged results only, so the backward of
    `merge_states` computes those of two parts at a time, whichever they are.
    """

    def gradients(
        self, parts: list[Tensor], of_two: Callable[..., tuple[Tensor, ...]]
    ) -> Sequence[Tensor]:
        number = len(parts) // 2
        outs, lses = parts[:number], parts[number:]
        douts: list[Tensor] = []
        dlses: list[Tensor] = []
        for i in range(0, number, 2):
            j = min(i + 1, number - 1)
            found = of_two(outs[i], lses[i], outs[j], lses[j])
            douts += found[:1] if i == j else found[::2]
            dlses += found[1:2] if i == j else found[1::2]
        return *douts, *dlses


_merge_states_list = operator_of(
    define(
        "merge_states.list(Tensor[] outs, Tensor[] lses, *, ScalarType? out_dtype=None)"
        " -> (Tensor out, Tensor softmax_lse)",
        check=check_list,
        check_values=check_values,
        fake=fake_list,
        derivative=ListDerivative(),
        autocast=True,
        composed=composed_list,
    )
)


@public
def merge_states(
    out_a: Tensor | Sequence[Tensor],
    lse_a: Tensor | Sequence[Tensor],
    out_b: Tensor | None = None,
    lse_b: Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Merge attention over disjoint key sets into attention over their union.

    `softmax_lse = log(sum(exp(lse)))` over the parts. `out` is the sum over the parts of their
    `out` times `exp(lse - softmax_lse)`, added up in their order in float32 and rounded once.
    Prefix plus new tokens, shared-prefix cascades and context parallelism are compositions of
    `flash_varlen` and this. A row of a part that saw no key (lse -inf, or +inf as FlashAttention-2
    gives it) has weight 0, whatever its `out` holds; if no part saw a key, the row's result is
    `(0, -inf)`. Give a sink to one part only.

    Args:
        out_a, out_b: `(total_q, num_heads, head_dim_v)` float32, bfloat16 or float16, any strides.
        lse_a, lse_b: `(num_heads, total_q)` float32, natural log, any strides.
        out_dtype: of the result: float32, bfloat16 or float16; that of the parts when omitted.

    To merge any number of parts, pass lists of such tensors as `out_a` and `lse_a`, one entry per
    part, and no `out_b` and `lse_b`. All parts have one shape and dtype. Parts in float32 with a
    16-bit `out_dtype` are rounded only once, at the end.

    Returns:
        `out`, of `out_a`'s shape, computed in float32, and `softmax_lse`, like `lse_a`; both
        contiguous.

    Raises:
        TypeError: an argument of the wrong type, such as a list for a tensor.
        ValueError: a shape, dtype or device outside the above, or no part at all.

    Source: FlashInfer (arXiv 2501.01005), section 2.2.
    """
    operator, options = _merge_states_list, {"out_dtype": out_dtype}
    args: tuple[Any, ...]
    if isinstance(out_a, tuple | list) and out_b is None and lse_b is None:
        if not out_a:  # torch's dispatcher needs a tensor to find the device
            check_list([], [])
        args = out_a, lse_a
    elif out_dtype is not None and out_b is not None and lse_b is not None:
        args = [out_a, out_b], [lse_a, lse_b]
    else:
        operator, args, options = _merge_states, (out_a, lse_a, out_b, lse_b), {}
    return call_operator(operator, args, options)
