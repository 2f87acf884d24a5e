"""Which tokens name each unit of packed keys: lists of selected keys the other way round.

They are made on the device, by a stable sort: the tokens of a unit keep their order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, key_lengths
from torch_paged_attn.ops.selected_checks import sequence_of


class InverseLists(NamedTuple):
    """For each group: entry i of `bounds` `(G, ids + 1)` is where the entries of unit number i
    begin; `tokens` and `units` `(G, entries)` are the entries' query rows and units, and `places`
    their places among the entries of all lists of the group. Of each query row, `first_rows` is the
    row of k where its sequence's keys begin, and `positions` and `lengths` are its position and its
    Lk.
    """

    bounds: Tensor
    tokens: Tensor
    units: Tensor
    first_rows: Tensor
    positions: Tensor
    lengths: Tensor
    places: Tensor
    select_size: int

    @classmethod
    def of(cls, call: AttentionCall) -> "InverseLists":
        """The inverse lists of a call with packed keys. Where ranges of keys may overlap (k_start),
        units are split into single keys, which are numbered by their row.
        """
        selection = call.lists
        device, size = call.q.device, selection.select_size
        row = torch.arange(call.total_q, device=device)
        b = sequence_of(call, slice(0, call.total_q))
        lengths = key_lengths(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k).long()[b]
        positions = call.first_positions()[b] + row - call.cu_seqlens_q[b]
        first_rows = call.first_keys().long()[b]
        units = selection.key_indices.long()
        counts = (units >= 0) & (row < call.cu_seqlens_q[-1])[:, None, None]
        if selection.num_selected is not None:
            place = torch.arange(units.shape[2], device=device)
            counts &= place < selection.num_selected[..., None]
        if call.k_start is not None and size > 1:
            units = (units[..., None] * size + torch.arange(size, device=device)).flatten(2)
            counts, size = counts.repeat_interleave(size, 2), 1
        counts &= units * size < lengths[:, None, None]
        first = first_rows[:, None, None]
        number = first + units if size == 1 else first // size + b[:, None, None] + units
        ids = call.k.shape[0] // size + (0 if size == 1 else call.batch + 1)
        counts &= (number >= 0) & (number < ids)
        # entries that do not count come last
        number = number.where(counts, ids).transpose(0, 1).flatten(1).int()
        ordered, order = torch.sort(number, dim=-1, stable=True)
        searched = (
            torch.arange(ids + 1, device=device, dtype=torch.int32)
            .expand(units.shape[1], -1)
            .contiguous()
        )
        return cls(
            torch.searchsorted(ordered, searched),
            order // max(units.shape[2], 1),
            units.transpose(0, 1).flatten(1).gather(1, order),
            first_rows,
            positions,
            lengths,
            order,
            size,
        )
