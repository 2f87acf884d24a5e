"""How a backward is cut: rectangles of query rows and keys, and the launches that they belong to.

A span's rows (one sequence, one KV head) are cut into stacks as deep as SBUF holds them, its keys
into stretches. Each stack meets each stretch of which it sees a key in one rectangle: the rows that
see any of the stretch, and only these. Rectangle (i, j) of n by m goes to launch (i - j) modulo the
larger, so that no launch has a row, or a key, in two rectangles; launches that a span does not need
are left out. All this depends on the sequence alone, and so do the bits of its gradients.
"""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.backends.neuron.columns import count_up
from torch_paged_attn.backends.neuron.work_list import Batch, Spans, Stacks

# keys of a stretch where some are hidden from some rows, and how many stretches a span has before
# they grow
STRETCH = 1024
MOST_STRETCHES = 16

# tiles of keys: a span takes the first that holds it, else the last
KEY_TILES = (128, 512, 1024)


@dataclasses.dataclass(frozen=True)
class Rectangles:
    """`(num_rectangles,)` each."""

    span: Tensor
    first_row: Tensor
    stop_row: Tensor
    key_start: Tensor
    key_stop: Tensor
    launch: Tensor
    tile_k: Tensor
    adds_dq: bool  # whether some row, or some key, belongs to several
    adds_dkv: bool

    def chosen(self, which: Tensor, depth: int) -> Stacks:
        """Some of them, as stacks of `depth` tiles."""
        parts = self.span, self.first_row, self.stop_row, self.key_start, self.key_stop
        return Stacks(*(part[which] for part in parts), depth=depth)


def cut(
    batch: Batch, spans: Spans, group_size: int, stack_rows: int, tiles: tuple[int, ...]
) -> Rectangles:
    """The rectangles of all spans but the padding tokens'; `tiles` are the tiles of keys."""
    _, lengths, key_lens = batch.sequences()
    left, right = batch.window_size_left, batch.window_size_right
    length, key_len = spans.length, key_lens[spans.sequence]
    past = key_len - lengths[spans.sequence]
    num_stacks = -(-length * group_size // stack_rows)
    stretch = _stretch(key_len, left >= 0 or right >= 0)
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
    turns = torch.maximum(num_stacks, num_stretches)[span]
    limits = torch.tensor(tiles)
    fitting = torch.searchsorted(limits, key_len[span]).clamp(max=len(tiles) - 1)
    return Rectangles(
        span=span,
        first_row=first_row,
        stop_row=stop_row,
        key_start=start,
        key_stop=stop,
        launch=_ranks(span, (i - j) % turns),
        tile_k=limits[fitting],
        adds_dq=_has_equals(span, i),
        adds_dkv=_has_equals(span, j),
    )


def _stretch(key_len: Tensor, hides: bool) -> Tensor:
    """Keys of a stretch of each span: a multiple of every tile."""
    needed = (-(-key_len // STRETCH)).clamp(min=1)
    if hides:
        needed = -(-needed // MOST_STRETCHES)
    return needed * STRETCH


def _ranks(group: Tensor, value: Tensor) -> Tensor:
    """The rank of each value among the different ones of its group."""
    if not len(group):
        return group
    size = int(value.max()) + 1
    different, place = (group * size + value).unique(return_inverse=True)
    owner = different // size
    return place - torch.searchsorted(owner, group)


def _has_equals(group: Tensor, value: Tensor) -> bool:
    """Whether two members of a group have one value."""
    pairs = torch.stack([group, value], 1)
    return len(pairs.unique(dim=0)) < len(pairs)
