"""The backward of `selected_attention` for lists of units of keys (`backward_kernels.py`)."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.common.inverse_lists import ListShape
from torch_paged_attn.backends.triton.common.unit_items import ROW_FIELDS
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    GradientStrides,
    SelectedGradients,
    UnitSizes,
    _selected_dkdv_kernel,
    _selected_dq_kernel,
)
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedOptions,
    SelectedPointers,
)
from torch_paged_attn.backends.triton.portable.selected.part_rows import part_dtype, scales_of
from torch_paged_attn.backends.triton.portable.selected.token_rows import (
    DqParts,
    RowPointers,
    TokenRows,
)
from torch_paged_attn.backends.triton.runtime.contiguous import with_whole_rows
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backward_call import BackwardCall

# bytes of parts of dq: calls with more are done some tokens at a time
MOST_BYTES = 2**31

# writes dk, dv and parts of dq; takes the number of a run of tokens, the call's tensors, statistics
# of rows if there are any, and what is written
AddUnits = Callable[[int, SelectedPointers, Tensor | None, SelectedGradients], None]
# of calls like one, whose runs of tokens have these sizes
PlanUnits = Callable[[BackwardCall, list[UnitSizes]], AddUnits]


class UnitGradients:
    """The launches of calls like one, with packed keys. plan_hopper: of the kernel that visits
    units in place of the portable one, if it has the call."""

    def __init__(self, call: BackwardCall, plan_hopper: PlanUnits | None = None) -> None:
        forward, (wants_q, wants_k, wants_v, *_) = call.forward, call.wanted
        self._target = target = target_of(forward.q.device)
        has_keys = forward.k.shape[0] > 0 and (wants_k or wants_v)
        leaves_parts = has_keys and wants_q and selected.leaves_query_parts(forward, target)
        self._write_dq = _plan_dq(call) if wants_q and not leaves_parts else None
        self._lists: ListShape | None = None
        if not has_keys:
            self._rows = TokenRows(call)
            return
        config = selected.unit_config_of(forward, target)
        options = selected.options_of(forward, target, config, False, by_key=True)
        # a row of a part has one scale, if it is in one chunk
        dtype = torch.float32 if options.K_HIGH else part_dtype(forward, options.DTYPE)
        # a kernel that writes dk and dv, and parts in float16
        if not (leaves_parts and wants_k and wants_v):
            plan_hopper = None
        if plan_hopper is not None:
            dtype = torch.float16
        entries, heads = forward.lists.key_indices.shape[2], forward.num_kv_heads
        cuts = cdiv(forward.lists.select_size, config.BLOCK_N)
        of_token = forward.num_heads * entries * cuts * forward.head_dim * dtype.itemsize
        runs = cdiv(forward.total_q * of_token, MOST_BYTES) if leaves_parts else 1
        self._lists = lists = ListShape.of(forward, cdiv(forward.total_q, max(runs, 1)))
        block_n = max(16, min(lists.size, config.BLOCK_N))
        options = options._replace(SELECT_SIZE=lists.size, BLOCK_N=block_n)
        cuts = cdiv(lists.size, block_n)
        self._new_parts = self._new_scales = self._new_statistics = None
        blocks = 1
        device = forward.q.device
        if leaves_parts:
            blocks = 2 if plan_hopper else scales_of(forward.head_dim)
            parts = forward.num_heads * lists.step * entries * cuts
            self._new_parts = Allocation((parts, forward.head_dim), dtype, device)
            if dtype == torch.float16:
                self._new_scales = Allocation((parts, blocks), torch.float32, device)
        if plan_hopper is not None:
            shape = forward.total_q, heads, ROW_FIELDS.value, forward.group_size
            self._new_statistics = Allocation(shape, torch.float32, device)
        self._rows = TokenRows(
            call, lists, blocks, cuts if leaves_parts else 0, is_by_lane=plan_hopper is not None
        )
        sizes = [
            UnitSizes(
                forward.total_q, forward.k.shape[0], lists.listed, lists.units, lists.runs, run,
                run * lists.step * lists.entries, lists.step * lists.entries,
            )
            for run in range(lists.runs)
        ]  # fmt: skip
        if plan_hopper is not None:
            self._add_units = plan_hopper(call, sizes)
        else:
            config = dataclasses.replace(config, BLOCK_N=block_n)
            self._add_units = _plan_portable(call, sizes, config, options)

    def __call__(
        self, given: SelectedPointers, pointers: RowPointers, gradients: SelectedGradients
    ) -> None:
        """Write D, and dq, dk and dv as far as `gradients` has them; these as they are."""
        if self._lists is None:
            self._rows.before(pointers)
        else:
            self._visit_units(self._lists, given, pointers, gradients)
        if self._write_dq is not None:
            self._write_dq(given, gradients._replace(dk=None, dv=None))

    def _visit_units(
        self, lists: ListShape, given: SelectedPointers, pointers: RowPointers,
        gradients: SelectedGradients,
    ) -> None:  # fmt: skip
        results = [gradients.dk, gradients.dv]
        for x in results:
            if x is not None:
                x.zero_()  # the gradients of units that no list names
        numbered, parts = lists.new_entries(gradients.lse.device), None
        if self._new_parts is not None:
            scales = None if self._new_scales is None else self._new_scales()
            parts = DqParts(self._new_parts(), scales, numbered.numbers, gradients.dq)
        if self._new_statistics is not None:
            pointers = pointers._replace(statistics=self._new_statistics())
        self._rows.before(pointers, given, numbered, parts)
        sums = results
        if lists.runs > 1:
            sums = [None if x is None else x.float() for x in results]
        inverse = lists.sort(numbered.numbers)
        dk, dv = (None if x is None else as_stored(x, self._target)[0] for x in sums)
        filled = gradients._replace(
            **inverse._asdict(),
            **{name: x for name, x in numbered._asdict().items() if name != "numbers"},
            dq=None,
            dk=dk,
            dv=dv,
            parts_q=None if parts is None else parts.rows,
            scale_q=None if parts is None else parts.scales,
            are_sums=inverse.bounds if lists.runs > 1 else None,
        )
        for run in range(lists.runs):
            self._add_units(run, given, pointers.statistics, filled)
            if parts is not None:
                self._rows.after(run, pointers, given, numbered, parts)
        for x, total in zip(results, sums, strict=True):
            if x is not None and total is not x:
                x.copy_(total)


def _plan_dq(call: BackwardCall) -> Launch:
    """The launch of dq, token by token."""
    forward = call.forward
    target = target_of(forward.q.device)
    config = selected.backward_config_of(forward, target)
    return Launch(
        _selected_dq_kernel,
        (forward.total_q, forward.num_kv_heads * cdiv(forward.group_size, config.BLOCK_M)),
        **selected.sizes_of(forward)._asdict(),
        **launch_options(call, config, selected.options_of(forward, target, config, False)),
    )


def launch_options(
    call: BackwardCall, config: selected.SelectedConfig, options: SelectedOptions
) -> dict[str, Any]:
    """What launches take besides their sizes. Strides are those of dout or of the copy of it."""
    return {
        "strides": selected.strides_of(call.forward),
        "more_strides": GradientStrides(*with_whole_rows(call.dout).stride()[:2]),
        "scalars": selected.scalars_of(call.forward),
        "OPTIONS": options,
        "num_warps": config.num_warps,
        "num_stages": config.num_stages,
    }


def _plan_portable(
    call: BackwardCall, sizes: list[UnitSizes], config: selected.SelectedConfig,
    options: SelectedOptions,
) -> AddUnits:  # fmt: skip
    """The launches of the portable kernel."""
    forward = call.forward
    cuts = cdiv(options.SELECT_SIZE, config.BLOCK_N)
    first = Launch(
        _selected_dkdv_kernel,
        (sizes[0].units, forward.num_kv_heads, cuts),
        **sizes[0]._asdict(),
        **launch_options(call, config, options),
    )
    launches = [first.resized(first.grid, **x._asdict()) for x in sizes]

    def add(
        run: int, given: SelectedPointers, statistics: Tensor | None, gradients: SelectedGradients
    ) -> None:
        launches[run](given, gradients)

    return add
