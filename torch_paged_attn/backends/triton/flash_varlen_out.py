"""`flash_varlen_out` on GPUs: the kernels of `flash_varlen` write into the caller's tensor.

Kernels store a result without gaps, at a multiple of 16 bytes. Into any other tensor the result is
copied.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.flash_varlen import AttentionOp
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.contiguous import after_copies
from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.ops.flash_varlen_out import OP, check_out, refuse_overlap, span


class AttentionOutOp(AttentionOp):
    """`AttentionOp`, but that `out` precedes the other arguments."""

    def __init__(self) -> None:
        super().__init__("flash_varlen", check_out)
        self._name = OP

    def __call__(self, out: Tensor, *args: Any, **options: Any) -> Tensor:  # type: ignore[override]
        if args[self._hints] < 0 or args[self._hints + 1] < 0:
            check_out(AttentionCall.flash_varlen_out(out, *args, **options))
        key, plan, tensors = self._planned_by(args)
        return launch_cache.call(key, plan, (out, *tensors), options)

    def make_plan(self, longest: int, reach: int, *tensors: Tensor | None, **options: Any) -> Plan:
        """As `AttentionOp.plan`; the first of the tensors is `out`."""
        out, *inputs = tensors
        args, copied = self._planned_for(reach, tuple(inputs))
        call = AttentionCall.flash_varlen_out(out, *args, **options)  # type: ignore[arg-type]
        check_out(call)
        BACKEND.refuse_lacking(call)
        assert out is not None
        # the strides of an axis of size 1 may be anything
        new_out = Allocation.like(out)
        plain = out.as_strided(out.shape, new_out.strides)
        plan = self._plan_checked(dataclasses.replace(call, out=plain), longest)
        if not (out.is_contiguous() and (is_traced() or out.data_ptr() % 16 == 0)):
            plan = _by_copy(plan, new_out)
        return _apart(call, after_copies(plan, copied))


def _by_copy(plan: Plan, new_out: Allocation) -> Plan:
    """The plan for another tensor than `out`, which is then copied to `out`."""

    def run(tensors: tuple[Any, ...], addresses: Any) -> Any:
        *inputs, out = tensors
        made = new_out()
        if addresses is not None:
            addresses = [*addresses[:-1], made.data_ptr()]
        found = plan((*inputs, made), addresses)
        out.copy_(made)
        return found

    return run


def _apart(call: AttentionCall, plan: Plan) -> Plan:
    """A plan of calls that have `out` before the inputs and return the lse alone, of one that has
    it behind them. It first checks that `out` shares no memory with the inputs of the call at hand.
    """
    given = call.given_tensors()
    size = span(given.pop("out"))
    spans = [(i, length) for i, x in enumerate(given.values()) if (length := span(x))]
    names = list(given)

    def run(tensors: tuple[Any, ...], addresses: Any) -> Any:
        if addresses is not None:
            start, *addresses = addresses
            end = start + size
            for i, length in spans:
                if addresses[i] < end and start < addresses[i] + length:
                    refuse_overlap(names[i])
            addresses.append(start)
        return plan((*tensors[1:], tensors[0]), addresses)[1]

    return run


flash_varlen_out: Callable[..., Tensor] = AttentionOutOp()
