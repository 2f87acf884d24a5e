"""Which tokens name each unit of packed keys: lists of selected keys the other way round.

A kernel numbers the entries of all lists (`token_rows.py`), and a stable sort on the device puts
them in order: the tokens of a unit keep their order.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.runtime.target import cdiv


class NumberedEntries(NamedTuple):
    """What a kernel writes. An entry's number is that of its unit times `runs`, plus that of the
    token's run; it is -1 for an entry that does not count, as the token sees no key of its unit.
    """

    numbers: Any  # (G, entries), those of a token one behind the other
    # of each query row, int64: the row of k where its sequence's keys begin, the number of its
    # sequence's first unit, and its Lk
    first_rows: Any
    first_units: Any
    lengths: Any
    # the first and the last row of k that it sees, int32
    lows: Any
    highs: Any


class InverseLists(NamedTuple):
    """For each group g the entries of unit number i and run c of tokens are those from
    `bounds[g, i * runs + c]` to `bounds[g, i * runs + c + 1]` - 1 of those that follow: `tokens`
    and `places` `(G, entries)` are the entries' query rows, and their places among the entries of
    all lists of the group.
    """

    bounds: Tensor
    tokens: Tensor
    places: Tensor


@dataclasses.dataclass(frozen=True)
class ListShape:
    """Sizes of the inverse lists of calls like one with packed keys, for `step` tokens at a time.
    Where ranges of keys may overlap (k_start), units are split into single keys, which are numbered
    by their row.
    """

    size: int  # keys of a numbered unit
    pieces: int  # numbered units of a unit of the lists
    entries: int  # of a token, numbered units
    groups: int
    total_q: int
    units: int
    step: int

    @classmethod
    def of(cls, call: AttentionCall, step: int) -> "ListShape":
        selection, keys = call.lists, call.k.shape[0]
        _, groups, entries = selection.key_indices.shape
        pieces = 1 if call.k_start is None else selection.select_size
        size = selection.select_size // pieces
        # the first unit of a sequence may begin within the last one of the sequence before
        units = keys if size == 1 else keys // size + call.batch + 1
        return cls(size, pieces, entries * pieces, groups, call.total_q, units, step)

    @property
    def runs(self) -> int:
        return cdiv(self.total_q, self.step)

    @property
    def listed(self) -> int:
        """Entries of a group."""
        return self.total_q * self.entries

    def new_entries(self, device: torch.device) -> NumberedEntries:
        """Memory for what the kernel writes."""
        wide = torch.int64 if self.units * self.runs >= 2**31 else torch.int32
        rows = cdiv(self.total_q, 4) * 4  # kernels are compiled for addresses at 16 bytes
        return NumberedEntries(
            torch.empty((self.groups, self.listed), dtype=wide, device=device),
            *torch.empty((3, rows), dtype=torch.int64, device=device).unbind(),
            *torch.empty((2, rows), dtype=torch.int32, device=device).unbind(),
        )

    def sort(self, numbers: Tensor) -> InverseLists:
        """The inverse lists of numbered entries."""
        ordered, places = torch.sort(numbers, dim=-1, stable=True)
        searched = torch.arange(
            self.units * self.runs + 1, dtype=numbers.dtype, device=numbers.device
        )
        searched = searched.expand(self.groups, -1).contiguous()
        bounds = torch.searchsorted(ordered, searched)
        return InverseLists(bounds, places // max(self.entries, 1), places)
