"""The keys that a stack's columns stand for: a stretch of positions, or the blocks of a layout.

Columns follow the order of positions, so that a range of visible positions is a range of columns.
"""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.attention_call import BlockLayout


def count_up(counts: Tensor) -> tuple[Tensor, Tensor]:
    """`[2, 3]` as which `[0, 0, 1, 1, 1]` and rank `[0, 1, 0, 1, 2]`."""
    which = torch.repeat_interleave(torch.arange(len(counts)), counts)
    rank = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
    return which, rank


@dataclasses.dataclass(frozen=True)
class Stretch:
    """Every key from `origin` on."""

    origin: Tensor  # (num_stacks,)
    width: Tensor  # how many columns there are

    @classmethod
    def over(cls, start: Tensor, stop: Tensor, grid: int) -> "Stretch":
        """The keys in `[start, stop)`, from a multiple of `grid` on."""
        origin = start // grid * grid
        return cls(origin, torch.where(stop > start, stop - origin, 0))

    def before(self, stack: Tensor, position: Tensor) -> Tensor:
        """How many columns stand for keys before these positions; the two broadcast."""
        return torch.minimum((position - self.origin[stack]).clamp(min=0), self.width[stack])

    def key(self, stack: Tensor, column: Tensor) -> Tensor:
        """The position that a column within the width stands for."""
        return self.origin[stack] + column


# wider than any column of a layout: (stack, block) pairs are ordered as one number
STRIDE = 2**32


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The keys of the blocks that a layout lists, block after block."""

    size: int  # keys of a block
    width: Tensor
    first: Tensor  # (num_stacks,) in `listed`
    listed: Tensor  # stack * STRIDE + block, in order

    @classmethod
    def listed_in(
        cls,
        layout: BlockLayout,
        sequence: Tensor,
        head: Tensor,
        row: Tensor,
        start: Tensor,
        stop: Tensor,
    ) -> "Blocks":
        """The blocks of one row of a layout, on the host, for each stack, as far as they meet
        `[start, stop)`. An entry that the contract forbids lists nothing.
        """
        csr, size = (layout.crow_indices, layout.col_indices), layout.k_block_size
        crow, col = (t.long().expand(_batch(t, sequence), *t.shape[-2:]) for t in csr)
        rows, nnz = crow.shape[2] - 1, col.shape[2]
        exists = (row >= 0) & (row < rows) & (sequence < crow.shape[0])
        # padding tokens have no layout row: they may look at any
        at = (sequence.clamp(max=crow.shape[0] - 1), head, row.clamp(0, max(rows - 1, 0)))
        low, high = (
            (crow[at[0], at[1], (at[2] + i).clamp(max=rows)].clamp(0, nnz) for i in (0, 1))
            if crow.numel()
            else (torch.zeros_like(row), torch.zeros_like(row))
        )
        stack, rank = count_up(torch.where(exists, high - low, 0).clamp(min=0))
        block = col[at[0][stack], at[1][stack], low[stack] + rank]
        seen = (block * size < stop[stack]) & ((block + 1) * size > start[stack]) & (block >= 0)
        stack, block = stack[seen], block[seen]
        counts = torch.bincount(stack, minlength=len(row))
        listed = (stack * STRIDE + block).sort().values
        return cls(size, counts * size, counts.cumsum(0) - counts, listed)

    def before(self, stack: Tensor, position: Tensor) -> Tensor:
        wanted = stack * STRIDE + position // self.size
        place = torch.searchsorted(self.listed, wanted)
        within = torch.zeros_like(position)
        if len(self.listed):
            is_listed = self.listed[place.clamp(max=len(self.listed) - 1)] == wanted
            within = torch.where(is_listed, position % self.size, 0)
        return (place - self.first[stack]) * self.size + within

    def key(self, stack: Tensor, column: Tensor) -> Tensor:
        if not len(self.listed):
            return torch.zeros_like(column)
        place = (self.first[stack] + column // self.size).clamp(max=len(self.listed) - 1)
        return self.listed[place] % STRIDE * self.size + column % self.size


Columns = Stretch | Blocks


def _batch(layout: Tensor, sequence: Tensor) -> int:
    """A layout without a batch serves every sequence, padding tokens too."""
    return layout.shape[0] if layout.dim() == 3 else int(sequence.max()) + 1 if len(sequence) else 1
