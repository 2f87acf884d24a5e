"""The backward of `selected_attention` for lists of units of keys (`backward_kernels.py`)."""

import dataclasses
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.dequant import as_stored, stored_format
from torch_paged_attn.backends.triton.common.inverse_lists import InverseLists
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    GradientStrides,
    SelectedGradients,
    UnitSizes,
    _add_query_parts_kernel,
    _selected_dkdv_kernel,
    _selected_dq_kernel,
)
from torch_paged_attn.backends.triton.portable.selected.part_rows import part_dtype, scales_of
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, next_power_of_2, target_of

# bytes of parts of dq: calls with more are done some tokens at a time
MOST_BYTES = 2**31
# numbers of a part that a program adds up at a time
AT_ONCE = 2048


def add_units(
    call: AttentionCall, gradients: SelectedGradients, more_strides: GradientStrides
) -> None:
    """Write dq, dk and dv, as far as `gradients` has them; dk and dv as they are."""
    target = target_of(call.q.device)
    has_keys = call.k.shape[0] > 0 and (gradients.dk is not None or gradients.dv is not None)
    leaves_parts = (
        has_keys and gradients.dq is not None and selected.leaves_query_parts(call, target)
    )
    if gradients.dq is not None and not leaves_parts:
        _write_dq(call, gradients, more_strides)
    for x in (gradients.dk, gradients.dv):
        if x is not None:
            x.zero_()  # the gradients of units that no list names
    if has_keys:
        _visit_units(call, gradients, more_strides, leaves_parts)


def _launched(call: AttentionCall, config: selected.SelectedConfig) -> dict[str, Any]:
    """What all launches take."""
    return {
        "strides": selected.strides_of(call),
        "scalars": selected.scalars_of(call),
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _write_dq(
    call: AttentionCall, gradients: SelectedGradients, more_strides: GradientStrides
) -> None:
    """dq, token by token."""
    target = target_of(call.q.device)
    config = selected.backward_config_of(call, target)
    Launch(
        _selected_dq_kernel,
        (call.total_q, call.num_kv_heads * cdiv(call.group_size, config.BLOCK_M)),
        **selected.sizes_of(call)._asdict(),
        more_strides=more_strides,
        OPTIONS=selected.options_of(call, target, config, False),
        **_launched(call, config),
    )(selected.pointers_of(call, target), gradients._replace(dk=None, dv=None))


def _visit_units(
    call: AttentionCall,
    gradients: SelectedGradients,
    more_strides: GradientStrides,
    leaves_parts: bool,
) -> None:
    """dk and dv, added to what is there, and dq by its parts if the units leave these."""
    selection, target = call.lists, target_of(call.q.device)
    config = selected.unit_config_of(call, target)
    options = selected.options_of(call, target, config, False, by_key=True)
    # a row of a part has one scale, if it is in one chunk
    dtype = torch.float32 if options.K_HIGH else part_dtype(call, options.DTYPE)
    entries, heads = selection.key_indices.shape[2], call.num_kv_heads
    cuts = cdiv(selection.select_size, config.BLOCK_N)
    of_token = call.num_heads * entries * cuts * call.head_dim * dtype.itemsize
    runs = cdiv(call.total_q * of_token, MOST_BYTES) if leaves_parts else 1
    step = cdiv(call.total_q, max(runs, 1))
    lists = InverseLists.of(call, step)
    size, runs = lists.select_size, lists.bounds.shape[2] - 1
    config = dataclasses.replace(config, BLOCK_N=max(16, min(size, config.BLOCK_N)))
    options = options._replace(SELECT_SIZE=size, BLOCK_N=config.BLOCK_N)
    cuts = cdiv(size, config.BLOCK_N)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=call.q.device)

    parts = call.num_heads * step * entries * cuts
    is_scaled = leaves_parts and dtype == torch.float16
    inverse = {name: x for name, x in lists._asdict().items() if name in gradients._fields}
    results = [gradients.dk, gradients.dv]
    sums = results
    if runs > 1:
        sums = [None if x is None else x.float() for x in results]
    given = gradients._replace(
        **inverse,
        dq=None,
        dk=_stored(sums[0], target),
        dv=_stored(sums[1], target),
        parts_q=new(parts, call.head_dim, dtype=dtype) if leaves_parts else None,
        scale_q=new(parts, scales_of(call.head_dim)) if is_scaled else None,
        are_sums=lists.bounds if runs > 1 else None,
    )
    listed, units = lists.tokens.shape[1], lists.bounds.shape[1]
    for run in range(runs):
        first = run * step
        sizes = UnitSizes(
            call.total_q, call.k.shape[0], listed, units, runs, run, first * entries, step * entries
        )
        Launch(
            _selected_dkdv_kernel,
            (units, heads, cuts),
            **sizes._asdict(),
            more_strides=more_strides,
            OPTIONS=options,
            **_launched(call, config),
        )(selected.pointers_of(call, target), given)
        if leaves_parts:
            _add_query_parts(call, given._replace(dq=gradients.dq), lists, first, step, cuts)
    for x, total in zip(results, sums, strict=True):
        if x is not None and total is not x:
            x.copy_(total)


def _add_query_parts(
    call: AttentionCall,
    gradients: SelectedGradients,
    lists: InverseLists,
    first: int,
    step: int,
    cuts: int,
) -> None:
    """dq of `step` tokens from query row `first` on, as far as there are some."""
    width = next_power_of_2(call.head_dim)
    rows = min(next_power_of_2(call.group_size), max(AT_ONCE // width, 1))
    Launch(
        _add_query_parts_kernel,
        (min(step, call.total_q - first), call.num_kv_heads, cdiv(call.group_size, rows)),
        first_row=first,
        step=step,
        entries=call.lists.key_indices.shape[2],
        listed=lists.tokens.shape[1],
        own_lists=int(call.lists.key_indices.shape[1] > 1),
        scale=float(call.scale),
        GROUP_SIZE=call.group_size,
        HEAD_DIM=call.head_dim,
        ROWS=rows,
        WIDTH=width,
        CUTS=cuts,
        FORMAT=stored_format(call.q.dtype, target_of(call.q.device)),
        num_warps=4,
    )(gradients, lists.counts)


def _stored(x: Tensor | None, target: Target) -> Tensor | None:
    return None if x is None else as_stored(x, target)[0]
