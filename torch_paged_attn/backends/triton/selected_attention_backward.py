"""`selected_attention_backward` on GPUs, by the portable kernels."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    GradientStrides,
    SelectedGradients,
)
from torch_paged_attn.backends.triton.portable.selected.deltas import deltas_of
from torch_paged_attn.backends.triton.portable.selected.parts import add_parts, leaves_parts
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
    d = deltas_of(call, dout, lse)
    wants_q, wants_k, wants_v, _, wants_sinks = call.wanted
    if wants_sinks:
        assert forward.sinks is not None
        weight = (forward.sinks[:, None] - lse).exp().masked_fill(lse == float("-inf"), 0.0)
        dsinks.copy_(-(weight * d).sum(1))
    target = target_of(forward.q.device)
    if leaves_parts(call):
        stored = [as_stored(x, target)[0] for x in (dout, dq)]
        gradients = SelectedGradients(stored[0], lse, d, stored[1], dk, dv)
        add_parts(call, forward, gradients, GradientStrides(*dout.stride()[:2]))
        return results
    gradients = SelectedGradients(
        dout=as_stored(dout, target)[0],
        lse=lse,
        d=d,
        dq=as_stored(dq, target)[0] if wants_q else None,
        dk=dk if wants_k else None,
        dv=dv if wants_v else None,
    )
    add_units(forward, gradients, GradientStrides(*dout.stride()[:2]))
    return results
