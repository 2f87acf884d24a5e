"""`BackwardCall`: the arguments of `flash_varlen_backward` and the other backwards of attention.

They are arguments of the forward (those of the list in `attention_call.py` that have `in_backward`)
and the fields below: the forward's results, their gradients, and which gradients are wanted.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.argument import Argument, argument, listed
from torch_paged_attn.attention_call import AttentionCall, backward_arguments

Mask = tuple[bool, bool, bool, bool, bool]

# result of a backward -> the input whose gradient it is, in the order of `output_mask`
GRADIENTS = {"dq": "q", "dk": "k", "dv": "v", "dbias": "attn_bias", "dsinks": "sinks"}


@dataclasses.dataclass(slots=True, eq=False)
class BackwardCall:
    """One call of `flash_varlen_backward`, `blocksparse_backward` or
    `selected_attention_backward`.
    """

    forward: AttentionCall
    dout: Tensor = argument(
        shape="`(total_q, num_heads, head_dim_v)`",
        meaning="Gradient of `out`, of its dtype. Any strides, expanded too; rows of padding and"
        " rows that see no key may hold anything.",
    )
    dlse: Tensor | None = argument(
        shape="`(num_heads, total_q)` float32",
        meaning="Gradient of `softmax_lse`, any strides. None stands for zeros.",
    )
    out: Tensor = argument(
        shape="`(total_q, num_heads, head_dim_v)`",
        meaning="As the forward returned it. It and `softmax_lse` may be those of more keys than k"
        " and v hold: the results are then the share of these keys.",
    )
    softmax_lse: Tensor = argument(
        shape="`(num_heads, total_q)` float32", meaning="As the forward returned it."
    )
    output_mask: Mask = argument(
        (True,) * 5, meaning="Which of dq, dk, dv, dbias and dsinks are asked for."
    )

    @classmethod
    def flash_varlen(cls, *args: Any, **kwargs: Any) -> "BackwardCall":
        """From the arguments of the operator `flash_varlen_backward`."""
        return cls._of("flash_varlen", args, kwargs)

    @classmethod
    def blocksparse(cls, *args: Any, **kwargs: Any) -> "BackwardCall":
        """From the arguments of the operator `blocksparse_backward`."""
        return cls._of("blocksparse", args, kwargs)

    @classmethod
    def selected_attention(cls, *args: Any, **kwargs: Any) -> "BackwardCall":
        """From the arguments of the operator `selected_attention_backward`."""
        return cls._of("selected_attention", args, kwargs)

    @classmethod
    def _of(cls, forward: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "BackwardCall":
        names = [x.name for x in arguments(f"{forward}_backward")[: len(args)]]
        given = dict(zip(names, args, strict=True)) | kwargs
        own = {x.name: given.pop(x.name) for x in listed(cls) if x.name in given}
        return cls(getattr(AttentionCall, forward)(**given), **own)

    @property
    def op(self) -> str:
        """The operator's name."""
        return f"{self.forward.op}_backward"

    def named_forward(self) -> AttentionCall:
        """The forward call with the backward's op name, so that errors of its checks show that."""
        return dataclasses.replace(self.forward, op=self.op)

    @property
    def deterministic(self) -> bool:
        """Whether the same call has to give the same bits."""
        return self.forward.deterministic or torch.are_deterministic_algorithms_enabled()

    @property
    def wanted(self) -> Mask:
        """Which results are computed: those that `output_mask` asks for and whose input is given.
        A bool attn_bias counts as not given, because it has no gradient.
        """
        dq, dk, dv, dbias, dsinks = self.output_mask
        bias = self.forward.attn_bias
        dbias = dbias and bias is not None and bias.dtype != torch.bool
        return dq, dk, dv, dbias, dsinks and self.forward.sinks is not None

    def tensors(self) -> dict[str, Tensor | None]:
        """Every tensor argument by its name, None if it was not given."""
        own = {x.name: getattr(self, x.name) for x in listed(BackwardCall) if x.is_tensor}
        both = own | self.forward.tensors()
        return {name: both[name] for name in tensor_names(self.op)}

    def new_results(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Uninitialised, contiguous dq, dk, dv, dbias and dsinks, of the shapes and dtypes of q, k,
        v, attn_bias and sinks. A result that is not wanted is an empty tensor `(0,)` of q's dtype.
        """
        dq, dk, dv, dbias, dsinks = (
            self.forward.q.new_empty(0)
            if not wanted
            else like.new_empty(like.shape, dtype=like.dtype)
            for wanted, like in zip(self.wanted, self._inputs(), strict=True)
        )
        return dq, dk, dv, dbias, dsinks

    def _inputs(self) -> tuple[Any, ...]:
        return tuple(getattr(self.forward, name) for name in GRADIENTS.values())


@functools.cache
def arguments(op: str) -> tuple[Argument, ...]:
    """What the backward `op` takes, in the order of its schema."""
    forward = backward_arguments(op.removesuffix("_backward"))
    own = {x.name: x for x in listed(BackwardCall)}
    at = [x.name for x in forward].index("cu_seqlens_q")
    return (
        *(own["dout"], own["dlse"]),
        *forward[:at],
        *(own["out"], own["softmax_lse"]),
        *forward[at:],
        own["output_mask"],
    )


@functools.cache
def tensor_names(op: str) -> tuple[str, ...]:
    """The names of the tensor arguments, in the order of the schema."""
    return tuple(x.name for x in arguments(op) if x.is_tensor)
