"""Gradients of `selected_attention` on Hopper for units of 128 keys; see `gradients.py`."""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.inverse_lists import InverseLists
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.common.unit_items import ROW_FIELDS
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.units.gradient_arguments import (
    UnitGradientOptions,
    UnitGradientPointers,
    UnitGradientScalars,
    UnitGradientSizes,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch

# keys of a unit, widths and heads of a group that the kernel has tiles for; rows of a tile
UNIT, WIDTHS, GROUPS, PASS = 128, (64, 128), (8, 16, 32, 64), 64
CONSUMERS, STAGES, MOST_PRODUCERS, REGISTERS = 2, 3, 4, 240


def unsupported(call: AttentionCall, dout: Tensor) -> str | None:
    """Why the gradients of a call cannot take this kernel; None if they can."""
    selection, q, k, v = call.lists, call.q, call.k, call.v
    if (reason := support.unsupported_device(q.device)) is not None:
        return reason
    # parts are float16, which would round as much as dS in float16 (`part_rows.py`)
    if not q.dtype == k.dtype == v.dtype == torch.bfloat16:
        return f"q is {q.dtype}, k {k.dtype} and v {v.dtype}"
    if selection.select_size != UNIT or call.group_size not in GROUPS:
        return f"units of {selection.select_size} keys for {call.group_size} heads"
    if call.head_dim not in WIDTHS or call.head_dim_v not in WIDTHS:
        return f"head_dim is {call.head_dim}, head_dim_v {call.head_dim_v}"
    if call.softcap or call.k_start is not None or call.q_latent is not None:
        return "it has no softcap, no k_start and no q_latent"
    if not support.LEAST_SCALE <= call.scale <= 1.0 / support.LEAST_SCALE:
        return f"softmax_scale is {call.softmax_scale}"
    if any(support.is_misaligned(x, x.dim() - 1) for x in (q, k, v, dout)) or 0 in k.shape:
        return "q, k, v or dout is not aligned to 16 bytes"
    return None


def options_of(call: AttentionCall, are_sums: bool) -> UnitGradientOptions:
    """What the kernel is compiled for."""
    tokens = PASS // call.group_size
    return UnitGradientOptions(
        BLOCK_N=UNIT,
        WIDTH=call.head_dim,
        WIDTH_V=call.head_dim_v,
        GROUP_SIZE=call.group_size,
        TOKENS=tokens,
        HAS_LEFT=support.is_bound(call.window_size_left),
        HAS_RIGHT=support.is_bound(call.window_right),
        ARE_SUMS=are_sums,
        STAGES=STAGES,
        CONSUMERS=CONSUMERS,
        PRODUCERS=min(MOST_PRODUCERS, tokens),
        REGISTERS=REGISTERS,
    )


def add_units(
    call: AttentionCall,
    dout: Tensor,
    statistics: Tensor,
    lists: InverseLists,
    gradients: Any,
    sizes: Any,
) -> None:
    """Write dk, dv and parts of dq of a run of tokens.

    statistics: `(total_q, num_kv_heads, ROW_FIELDS, group_size)` float32, of `token_rows.py`
    gradients: a `SelectedGradients`; sizes: a `UnitSizes`
    """
    from torch_paged_attn.backends.triton.hopper.common.tma import plain_rows, ragged_rows
    from torch_paged_attn.backends.triton.hopper.units.gradients import (
        _hopper_unit_gradients_kernel,
    )

    options = options_of(call, gradients.are_sums is not None)
    group, width, width_v = call.group_size, options.WIDTH, options.WIDTH_V
    given = sizes._asdict() | {"own_lists": int(call.lists.key_indices.shape[1] > 1)}
    Launch(
        _hopper_unit_gradients_kernel,
        (lists.bounds.shape[1], call.num_kv_heads),
        **{name: given[name] for name in UnitGradientSizes._fields},
        scalars=UnitGradientScalars(call.scale * LOG2E.value, call.scale),
        OPTIONS=options,
        num_warps=4,
    )(
        ragged_rows(call.q, 1, group, width).at(call.q.data_ptr()),
        ragged_rows(dout, 1, group, width_v).at(dout.data_ptr()),
        ragged_rows(call.k, UNIT, 1, width).at(call.k.data_ptr()),
        ragged_rows(call.v, UNIT, 1, width_v).at(call.v.data_ptr()),
        plain_rows(torch.float32, ROW_FIELDS.value * group).at(statistics.data_ptr()),
        UnitGradientPointers(
            bounds=lists.bounds,
            tokens=lists.tokens,
            units=lists.units,
            first_rows=lists.first_rows,
            lengths=lists.lengths,
            places=lists.places,
            parts=gradients.parts_q,
            part_scales=gradients.scale_q,
            dk=gradients.dk,
            dv=gradients.dv,
        ),
    )
