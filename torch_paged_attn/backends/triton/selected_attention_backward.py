"""`selected_attention_backward` on GPUs, by the portable kernels."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.hopper.units import gradient_plan
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    GradientStrides,
    SelectedGradients,
)
from torch_paged_attn.backends.triton.portable.selected.parts import add_parts, leaves_parts
from torch_paged_attn.backends.triton.portable.selected.token_rows import TokenRows
from torch_paged_attn.backends.triton.portable.selected.unit_gradients import add_units
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops.selected_attention_backward import check


def selected_attention_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Arguments as in the op's schema."""
    check(*args, **kwargs)
    call = BackwardCall.selected_attention(*args, **kwargs)
    BACKEND.refuse_lacking(call)
    forward = selected.without_gaps(call.forward)
    results = call.new_results()
    if forward.total_q == 0 or forward.batch == 0:
        for x in results:
            x.zero_()
        return results
    dq, dk, dv, _, dsinks = results
    dout = call.dout if call.dout.stride(-1) == 1 else call.dout.contiguous()
    lse = call.softmax_lse.contiguous()
    rows = TokenRows.of(call, dout, lse)
    wants_q, wants_k, wants_v, _, wants_sinks = call.wanted
    target = target_of(forward.q.device)
    strides = GradientStrides(*dout.stride()[:2])
    gradients = SelectedGradients(
        dout=as_stored(dout, target)[0],
        lse=lse,
        d=rows.d,
        dq=as_stored(dq, target)[0],
        dk=dk,
        dv=dv,
    )
    if leaves_parts(call):
        rows.write_deltas()
        add_parts(call, forward, gradients, strides)
    else:
        wanted = {"dq": wants_q, "dk": wants_k, "dv": wants_v}
        unwanted = {name: None for name, is_wanted in wanted.items() if not is_wanted}
        has_hopper = gradient_plan.unsupported(forward, dout) is None
        on_hopper = gradient_plan.add_units if has_hopper else None
        add_units(forward, gradients._replace(**unwanted), strides, rows, on_hopper)
    if wants_sinks:
        assert forward.sinks is not None
        weight = (forward.sinks[:, None] - lse).exp().masked_fill(lse == float("-inf"), 0.0)
        dsinks.copy_(-(weight * rows.d).sum(1))
    return results
