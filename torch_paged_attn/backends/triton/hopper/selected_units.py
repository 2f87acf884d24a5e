"""`selected_attention` on Hopper for blocks of keys that many tokens name: prefill of M3, NSA and
such.

Keys and values of a unit are read once for all of its tokens; see `unit_kernel.py`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.support import (
    DESCALES,
    IN_16_BITS,
    LEAST_BOX,
    LEAST_SCALE,
    is_bound,
    is_misaligned,
    unsupported_device,
)
from torch_paged_attn.backends.triton.hopper.unit_arguments import (
    BLOCK_M,
    MOST_ENTRIES,
    UnitCombinePointers,
    UnitOptions,
    UnitPointers,
    UnitScalars,
    UnitSizes,
)
from torch_paged_attn.backends.triton.hopper.unit_combine import _combine_units_kernel
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.backends.triton.softmax import LOG2E
from torch_paged_attn.backends.triton.unit_items import UnitLists, units_of

# heads that share a unit, keys of a unit, and widths that the kernel has tiles for
GROUPS, UNITS, WIDTHS = (8, 16, 32, 64), (64, 128), (64, 128)
CONSUMERS, Q_STAGES, KV_STAGES, REGISTERS = 2, 6, 2, 240
MOST_PRODUCERS = 4
# tokens of a unit, on average, from which on its own tile is filled well enough
LEAST_TOKENS = 4
# tiles of queries of a program, at least
LEAST_TILES = 16
# bytes of parts: calls with more are done some tokens at a time
MOST_BYTES = 2**31


def unsupported(call: AttentionCall) -> str | None:
    """Why a call cannot take this kernel; None if it can."""
    selection, q, k, v = call.selection, call.q, call.k, call.v
    assert selection is not None
    if (reason := unsupported_device(q.device)) is not None:
        return reason
    if q.dtype not in IN_16_BITS or not q.dtype == k.dtype == v.dtype:
        return f"q is {q.dtype}, k {k.dtype} and v {v.dtype}"
    if call.result_dtype not in (
        (q.dtype, torch.float32) if q.dtype == torch.bfloat16 else (q.dtype,)
    ):
        return f"q is {q.dtype} and out_dtype {call.result_dtype}"
    for name in ("out_scale", "q_latent", *DESCALES):
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.softcap or is_bound(call.window_size_left):
        return "it has no softcap and no window_size_left"
    if not LEAST_SCALE <= call.scale <= 1.0 / LEAST_SCALE:
        return f"softmax_scale is {call.softmax_scale}"
    if selection.key_indices.shape[2] == 0:
        return "lists have no entries"
    size, groups = selection.select_size, selection.key_indices.shape[1]
    if size not in UNITS or groups != call.num_kv_heads or call.group_size not in GROUPS:
        return f"units of {size} keys for {groups} lists and {call.group_size} heads each"
    if call.head_dim not in WIDTHS or call.head_dim_v not in WIDTHS:
        return f"head_dim is {call.head_dim}, head_dim_v {call.head_dim_v}"
    if call.is_paged:
        if call.page_size % size and (size % call.page_size or call.page_size < LEAST_BOX):
            return f"page_size is {call.page_size}"
        if any(x.stride(2) <= 0 or x.stride(0) % x.stride(2) for x in (k, v)):
            return "pages do not lie a whole number of slots apart"
    if any(is_misaligned(x, x.dim() - 1) for x in (q, k, v)) or 0 in k.shape:
        return "q, k or v is not aligned to 16 bytes"
    return None


def unprofitable(call: AttentionCall) -> str | None:
    """Why a call that can take this kernel should not; None if it should."""
    selection = call.selection
    assert selection is not None
    if call.is_batch_invariant:
        return "which kernel it takes would depend on the other sequences"
    sequences = 1 if call.is_slots else max(call.batch, 1)
    named = call.total_q * selection.key_indices.shape[2]
    if named < LEAST_TOKENS * sequences * units_of(call):
        return "a unit is named by few tokens"
    tiles = named * call.num_heads // BLOCK_M
    if tiles < LEAST_TILES * target_of(call.q.device).multiprocessors:
        return "the tokens do not fill the chip"
    return None


def options_of(call: AttentionCall) -> UnitOptions:
    """What the kernel is compiled for."""
    selection = call.selection
    assert selection is not None
    size = selection.select_size
    return UnitOptions(
        BLOCK_N=size,
        WIDTH=call.head_dim,
        WIDTH_V=call.head_dim_v,
        GROUP_SIZE=call.group_size,
        TOKENS=BLOCK_M // call.group_size,
        PAGE_SIZE=call.page_size if call.is_paged else 0,
        IS_SLOTS=call.is_slots,
        BOX_ROWS=min(size, call.page_size) if call.is_paged else size,
        CONSUMERS=CONSUMERS,
        PRODUCERS=min(MOST_PRODUCERS, BLOCK_M // call.group_size),
        Q_STAGES=Q_STAGES,
        KV_STAGES=KV_STAGES,
        REGISTERS=REGISTERS,
    )


def attend(
    call: AttentionCall, out: Tensor, lse: Tensor, make_lists: Callable[..., UnitLists]
) -> None:
    """Write the results of a call for which `unsupported` has no reason. `make_lists` is
    `unit_lists.make_unit_lists`."""
    selection = call.selection
    assert selection is not None
    target, options = target_of(call.q.device), options_of(call)
    entries = selection.key_indices.shape[2]
    of_token = call.num_heads * entries * call.head_dim_v * 2
    # chunks of equal length
    chunks = cdiv(call.total_q * of_token, MOST_BYTES)
    step = cdiv(call.total_q, max(chunks, 1))
    for first in range(0, call.total_q, step):
        rows = slice(first, min(first + step, call.total_q))
        lists = make_lists(call, target, rows, MOST_ENTRIES, options.TOKENS)
        _attend_rows(call, lists, options, out, lse)


def _attend_rows(
    call: AttentionCall, lists: UnitLists, options: UnitOptions, out: Tensor, lse: Tensor
) -> None:
    """The results of the rows that have lists."""
    from torch_paged_attn.backends.triton.hopper.tma import ragged_rows
    from torch_paged_attn.backends.triton.hopper.unit_kernel import _hopper_attention_units_kernel

    target, table = target_of(call.q.device), call.block_table
    count, groups, entries = lists.buckets.shape

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=call.q.device)

    of_part = count * groups * entries, call.group_size
    parts = new(*of_part, call.head_dim_v, dtype=torch.float16)
    part_lse, part_scale = new(*of_part), new(*of_part)
    k, v = (x if not call.is_paged else x[0].transpose(0, 1) for x in (call.k, call.v))
    page_rows = [x.stride(0) // x.stride(2) if call.is_paged else 0 for x in (call.k, call.v)]
    bounds = call.cu_seqlens_q if call.cu_seqlens_k is None else call.cu_seqlens_k
    pointers = UnitPointers(
        entries=lists.entries,
        rows=lists.rows,
        items=lists.items,
        num_items=lists.num_items,
        last_keys=lists.last_keys,
        parts=parts,
        part_lse=part_lse,
        part_scale=part_scale,
        k_first=None if call.is_paged else bounds if call.k_start is None else call.k_start,
        block_table=table,
    )
    sizes = UnitSizes(
        entries=groups * entries,
        num_pages=call.k.shape[0],
        stride_table=0 if table is None else table.stride(0),
    )
    rows: dict[str, Any] = {"rows": options.BOX_ROWS, "heads": 1}
    Launch(
        _hopper_attention_units_kernel,
        (target.multiprocessors,),
        **sizes._asdict(),
        scalars=UnitScalars(call.scale * LOG2E.value, *page_rows),
        OPTIONS=options,
        num_warps=4,
    )(
        ragged_rows(call.q, 1, options.GROUP_SIZE, options.WIDTH).at(call.q.data_ptr()),
        ragged_rows(k, **rows, width=options.WIDTH).at(call.k.data_ptr()),
        ragged_rows(v, **rows, width=options.WIDTH_V).at(call.v.data_ptr()),
        pointers,
    )
    Launch(
        _combine_units_kernel,
        (count, groups),
        first_row=lists.first_row,
        total_q=call.total_q,
        batch=call.batch,
        entries=entries,
        NUM_HEADS=call.num_heads,
        HEADS=call.group_size,
        WIDTH=call.head_dim_v,
        K=next_power_of_2(entries),
        num_warps=4,
    )(
        UnitCombinePointers(
            parts=parts,
            part_lse=part_lse,
            part_scale=part_scale,
            buckets=lists.buckets,
            out=out,
            lse=lse,
            sinks=call.sinks,
            cu_seqlens_q=call.cu_seqlens_q,
        )
    )
