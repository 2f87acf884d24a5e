"""The rules for lists of selected keys, which `selected_attention` and `selected_mass` share."""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, key_lengths
from torch_paged_attn.ops.attention_checks import check_attention, check_attention_values
from torch_paged_attn.ops.checks import check_dim, check_dtype, check_shape, fail

SELECT_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
# elements of the largest intermediate tensor of `check_selected_values`
MOST_AT_ONCE = 2**20


def check_selected(call: AttentionCall) -> None:
    """Raise for shapes, dtypes, devices and options that no backend may accept."""
    selection, op = call.selection, call.op
    assert selection is not None
    check_attention(call)
    check_select_size(op, selection.select_size)
    indices, counts = selection.key_indices, selection.num_selected
    check_dim(op, "key_indices", indices, "(total_q, G, K)")
    check_dtype(op, "key_indices", indices, (torch.int32,))
    groups = indices.shape[1]
    if groups not in (1, call.num_kv_heads):
        allowed = f"(total_q, G, K) with G of 1 or num_kv_heads = {call.num_kv_heads}"
        fail(op, "key_indices", f"shape {tuple(indices.shape)}", allowed)
    shape = (call.total_q, groups, indices.shape[2])
    check_shape(op, "key_indices", indices, shape, "(total_q, G, K)")
    if counts is not None:
        check_dtype(op, "num_selected", counts, (torch.int32,))
        check_shape(op, "num_selected", counts, shape[:2], "(total_q, G)")
    if call.is_slots:
        _check_slots(call)


def check_select_size(op: str, size: int) -> None:
    """Raise unless a unit's size is one that is allowed."""
    if size not in SELECT_SIZES:
        fail(op, "select_size", f"{size}", f"one of {', '.join(map(str, SELECT_SIZES))}")


def _check_slots(call: AttentionCall) -> None:
    """Raise for arguments that need positions, which units of a cache do not have."""
    op, selection = call.op, call.selection
    assert selection is not None
    why = "because k is pages without block_table, where key_indices name slots"
    if call.causal:
        fail(op, "causal", "True", f"False {why}")
    for name in ("window_size_left", "window_size_right"):
        if (size := getattr(call, name)) != -1:
            fail(op, name, f"{size}", f"-1 {why}")
    for name in ("cu_seqlens_k", "seqused_k", "k_start", "q_position"):
        if getattr(call, name) is not None:
            fail(op, name, "a tensor", f"None {why}")
    if call.page_size % selection.select_size:
        allowed = f"1, or a divisor of k's page_size, {call.page_size}, {why}"
        fail(op, "select_size", f"{selection.select_size}", allowed)


def check_selected_values(call: AttentionCall) -> None:
    """Raise for lengths, lists and pages of selected keys that are out of range. Reads tensors."""
    if call.is_slots:  # its keys are no sequence's
        none = torch.zeros_like(call.cu_seqlens_q[:-1])
        check_attention_values(dataclasses.replace(call, k_start=none, seqused_k=none))
    else:
        check_attention_values(call)
    selection, op = call.selection, call.op
    assert selection is not None
    _, groups, entries = selection.key_indices.shape
    total = int(call.cu_seqlens_q[-1])
    if (counts := selection.num_selected) is not None:
        for row, group in ((counts < 0) | (counts > entries))[:total].nonzero().tolist():
            came = f"{int(counts[row, group])}"
            fail(op, f"num_selected[{row}, {group}]", came, f"0 to K = {entries}")
    step = max(1, MOST_AT_ONCE // max(1, groups * entries * selection.select_size))
    for first in range(0, total, step):
        rows = slice(first, min(first + step, total))
        units, keys, is_seen = selected_keys(call, rows)
        _check_once(op, units, keys, is_seen, rows.start)
        if call.block_table is not None:
            _check_pages(call, rows, keys[is_seen], is_seen.nonzero()[:, 0])


def _check_once(op: str, units: Tensor, keys: Tensor, is_seen: Tensor, first_row: int) -> None:
    """Raise if a list names a unit twice, of which a query sees a key."""
    size = keys.shape[-1] // max(1, units.shape[-1])
    counted = is_seen.unflatten(-1, (units.shape[-1], size)).any(-1) if size else is_seen
    # every entry that does not count gets a number of its own
    others = -1 - torch.arange(units.shape[-1]).expand_as(units)
    ordered = torch.where(counted, units, others).sort(-1).values
    twice = ordered[..., 1:] == ordered[..., :-1]
    for row, group, at in twice.nonzero()[:1].tolist():
        came = f"{int(ordered[row, group, at])} twice"
        fail(op, f"key_indices[{first_row + row}, {group}]", came, "units that are listed once")


def _check_pages(call: AttentionCall, rows: slice, keys: Tensor, row_of: Tensor) -> None:
    """Raise for selected keys whose page is not in block_table, or not in the cache."""
    table = call.block_table
    assert table is not None
    b, entry = sequence_of(call, rows)[row_of], keys // call.page_size
    if (entry >= table.shape[1]).any():
        at = int((entry >= table.shape[1]).nonzero()[0])
        came = f"{table.shape[1]} columns for key {int(keys[at])} of sequence {int(b[at])}"
        allowed = f"at least {int(entry[at]) + 1} columns of pages of {call.page_size}"
        fail(call.op, "block_table", came, allowed, RuntimeError)
    pages, num_pages = table[b, entry], call.k.shape[0]
    wrong = (pages < 0) | (pages >= num_pages)
    for at in wrong.nonzero()[:1, 0].tolist():
        name = f"block_table[{int(b[at])}, {int(entry[at])}]"
        fail(call.op, name, f"{int(pages[at])}", f"a page from 0 to {num_pages - 1}", IndexError)


def sequence_of(call: AttentionCall, rows: slice) -> Tensor:
    """The sequence of each query row, int64; the last one for rows of padding."""
    row = torch.arange(rows.start, rows.stop, device=call.q.device, dtype=torch.int32)
    found = torch.searchsorted(call.cu_seqlens_q[1:].contiguous(), row, right=True)
    return found.clamp(max=max(call.batch - 1, 0))


def selected_keys(
    call: AttentionCall, rows: slice, entries: slice | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """What the lists of some query rows name.

    rows: rows of q, none of which is padding; entries: of each list, all if None
    returns: the units `(rows, G, entries)`; their keys `(rows, G, entries * select_size)`, as they
        are numbered in the row's sequence, or slots; and which of the keys the query sees
    """
    selection = call.selection
    assert selection is not None
    entries = slice(0, selection.key_indices.shape[2]) if entries is None else entries
    units = selection.key_indices[rows, :, entries].long()
    device, size = units.device, selection.select_size
    counts = units >= 0
    if selection.num_selected is not None:
        place = torch.arange(entries.start, entries.stop, device=device)
        counts = counts & (place < selection.num_selected[rows][..., None])
    keys = (units[..., None] * size + torch.arange(size, device=device)).flatten(-2)
    is_seen = counts.repeat_interleave(size, -1)
    if call.is_slots:
        return units, keys, is_seen & (keys < call.k.shape[0] * call.page_size)
    b = sequence_of(call, rows)
    lengths = key_lengths(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k).long()
    row = torch.arange(rows.start, rows.stop, device=device)
    position = (call.first_positions()[b] + row - call.cu_seqlens_q[b])[:, None, None]
    is_seen &= keys < lengths[b][:, None, None]
    if call.window_right >= 0:
        is_seen &= keys <= position + call.window_right
    if call.window_size_left >= 0:
        is_seen &= keys >= position - call.window_size_left
    return units, keys, is_seen
