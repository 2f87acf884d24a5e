"""The backward of `selected_attention` for lists of units of keys (`backward_kernels.py`)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.common.inverse_lists import InverseLists
from torch_paged_attn.backends.triton.common.unit_items import ROW_FIELDS
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    GradientStrides,
    SelectedGradients,
    UnitSizes,
    _selected_dkdv_kernel,
    _selected_dq_kernel,
)
from torch_paged_attn.backends.triton.portable.selected.part_rows import part_dtype, scales_of
from torch_paged_attn.backends.triton.portable.selected.token_rows import (
    DqParts,
    TokenRows,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, target_of

# bytes of parts of dq: calls with more are done some tokens at a time
MOST_BYTES = 2**31


def add_units(
    call: AttentionCall,
    gradients: SelectedGradients,
    more_strides: GradientStrides,
    rows: TokenRows,
    on_hopper: Callable[..., None] | None = None,
) -> None:
    """Write D, and dq, dk and dv, as far as `gradients` has them; these as they are. on_hopper: the
    kernel that visits units in place of the portable one, if it has the call."""
    target = target_of(call.q.device)
    has_keys = call.k.shape[0] > 0 and (gradients.dk is not None or gradients.dv is not None)
    leaves_parts = (
        has_keys and gradients.dq is not None and selected.leaves_query_parts(call, target)
    )
    if not leaves_parts:
        rows.write_deltas()
        if gradients.dq is not None:
            _write_dq(call, gradients, more_strides)
    for x in (gradients.dk, gradients.dv):
        if x is not None:
            x.zero_()  # the gradients of units that no list names
    if has_keys:
        _visit_units(call, gradients, more_strides, rows, leaves_parts, on_hopper)


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
    rows: TokenRows,
    leaves_parts: bool,
    on_hopper: Callable[..., None] | None,
) -> None:
    """dk and dv, added to what is there, and dq by its parts if the units leave these."""
    selection, target = call.lists, target_of(call.q.device)
    config = selected.unit_config_of(call, target)
    options = selected.options_of(call, target, config, False, by_key=True)
    # a row of a part has one scale, if it is in one chunk
    dtype = torch.float32 if options.K_HIGH else part_dtype(call, options.DTYPE)
    # a kernel that writes dk and dv, and parts in float16
    if not leaves_parts or gradients.dk is None or gradients.dv is None:
        on_hopper = None
    if on_hopper is not None:
        dtype = torch.float16
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

    statistics: tuple[Tensor | None, ...] = None, None, None
    if leaves_parts:
        assert gradients.dq is not None
        blocks = 2 if on_hopper else scales_of(call.head_dim)
        parts = call.num_heads * step * entries * cuts
        scales = new(parts, blocks) if dtype == torch.float16 else None
        of_dq = DqParts(new(parts, call.head_dim, dtype=dtype), scales, lists.counts, gradients.dq)
        rows = dataclasses.replace(
            rows, parts=of_dq, blocks=blocks, cuts=cuts, step=step, is_by_lane=on_hopper is not None
        )
        if on_hopper is not None:
            fields = new(call.total_q, heads, ROW_FIELDS.value, call.group_size)
            statistics = fields, lists.lows, lists.highs
        rows.write_deltas(*statistics)
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
        parts_q=of_dq.rows if leaves_parts else None,
        scale_q=of_dq.scales if leaves_parts else None,
        are_sums=lists.bounds if runs > 1 else None,
    )
    listed, units = lists.tokens.shape[1], lists.bounds.shape[1]
    for run in range(runs):
        first = run * step
        sizes = UnitSizes(
            call.total_q, call.k.shape[0], listed, units, runs, run, first * entries, step * entries
        )
        if on_hopper is not None:
            on_hopper(call, rows.dout, statistics[0], lists, given, sizes)
        else:
            Launch(
                _selected_dkdv_kernel,
                (units, heads, cuts),
                **sizes._asdict(),
                more_strides=more_strides,
                OPTIONS=options,
                **_launched(call, config),
            )(selected.pointers_of(call, target), given)
        if leaves_parts:
            rows.add_parts(first, statistics)
    for x, total in zip(results, sums, strict=True):
        if x is not None and total is not x:
            x.copy_(total)


def _stored(x: Tensor | None, target: Target) -> Tensor | None:
    return None if x is None else as_stored(x, target)[0]
