"""The backward of `selected_attention` for lists of single keys (`parts_kernels.py`)."""

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.dequant import as_stored, stored_format
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    GradientStrides,
    SelectedGradients,
)
from torch_paged_attn.backends.triton.portable.selected.part_rows import (
    part_dtype,
    scales_of,
    width_of,
)
from torch_paged_attn.backends.triton.portable.selected.parts_kernels import (
    Parts,
    PartSums,
    _add_parts_kernel,
    _selected_parts_kernel,
)
from torch_paged_attn.backends.triton.portable.selected.ranks import ranks_of
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, target_of
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
    options = selected.options_of(forward, target, config, False, by_key=True)
    # parts that several tiles of heads add to are float32
    is_whole = forward.group_size <= options.BLOCK_M
    dtype = part_dtype(forward, options.DTYPE) if is_whole else torch.float32
    is_scaled = dtype == torch.float16
    of_token = heads * entries * dtype.itemsize * (wants_k * width + wants_v * width_v)
    step = cdiv(forward.total_q, max(cdiv(forward.total_q * of_token, MOST_BYTES), 1))
    own_lists = int(selection.key_indices.shape[1] > 1)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=forward.q.device)

    total = heads * step * entries
    parts = Parts(
        k=new(total, width, dtype=dtype) if wants_k else None,
        v=new(total, width_v, dtype=dtype) if wants_v else None,
        scale_k=new(total, scales_of(width)) if wants_k and is_scaled else None,
        scale_v=new(total, scales_of(width_v)) if wants_v and is_scaled else None,
        ranks=None,
    )
    each_head = 0 if own_lists else step * entries
    blocks = wants_k * cdiv(width, width_of(width)) + wants_v * cdiv(width_v, width_of(width_v))
    taken = {
        "strides": selected.strides_of(forward),
        "more_strides": more_strides,
        "scalars": selected.scalars_of(forward),
        "OPTIONS": options,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }
    pointers, sizes = selected.pointers_of(forward, target), selected.sizes_of(forward)._asdict()
    given = gradients._replace(dq=gradients.dq if wants_q else None, dk=None, dv=None)
    results = [
        as_stored(x, target)[0] if is_wanted else None
        for x, is_wanted in ((gradients.dk, wants_k), (gradients.dv, wants_v))
    ]
    sums: list[Tensor | None] = [None, None]
    for first in range(0, forward.total_q, step):
        count = min(step, forward.total_q - first)
        ranks = ranks_of(forward, options, first, count)
        parts = parts._replace(ranks=ranks)
        Launch(
            _selected_parts_kernel,
            (count, heads),
            first_row=first,
            num_words=ranks.words.shape[-1],
            each_head=each_head,
            **sizes,
            **taken,
        )(pointers, given, parts)
        before, is_last = sums, first + count == forward.total_q
        if not is_last and first == 0:
            sums = [None if x is None else new(*x.shape) for x in results]
        Launch(
            _add_parts_kernel,
            (forward.k.shape[0], heads, blocks),
            own_lists=own_lists,
            each_head=each_head,
            scale=float(forward.scale),
            HEAD_DIM=width,
            HEAD_DIM_V=width_v,
            WIDTH=width_of(width),
            WIDTH_V=width_of(width_v),
            ENTRIES=AT_ONCE // width_of(max(width, width_v)),
            FORMAT=stored_format(forward.k.dtype, target) if is_last else "NATIVE",
            num_warps=4,
        )(parts, PartSums(*(results if is_last else sums), *before))
