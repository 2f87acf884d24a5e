"""`selected_attention_backward` on GPUs, by the portable kernels."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.common.inverse_lists import InverseLists
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    GradientStrides,
    SelectedGradients,
    _selected_dkdv_kernel,
    _selected_dq_kernel,
)
from torch_paged_attn.backends.triton.portable.selected.parts import add_parts, leaves_parts
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
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
    for x in results:
        x.zero_()
    if forward.total_q == 0 or forward.batch == 0:
        return results
    dq, dk, dv, _, dsinks = results
    empty = call.softmax_lse == float("-inf")
    dout = call.dout if call.dout.stride(-1) == 1 else call.dout.contiguous()
    d = (dout.float() * call.out.float()).sum(-1).T
    if call.dlse is not None:
        d = d - call.dlse
    d = d.masked_fill(empty, 0.0).contiguous()
    wants_q, wants_k, wants_v, _, wants_sinks = call.wanted
    if wants_sinks:
        assert forward.sinks is not None
        weight = (forward.sinks[:, None] - call.softmax_lse).exp().masked_fill(empty, 0.0)
        dsinks.copy_(-(weight * d).sum(1))
    target = target_of(forward.q.device)
    if leaves_parts(call):
        stored = [as_stored(x, target)[0] for x in (dout, dq)]
        lse = call.softmax_lse.contiguous()
        gradients = SelectedGradients(stored[0], lse, d, stored[1], dk, dv)
        add_parts(call, forward, gradients, GradientStrides(*dout.stride()[:2]))
        return results
    config = selected.backward_config_of(forward, target)
    gradients = SelectedGradients(
        dout=as_stored(dout, target)[0],
        lse=call.softmax_lse.contiguous(),
        d=d,
        dq=as_stored(dq, target)[0],
        dk=as_stored(dk, target)[0] if wants_k else None,
        dv=as_stored(dv, target)[0] if wants_v else None,
    )
    options = selected.options_of(forward, target, config, False)
    taken = {
        "strides": selected.strides_of(forward),
        "more_strides": GradientStrides(*dout.stride()[:2]),
        "scalars": selected.scalars_of(forward),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    pointers, sizes = selected.pointers_of(forward, target), selected.sizes_of(forward)
    head_tiles = -(-forward.group_size // config.BLOCK_M)
    if wants_q:
        grid = forward.total_q, forward.num_kv_heads * head_tiles
        Launch(_selected_dq_kernel, grid, **sizes._asdict(), OPTIONS=options, **taken)(
            pointers, gradients
        )
    if (wants_k or wants_v) and forward.k.shape[0] > 0:
        lists = InverseLists.of(forward)
        *tensors, _, size = lists
        gradients = gradients._replace(
            **dict(zip(SelectedGradients._fields[6:], tensors, strict=True))
        )
        block_n = max(16, min(size, config.BLOCK_N))
        options = options._replace(SELECT_SIZE=size, BLOCK_N=block_n)
        sizes = sizes._replace(entries=lists.tokens.shape[1], max_pages=lists.bounds.shape[1])
        parts = lists.bounds.shape[1] - 1, forward.num_kv_heads, -(-size // block_n)
        Launch(_selected_dkdv_kernel, parts, **sizes._asdict(), OPTIONS=options, **taken)(
            pointers, gradients
        )
    return results
