"""`selected_attention` on Hopper for blocks of keys that many tokens name: prefill of M3, NSA and
such.

Keys and values of a unit are read once for all of its tokens; see `kernel.py`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.common.unit_items import UnitLists, units_of
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.units import arguments
from torch_paged_attn.backends.triton.hopper.units.rows import _combine_units_kernel
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.selection import Selection

# heads that share a unit, keys of a unit, and widths that the kernel has tiles for; a larger unit
# is taken as several
GROUPS, UNITS, WIDTHS = (1, 2, 4, 8, 16, 32, 64), (64, 128), (64, 128)
# heads from which on a token's queries are loaded where they are; those of fewer are copied one
# behind the other first, as a box of a swizzled tile has at least eight rows
LEAST_ROWS = 8
CONSUMERS, Q_STAGES, KV_STAGES, REGISTERS = 2, 6, 2, 240
MOST_PRODUCERS = 4
# rows of queries of a unit, on average, from which on its own tile is filled well enough, and its
# tokens, at least
LEAST_UNIT_ROWS, LEAST_TOKENS = 16, 4
# tiles of queries of a program, at least
LEAST_TILES = 16
# bytes of parts: calls with more are done some tokens at a time
MOST_BYTES = 2**31

# makes the lists of some rows of a call; takes its `SelectedPointers`
MakeLists = Callable[[Any], UnitLists]
# takes these and the tensors for results
Attend = Callable[[Any, Tensor, Tensor], None]


def unsupported(call: AttentionCall) -> str | None:
    """Why a call cannot take this kernel; None if it can."""
    selection, q, k, v = call.lists, call.q, call.k, call.v
    if (reason := support.unsupported_device(q.device)) is not None:
        return reason
    if q.dtype not in support.IN_16_BITS or not q.dtype == k.dtype == v.dtype:
        return f"q is {q.dtype}, k {k.dtype} and v {v.dtype}"
    if call.result_dtype not in (
        (q.dtype, torch.float32) if q.dtype == torch.bfloat16 else (q.dtype,)
    ):
        return f"q is {q.dtype} and out_dtype {call.result_dtype}"
    for name in ("out_scale", "q_latent", *support.DESCALES):
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.softcap or support.is_bound(call.window_size_left):
        return "it has no softcap and no window_size_left"
    if not support.LEAST_SCALE <= call.scale <= 1.0 / support.LEAST_SCALE:
        return f"softmax_scale is {call.softmax_scale}"
    if selection.key_indices.shape[2] == 0:
        return "lists have no entries"
    size, groups = selection.select_size, selection.key_indices.shape[1]
    if size < UNITS[0] or groups != call.num_kv_heads or call.group_size not in GROUPS:
        return f"units of {size} keys for {groups} lists and {call.group_size} heads each"
    if call.head_dim not in WIDTHS or call.head_dim_v not in WIDTHS:
        return f"head_dim is {call.head_dim}, head_dim_v {call.head_dim_v}"
    size = min(size, UNITS[-1])
    if call.is_paged:
        if call.page_size % size and (size % call.page_size or call.page_size < support.LEAST_BOX):
            return f"page_size is {call.page_size}"
        if any(x.stride(2) <= 0 or x.stride(0) % x.stride(2) for x in (k, v)):
            return "pages do not lie a whole number of slots apart"
    if any(support.is_misaligned(x, x.dim() - 1) for x in (q, k, v)) or 0 in k.shape:
        return "q, k or v is not aligned to 16 bytes"
    return None


def unprofitable(call: AttentionCall) -> str | None:
    """Why a call that can take this kernel should not; None if it should."""
    selection = call.lists
    if call.is_batch_invariant:
        return "which kernel it takes would depend on the other sequences"
    sequences = 1 if call.is_slots else max(call.batch, 1)
    named = call.total_q * selection.key_indices.shape[2]
    if named < least_tokens(call.group_size) * sequences * units_of(call):
        return "a unit is named by few tokens"
    tiles = named * call.num_heads // arguments.BLOCK_M
    if tiles < LEAST_TILES * target_of(call.q.device).multiprocessors:
        return "the tokens do not fill the chip"
    return None


def least_tokens(group_size: int) -> int:
    """Tokens of a unit, on average, from which on it pays to visit units."""
    return max(LEAST_TOKENS, LEAST_UNIT_ROWS // group_size)


def most_entries(group_size: int) -> int:
    """Entries of an item of work, at most: as many rows as of a group of `LEAST_ROWS` heads."""
    return arguments.MOST_ENTRIES * max(LEAST_ROWS // group_size, 1)


def options_of(call: AttentionCall) -> arguments.UnitOptions:
    selection = call.lists
    size = selection.select_size
    is_copied = call.group_size < LEAST_ROWS
    return arguments.UnitOptions(
        BLOCK_N=size,
        WIDTH=call.head_dim,
        WIDTH_V=call.head_dim_v,
        GROUP_SIZE=call.group_size,
        TOKENS=arguments.BLOCK_M // call.group_size,
        PAGE_SIZE=call.page_size if call.is_paged else 0,
        IS_SLOTS=call.is_slots,
        BOX_ROWS=min(size, call.page_size) if call.is_paged else size,
        CONSUMERS=CONSUMERS,
        PRODUCERS=1 if is_copied else min(MOST_PRODUCERS, arguments.BLOCK_M // call.group_size),
        Q_STAGES=Q_STAGES,
        KV_STAGES=KV_STAGES,
        REGISTERS=REGISTERS,
        IS_COPIED=is_copied,
    )


def _in_pieces(indices: Tensor, counts: Tensor | None, pieces: int) -> tuple[Tensor, Tensor | None]:
    """Lists of pieces of units. No piece of an entry that names nothing has a number from 0 on."""
    if pieces == 1:
        return indices, counts
    of_unit = torch.arange(pieces, dtype=indices.dtype, device=indices.device)
    indices = (indices[..., None] * pieces + of_unit).flatten(-2)
    return indices, None if counts is None else counts * pieces


def _in_units(call: AttentionCall) -> AttentionCall:
    """The call with lists of units that the kernel has tiles for."""
    selection = call.lists
    size = min(selection.select_size, UNITS[-1])
    pieces = selection.select_size // size
    lists = _in_pieces(selection.key_indices, selection.num_selected, pieces)
    return dataclasses.replace(call, selection=Selection(*lists, size))


def plan_units(call: AttentionCall, plan_lists: Callable[..., MakeLists]) -> Attend:
    """What writes the results of calls like one for which `unsupported` has no reason. `plan_lists`
    is `unit_lists.plan_unit_lists`."""
    of_lists, call = call.lists.select_size, _in_units(call)
    pieces = of_lists // call.lists.select_size
    target, options = target_of(call.q.device), options_of(call)
    entries = call.lists.key_indices.shape[2]
    width = call.head_dim_v + (call.head_dim if options.IS_COPIED else 0)
    of_token = call.num_heads * entries * width * 2
    # chunks of equal length
    chunks = cdiv(call.total_q * of_token, MOST_BYTES)
    step = cdiv(call.total_q, max(chunks, 1))
    ranges = [
        slice(first, min(first + step, call.total_q)) for first in range(0, call.total_q, step)
    ]
    most = most_entries(call.group_size)
    make_lists = [plan_lists(call, target, rows, most, options.TOKENS) for rows in ranges]
    attend_rows = [_RowPlan(call, rows, options) for rows in ranges]

    def attend(given: Any, out: Tensor, lse: Tensor) -> None:
        indices, counts = _in_pieces(given.key_indices, given.num_selected, pieces)
        given = given._replace(key_indices=indices, num_selected=counts)
        for make, attend_some in zip(make_lists, attend_rows, strict=True):
            attend_some(given, make(given), out, lse)

    return attend


class _RowPlan:
    """The launches for some rows of calls like one."""

    def __init__(self, call: AttentionCall, rows: slice, options: arguments.UnitOptions) -> None:
        from torch_paged_attn.backends.triton.hopper.common.tma import ragged_rows
        from torch_paged_attn.backends.triton.hopper.units.kernel import (
            _hopper_attention_units_kernel,
        )

        target, table, device = target_of(call.q.device), call.block_table, call.q.device
        _, groups, entries = call.lists.key_indices.shape
        count = rows.stop - rows.start
        of_part = count * groups * entries, call.group_size
        self._new_parts = Allocation((*of_part, call.head_dim_v), torch.float16, device)
        self._new_numbers = Allocation(of_part, torch.float32, device)
        self._copy_queries = _plan_copy(call, of_part[0]) if options.IS_COPIED else None
        if options.IS_COPIED:
            copied = call.q.new_empty((0, 1, call.head_dim))
            self._q_boxes = ragged_rows(copied, arguments.BLOCK_M, 1, options.WIDTH)
        else:
            self._q_boxes = ragged_rows(call.q, 1, options.GROUP_SIZE, options.WIDTH)
        k, v = (x if not call.is_paged else x[0].transpose(0, 1) for x in (call.k, call.v))
        page_rows = [x.stride(0) // x.stride(2) if call.is_paged else 0 for x in (call.k, call.v)]
        self._k_boxes = ragged_rows(k, options.BOX_ROWS, 1, options.WIDTH)
        self._v_boxes = ragged_rows(v, options.BOX_ROWS, 1, options.WIDTH_V)
        self._is_paged = call.is_paged
        sizes = arguments.UnitSizes(
            entries=groups * entries,
            num_pages=call.k.shape[0],
            stride_table=0 if table is None else table.stride(0),
        )
        self._attend = Launch(
            _hopper_attention_units_kernel,
            (target.multiprocessors,),
            **sizes._asdict(),
            scalars=arguments.UnitScalars(call.scale * LOG2E.value, *page_rows),
            OPTIONS=options,
            num_warps=4,
        )
        self._combine = Launch(
            _combine_units_kernel,
            (count, groups),
            first_row=rows.start,
            total_q=call.total_q,
            batch=call.batch,
            entries=entries,
            NUM_HEADS=call.num_heads,
            HEADS=call.group_size,
            WIDTH=call.head_dim_v,
            K=next_power_of_2(entries),
            # of 128 columns of a head, a thread has four
            num_warps=min(call.group_size, 4),
        )

    def __call__(self, given: Any, lists: UnitLists, out: Tensor, lse: Tensor) -> None:
        parts, part_lse, part_scale = self._new_parts(), self._new_numbers(), self._new_numbers()
        queries = given.q if self._copy_queries is None else self._copy_queries(given.q, lists)
        bounds = given.cu_seqlens_q if given.cu_seqlens_k is None else given.cu_seqlens_k
        bounds = bounds if given.k_start is None else given.k_start
        pointers = arguments.UnitPointers(
            entries=lists.entries,
            rows=lists.rows,
            items=lists.items,
            num_items=lists.num_items,
            last_keys=lists.last_keys,
            parts=parts,
            part_lse=part_lse,
            part_scale=part_scale,
            k_first=None if self._is_paged else bounds,
            block_table=given.block_table,
        )
        self._attend(
            self._q_boxes.at(queries.data_ptr()),
            self._k_boxes.at(given.k.data_ptr()),
            self._v_boxes.at(given.v.data_ptr()),
            pointers,
        )
        self._combine(
            arguments.UnitCombinePointers(
                parts=parts,
                part_lse=part_lse,
                part_scale=part_scale,
                buckets=lists.buckets,
                out=out,
                lse=lse,
                sinks=given.sinks,
                cu_seqlens_q=given.cu_seqlens_q,
            )
        )


def _plan_copy(call: AttentionCall, total: int) -> Callable[[Tensor, UnitLists], Tensor]:
    """What copies query rows of `total` entries in the order of `lists.entries`, `(entries,
    group_size, head_dim)`."""
    from torch_paged_attn.backends.triton.hopper.units.rows import _copy_unit_queries_kernel

    row, head = call.q.stride()[:2]
    launch = Launch(
        _copy_unit_queries_kernel,
        (cdiv(total, arguments.BLOCK_M),),
        row_pieces=row // 8,
        head_pieces=head // 8,
        groups=call.num_kv_heads,
        entries=call.lists.key_indices.shape[2],
        HEADS=call.group_size,
        WIDTH=call.head_dim,
        ROWS=arguments.BLOCK_M,
        num_warps=4,
    )
    new_rows = Allocation((total, call.group_size, call.head_dim), call.q.dtype, call.q.device)

    def copy(q: Tensor, lists: UnitLists) -> Tensor:
        copied = new_rows()
        launch(
            arguments.UnitQueryPointers(
                q, lists.entries, lists.rows, lists.items, lists.num_items, copied
            )
        )
        return copied

    return copy
