"""Which tokens name each unit of packed keys: lists of selected keys the other way round.

They are made on the device, by a stable sort: the tokens of a unit keep their order.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, key_lengths
from torch_paged_attn.backends.triton.common.seqlen_info import is_bound
from torch_paged_attn.ops.selected_checks import sequence_of


class InverseLists(NamedTuple):
    """For each group and each run of `step` tokens c, the entries of unit number i are numbers
    `bounds[g, i, c]` to `bounds[g, i, c + 1]` - 1 of those that follow: `tokens` and `units`
    `(G, entries)` are the entries' query rows and units, and `places` their places among the
    entries of all lists of the group, of which `counts` says which are in a list at all. Of each
    query row, `first_rows` is the row of k where its sequence's keys begin, and `lows` and `highs`
    are the first and the last row that it sees. `lengths` is its Lk. A token that sees no key of a
    unit is not among its tokens.
    """

    bounds: Tensor
    tokens: Tensor
    units: Tensor
    first_rows: Tensor
    lows: Tensor
    highs: Tensor
    lengths: Tensor
    places: Tensor
    counts: Tensor
    select_size: int

    @classmethod
    def of(cls, call: AttentionCall, step: int) -> "InverseLists":
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
        lows, highs = first_rows, first_rows + lengths - 1
        if is_bound(call.window_right):
            highs = torch.minimum(highs, first_rows + positions + call.window_right)
        first = first_rows[:, None, None]
        row_of_unit = first + units * size
        counts &= row_of_unit <= highs[:, None, None]
        if is_bound(call.window_size_left):
            lows = torch.maximum(lows, first_rows + positions - call.window_size_left)
            counts &= row_of_unit + size > lows[:, None, None]
        number = first + units if size == 1 else first // size + b[:, None, None] + units
        ids = call.k.shape[0] // size + (0 if size == 1 else call.batch + 1)
        counts &= (number >= 0) & (number < ids)
        # entries that do not count come last
        number = number.where(counts, ids).transpose(0, 1).flatten(1).int()
        ordered, order = torch.sort(number, dim=-1, stable=True)
        tokens = order // max(units.shape[2], 1)
        runs = torch.arange(0, call.total_q + step, step, device=device)
        searched = torch.arange(ids, device=device)[:, None] * (call.total_q + step) + runs
        searched = searched.expand(units.shape[1], -1, -1).flatten(1).contiguous()
        bounds = torch.searchsorted(ordered.long() * (call.total_q + step) + tokens, searched)
        return cls(
            bounds.view(units.shape[1], ids, len(runs)),
            tokens,
            units.transpose(0, 1).flatten(1).gather(1, order),
            first_rows,
            lows.int(),
            highs.int(),
            lengths,
            order,
            counts.transpose(0, 1).flatten(1),
            size,
        )
