"""The backward of `selected_attention` for lists of single keys (`parts_kernels.py`)."""

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.inverse_lists import InverseLists
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    GradientStrides,
    SelectedGradients,
)
from torch_paged_attn.backends.triton.portable.selected.parts_kernels import (
    Parts,
    _add_parts_kernel,
    _selected_parts_kernel,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.backward_call import BackwardCall

# bytes of parts: calls with more are done some tokens at a time
MOST_BYTES = 2**31
# numbers of parts that a program adds up at a time
AT_ONCE = 4096


def leaves_parts(call: BackwardCall) -> bool:
    """Whether a call takes these kernels."""
    forward, (_, wants_k, wants_v, *_) = call.forward, call.wanted
    selection = forward.lists
    has_entries = selection.key_indices.shape[2] > 0 and forward.k.shape[0] > 0
    return selection.select_size == 1 and (wants_k or wants_v) and has_entries


def add_parts(
    call: BackwardCall,
    forward: AttentionCall,
    gradients: SelectedGradients,
    more_strides: GradientStrides,
) -> None:
    """Write dq, and dk and dv as far as they are wanted. `gradients` has these as they are."""
    selection, target = forward.lists, target_of(forward.q.device)
    wants_q, wants_k, wants_v, *_ = call.wanted
    heads, entries = forward.num_kv_heads, selection.key_indices.shape[2]
    width, width_v = forward.head_dim, forward.head_dim_v
    config = selected.parts_config_of(forward, target)
    lists = InverseLists.of(forward)
    of_token = heads * entries * 4 * (wants_k * width + wants_v * width_v)
    step = cdiv(forward.total_q, max(cdiv(forward.total_q * of_token, MOST_BYTES), 1))

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=forward.q.device)

    parts = Parts(
        k=new(step, heads, entries, width) if wants_k else None,
        v=new(step, heads, entries, width_v) if wants_v else None,
        sum_k=_sum_of(gradients.dk) if wants_k else None,
        sum_v=_sum_of(gradients.dv) if wants_v else None,
        bounds=lists.bounds,
        places=lists.places,
    )
    taken = {
        "strides": selected.strides_of(forward),
        "more_strides": more_strides,
        "scalars": selected.scalars_of(forward),
        "OPTIONS": selected.options_of(forward, target, config, False),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    pointers, sizes = selected.pointers_of(forward, target), selected.sizes_of(forward)._asdict()
    given = gradients._replace(dq=gradients.dq if wants_q else None, dk=None, dv=None)
    for first in range(0, forward.total_q, step):
        count = min(step, forward.total_q - first)
        Launch(_selected_parts_kernel, (count, heads), first_row=first, **sizes, **taken)(
            pointers, given, parts
        )
        Launch(
            _add_parts_kernel,
            (forward.k.shape[0], heads),
            first_row=first,
            count=count,
            entries=entries,
            num_bounds=lists.bounds.shape[1],
            num_listed=lists.places.shape[1],
            own_lists=int(selection.key_indices.shape[1] > 1),
            scale=float(forward.scale),
            HEAD_DIM=width,
            HEAD_DIM_V=width_v,
            WIDTH=next_power_of_2(width),
            WIDTH_V=next_power_of_2(width_v),
            ENTRIES=max(AT_ONCE // next_power_of_2(max(width, width_v)), 1),
            num_warps=4,
        )(parts)
    for x, total in ((gradients.dk, parts.sum_k), (gradients.dv, parts.sum_v)):
        if total is not None and total is not x:
            x.copy_(total)


def _sum_of(gradient: Tensor) -> Tensor:
    """Memory for float32 sums, of zeros as the gradient is."""
    return gradient if gradient.dtype == torch.float32 else gradient.float()
