"""The backward of `selected_attention` for lists of single keys (`parts_kernels.py`)."""

from collections.abc import Callable

import torch
from torch import Tensor

from torch_paged_attn.backends.triton.common.dequant import as_stored, stored_format
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import SelectedGradients
from torch_paged_attn.backends.triton.portable.selected.keys import SelectedPointers
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
from torch_paged_attn.backends.triton.portable.selected.ranks import num_words, plan_ranks
from torch_paged_attn.backends.triton.portable.selected.token_rows import RowPointers, TokenRows
from torch_paged_attn.backends.triton.portable.selected.unit_gradients import launch_options
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
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


def plan_parts(
    call: BackwardCall,
) -> Callable[[SelectedPointers, RowPointers, SelectedGradients], None]:
    """What writes D, and dq, dk and dv as far as they are wanted, of calls like this one."""
    forward, (_, wants_k, wants_v, *_) = call.forward, call.wanted
    selection, target, device = forward.lists, target_of(forward.q.device), forward.q.device
    heads, entries = forward.num_kv_heads, selection.key_indices.shape[2]
    width, width_v = forward.head_dim, forward.head_dim_v
    config = selected.parts_config_of(forward, target)
    options = selected.options_of(forward, target, config, False, by_key=True)
    # parts that several tiles of heads add to are float32
    is_whole = forward.group_size <= options.BLOCK_M
    dtype = part_dtype(forward, options.DTYPE) if is_whole else torch.float32
    of_token = heads * entries * dtype.itemsize * (wants_k * width + wants_v * width_v)
    step = cdiv(forward.total_q, max(cdiv(forward.total_q * of_token, MOST_BYTES), 1))
    runs = [
        (first, min(step, forward.total_q - first)) for first in range(0, forward.total_q, step)
    ]
    own_lists = int(selection.key_indices.shape[1] > 1)
    each_head = 0 if own_lists else step * entries
    blocks = wants_k * cdiv(width, width_of(width)) + wants_v * cdiv(width_v, width_of(width_v))
    rows = TokenRows(call)
    leave = Launch(
        _selected_parts_kernel,
        (step, heads),
        first_row=0,
        num_words=num_words(step),
        each_head=each_head,
        **selected.sizes_of(forward)._asdict(),
        **launch_options(call, config, options),
    )
    leaves = [
        leave.resized((count, heads), first_row=first, num_words=num_words(count))
        for first, count in runs
    ]
    ranks = [plan_ranks(forward, options, first, count) for first, count in runs]

    stored = stored_format(forward.k.dtype, target)
    # one for each run: the first has no sums before, and the last rounds them
    adds = [
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
            FORMAT=stored if run + 1 == len(runs) else "NATIVE",
            num_warps=4,
        )
        for run in range(len(runs))
    ]
    total, is_scaled = heads * step * entries, dtype == torch.float16

    def new(
        is_there: bool, *shape: int, of: torch.dtype = torch.float32
    ) -> Callable[[], Tensor | None]:
        return Allocation(shape, of, device) if is_there else lambda: None

    memory = (
        new(wants_k, total, width, of=dtype),
        new(wants_v, total, width_v, of=dtype),
        new(wants_k and is_scaled, total, scales_of(width)),
        new(wants_v and is_scaled, total, scales_of(width_v)),
    )
    of_keys = forward.k.shape[0], heads
    new_sums = new(wants_k, *of_keys, width), new(wants_v, *of_keys, width_v)

    def add(given: SelectedPointers, pointers: RowPointers, gradients: SelectedGradients) -> None:
        rows.before(pointers)
        results = [
            x if x is None else as_stored(x, target)[0] for x in (gradients.dk, gradients.dv)
        ]
        read = gradients._replace(dk=None, dv=None)
        made = [make() for make in memory]
        sums: list[Tensor | None] = [None, None]
        for run, leave in enumerate(leaves):
            parts = Parts._make((*made, ranks[run](given)))
            leave(given, read, parts)
            before, is_last = sums, run + 1 == len(leaves)
            if not is_last and run == 0:
                sums = [make() for make in new_sums]
            adds[run](parts, PartSums(*(results if is_last else sums), *before))

    return add
