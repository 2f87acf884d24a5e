"""How a backward is cut: rectangles of query rows and keys, and the launches that they belong to.

A span's rows (one sequence, one KV head) are cut into stacks as deep as SBUF holds them, its keys
into stretches. Each stack meets each stretch of which it sees a key in one rectangle: the rows that
see any of the stretch, and the keys that they see. Rectangle (i, j) of n by m goes to launch
(i - j) modulo the larger, so that no launch has a row, or a key, in two rectangles; launches that a
span does not need are left out. All this depends on the sequence alone, and so do the bits of its
gradients.

In a rectangle on the diagonal the first row is the first that sees the first key. There the kernel
skips pairs of tiles by what it is compiled for.
"""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.backends.neuron.kernels.query_tile import P
from torch_paged_attn.backends.neuron.key_columns import count_up
from torch_paged_attn.backends.neuron.work_list import Batch, Spans, Stacks


@dataclasses.dataclass(frozen=True)
class Sizes:
    """How large stacks, stretches and tiles are."""

    depths: tuple[int, ...]  # tiles of rows in a stack: the first that holds a rectangle's
    key_tiles: tuple[int, ...]  # the same for its keys, of which there may be several of the last


@dataclasses.dataclass(frozen=True)
class Rectangles:
    """`(num_rectangles,)` each; `kind` is what launches of one kernel have in common."""

    span: Tensor
    first_row: Tensor
    stop_row: Tensor
    key_start: Tensor
    key_stop: Tensor
    kind: "Kinds"
    grid: int  # keys begin at multiples of it

    def stacks(self, which: Tensor, depth: int) -> Stacks:
        """Some of them, as stacks of `depth` tiles."""
        return Stacks(
            self.span[which],
            self.first_row[which],
            self.stop_row[which],
            self.key_start[which],
            self.key_stop[which],
            depth,
            grid=self.grid,
        )


@dataclasses.dataclass(frozen=True)
class Kinds:
    """`(num_rectangles,)` each."""

    launch: Tensor
    depth: Tensor
    tile_k: Tensor
    is_diagonal: Tensor
    adds_dq: Tensor  # whether an earlier launch has a row of it
    adds_dkv: Tensor  # or a key

    def stacked(self) -> Tensor:
        """`(num_rectangles, 6)`."""
        parts = (getattr(self, field.name) for field in dataclasses.fields(self))
        return torch.stack([part.long() for part in parts], 1)


def cut(batch: Batch, spans: Spans, group_size: int, sizes: Sizes, grid: int) -> Rectangles:
    """The rectangles of all spans but the padding tokens'; keys begin at multiples of `grid`."""
    _, lengths, key_lens = batch.sequences()
    left, right = batch.window_size_left, batch.window_size_right
    length, key_len = spans.length, key_lens[spans.sequence]
    past = key_len - lengths[spans.sequence]
    stack_rows = sizes.depths[-1] * P
    num_stacks = -(-length * group_size // stack_rows)
    stretch = key_len.clamp(min=1)
    if left >= 0 or right >= 0:
        stretch = stretch.clamp(max=sizes.key_tiles[-1])
    num_stretches = -(-key_len // stretch)

    span, rank = count_up(num_stacks * num_stretches)
    i, j = rank // num_stretches[span], rank % num_stretches[span]
    start = j * stretch[span]
    stop = torch.minimum(start + stretch[span], key_len[span])
    # the tokens that see some key of [start, stop)
    first, last = torch.zeros_like(start), length[span]
    if right >= 0:
        first = (start - right - past[span]).clamp(min=0)
    if left >= 0:
        last = torch.minimum(last, stop + left - past[span])
    first_row = torch.maximum(i * stack_rows, first * group_size)
    stop_row = torch.minimum((i + 1) * stack_rows, last * group_size)
    sees = first_row < stop_row
    span, i, j, start, stop, first_row, stop_row = (
        part[sees] for part in (span, i, j, start, stop, first_row, stop_row)
    )
    # the keys that these rows see
    position = past[span] + first_row // group_size
    last_position = past[span] + (stop_row - 1) // group_size
    low, _ = batch.visible(position, key_len[span])
    _, high = batch.visible(last_position, key_len[span])
    key_start = torch.maximum(start, low) // grid * grid
    key_stop = torch.minimum(stop, high)

    num_tiles, num_keys = -(-(stop_row - first_row) // P), key_stop - key_start
    turns = torch.maximum(num_stacks, num_stretches)[span]
    launch = _ranks(span, (i - j) % turns)
    is_diagonal = torch.zeros_like(sees[sees])
    if right >= 0:
        is_diagonal = (position + right == key_start) & (first_row % group_size == 0)
    kind = Kinds(
        launch=launch,
        depth=_first_that_holds(num_tiles, sizes.depths),
        tile_k=_first_that_holds(num_keys, sizes.key_tiles),
        is_diagonal=is_diagonal,
        adds_dq=launch > _least(launch, span * (rank.max() + 1) + i if len(span) else span),
        adds_dkv=launch > _least(launch, span * (rank.max() + 1) + j if len(span) else span),
    )
    return Rectangles(span, first_row, stop_row, key_start, key_stop, kind, grid)


def visible_tiles(
    is_diagonal: bool, batch: Batch, group_size: int, depth: int, tile_k: int, width: int
) -> tuple[tuple[tuple[int, int], ...], ...]:
    """For every `width` keys of a tile, the tiles of rows that may see some: (level, columns).

    Such a tile sees none of the part's keys from `columns` on, a multiple of P. The last level
    comes first, and counts as one that sees all: it writes the sums to which the others add.
    """
    if not is_diagonal:
        return (tuple((level, width) for level in reversed(range(depth))),) * (tile_k // width)
    left, right = batch.window_size_left, batch.window_size_right
    found = []
    for first in range(0, tile_k, width):
        # the first row sees the first key, and each group_size rows one more
        begin, end = first * group_size // P, depth
        if left >= 0:
            end = min(end, -(-(first + width + left + right) * group_size // P))
        seen: list[tuple[int, int]] = []
        for level in reversed(range(begin, end)):
            keys = ((level + 1) * P - 1) // group_size + 1 - first
            seen.append((level, min(-(-keys // P) * P, width) if seen else width))
        found.append(tuple(seen))
    return tuple(found)


def _first_that_holds(count: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The smallest of `sizes`, which ascend, that is not below each count; else the largest."""
    limits = torch.tensor(sizes)
    return limits[torch.searchsorted(limits, count).clamp(max=len(sizes) - 1)]


def _ranks(group: Tensor, value: Tensor) -> Tensor:
    """The rank of each value among the different ones of its group."""
    if not len(group):
        return group
    size = int(value.max()) + 1
    different, place = (group * size + value).unique(return_inverse=True)
    owner = different // size
    return place - torch.searchsorted(owner, group)


def _least(value: Tensor, group: Tensor) -> Tensor:
    """The smallest value of each one's group."""
    _, place = group.unique(return_inverse=True)
    least = torch.full_like(place, 2**62).scatter_reduce(0, place, value, "amin")
    return least[place] if len(group) else value
