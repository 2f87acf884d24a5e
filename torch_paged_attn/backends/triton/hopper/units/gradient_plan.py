"""Gradients of `selected_attention` on Hopper for units of 128 keys; see `gradients.py`."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.common.unit_items import ROW_FIELDS
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.units.gradient_arguments import (
    UnitGradientOptions,
    UnitGradientPointers,
    UnitGradientScalars,
    UnitGradientSizes,
)
from torch_paged_attn.backends.triton.runtime.contiguous import with_whole_rows
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backward_call import BackwardCall

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


def plan_units(call: BackwardCall, sizes: list[Any]) -> Callable[[int, Any, Any, Any], None]:
    """What writes dk, dv and parts of dq of a run of tokens, of calls like this one. It takes the
    number of a run, the call's `SelectedPointers`, the statistics of `token_rows.py` and
    `SelectedGradients`. sizes: a `UnitSizes` for each run."""
    from torch_paged_attn.backends.triton.hopper.common.tma import plain_rows, ragged_rows
    from torch_paged_attn.backends.triton.hopper.units.gradients import (
        _hopper_unit_gradients_kernel,
    )

    forward = call.forward
    options = options_of(forward, len(sizes) > 1)
    group, width, width_v = forward.group_size, options.WIDTH, options.WIDTH_V
    own_lists = {"own_lists": int(forward.lists.key_indices.shape[1] > 1)}
    given_sizes = [x._asdict() | own_lists for x in sizes]
    numbers = [{name: x[name] for name in UnitGradientSizes._fields} for x in given_sizes]
    first = Launch(
        _hopper_unit_gradients_kernel,
        (sizes[0].units, forward.num_kv_heads),
        **numbers[0],
        scalars=UnitGradientScalars(forward.scale * LOG2E.value, forward.scale),
        OPTIONS=options,
        num_warps=4,
    )
    launches = [first.resized(first.grid, **x) for x in numbers]
    q_boxes = ragged_rows(forward.q, 1, group, width)
    dout_boxes = ragged_rows(with_whole_rows(call.dout), 1, group, width_v)
    k_boxes = ragged_rows(forward.k, UNIT, 1, width)
    v_boxes = ragged_rows(forward.v, UNIT, 1, width_v)
    statistics_boxes = plain_rows(torch.float32, ROW_FIELDS.value * group)

    def add(run: int, given: Any, statistics: Any, gradients: Any) -> None:
        launches[run](
            q_boxes.at(given.q.data_ptr()),
            dout_boxes.at(gradients.dout.data_ptr()),
            k_boxes.at(given.k.data_ptr()),
            v_boxes.at(given.v.data_ptr()),
            statistics_boxes.at(statistics.data_ptr()),
            UnitGradientPointers(
                bounds=gradients.bounds,
                tokens=gradients.tokens,
                places=gradients.places,
                first_rows=gradients.first_rows,
                first_units=gradients.first_units,
                lengths=gradients.lengths,
                parts=gradients.parts_q,
                part_scales=gradients.scale_q,
                dk=gradients.dk,
                dv=gradients.dv,
            ),
        )

    return add
