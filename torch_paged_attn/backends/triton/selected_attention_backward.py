"""`selected_attention_backward` on GPUs: which kernels run a call."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.flash_varlen_backward import BackwardOp
from torch_paged_attn.backends.triton.hopper.units import gradient_plan
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import SelectedGradients
from torch_paged_attn.backends.triton.portable.selected.keys import SelectedPointers
from torch_paged_attn.backends.triton.portable.selected.parts import leaves_parts, plan_parts
from torch_paged_attn.backends.triton.portable.selected.token_rows import RowPointers
from torch_paged_attn.backends.triton.portable.selected.unit_gradients import UnitGradients
from torch_paged_attn.backends.triton.runtime.contiguous import with_whole_rows
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backward_call import BackwardCall, arguments, tensor_names
from torch_paged_attn.ops.selected_attention_backward import check

K, V = (
    [x.name for x in arguments("selected_attention_backward")].index(name) for name in ("k", "v")
)


def _plan(call: BackwardCall) -> Plan:
    forward, wanted = call.forward, call.wanted
    new_results = [Allocation.like(x) for x in call.new_results()]
    if forward.total_q == 0 or forward.batch == 0:
        return lambda tensors, addresses: tuple(new().zero_() for new in new_results)
    target, new_d = target_of(forward.q.device), Allocation.like(call.softmax_lse)
    if leaves_parts(call):
        add = plan_parts(call)
    else:
        has_hopper = gradient_plan.unsupported(forward, with_whole_rows(call.dout)) is None
        add = UnitGradients(call, gradient_plan.plan_units if has_hopper else None)
    names = [name for name, x in call.tensors().items() if x is not None]
    nothing = dict.fromkeys((*SelectedPointers._fields, *tensor_names(call.op)))

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, ...]:
        given: dict[str, Any] = nothing | dict(zip(names, tensors, strict=True))
        results = tuple(new() for new in new_results)
        dq, dk, dv, _, dsinks = (
            x if is_wanted else None for x, is_wanted in zip(results, wanted, strict=True)
        )
        rows = RowPointers(
            dout=as_stored(with_whole_rows(given["dout"]), target)[0],
            out=as_stored(with_whole_rows(given["out"]), target)[0],
            lse=given["softmax_lse"].contiguous(),
            dlse=given["dlse"],
            d=new_d(),
        )
        dq = None if dq is None else as_stored(dq, target)[0]
        gradients = SelectedGradients(dout=rows.dout, lse=rows.lse, d=rows.d, dq=dq, dk=dk, dv=dv)
        add(selected.pointers_to(given, target), rows, gradients)
        if dsinks is not None:
            lse, sinks = rows.lse, given["sinks"]
            weight = (sinks[:, None] - lse).exp().masked_fill(lse == float("-inf"), 0.0)
            dsinks.copy_(-(weight * rows.d).sum(1))
        return results

    return run


# values that are columns of the keys are read once; a plan knows no addresses
_of_one, _of_two = (
    BackwardOp("selected_attention", check, _plan, kind=kind) for kind in ("one", "two")
)


def selected_attention_backward(*args: Any, **options: Any) -> tuple[Tensor, ...]:
    """Arguments as in the op's schema."""
    is_one = args[K].data_ptr() == args[V].data_ptr()
    return (_of_one if is_one else _of_two)(*args, **options)
