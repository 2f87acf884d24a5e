"""The work of a batch as flat lists of items: a stack of query tiles against one tile of keys.

A row is a query token of one head of a group: `row = token * group_size + member`, so that a decode
step's heads share the keys they read. The rows of a span (a sequence, or the part of one that lies
in one row of a block-sparse layout) are cut into tiles of `tile_q`, and up to `depth` tiles are
stacked, since a stack reads a tile of keys once. There is an item for each tile of keys of which
some row of the stack sees some key, and the keys of a layout's blocks lie side by side: cost
follows the visible keys, whatever the mix of prefill and decode.

Every row belongs to one stack. A padding token, or a sequence without keys, has one item that shows
no key and makes the kernel write the empty result.
"""

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from torch_paged_attn.attention_call import BlockLayout
from torch_paged_attn.backends.neuron.kernels.query_tile import P
from torch_paged_attn.backends.neuron.key_columns import Blocks, Columns, Stretch, count_up


@dataclasses.dataclass(frozen=True)
class Batch:
    """Lengths of a batch, on the host, the window of its queries, and which heads share items."""

    cu_seqlens_q: Tensor  # (batch + 1,) int64
    key_lens: Tensor  # (batch,) int64
    total_q: int
    window_size_left: int
    window_size_right: int  # 0 where the call is causal
    group_size: int  # heads of a group: rows of a token
    planes: int = 1  # heads that are planned one by one; 1: together
    layout: BlockLayout | None = None
    tile_q: int = P

    def sequences(self) -> tuple[Tensor, Tensor, Tensor]:
        """First token, tokens and keys of each sequence; the padding tokens are one more."""
        stops = torch.cat([self.cu_seqlens_q[1:], torch.tensor([self.total_q])])
        lens = torch.cat([self.key_lens, torch.tensor([0])])
        return self.cu_seqlens_q, stops - self.cu_seqlens_q, lens

    def visible(self, position: Tensor, key_len: Tensor) -> tuple[Tensor, Tensor]:
        """The half-open range of keys that queries at these positions see."""
        left, right = self.window_size_left, self.window_size_right
        start = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
        stop = key_len if right < 0 else torch.minimum(key_len, position + right + 1)
        return start, torch.maximum(stop, start)


@dataclasses.dataclass(frozen=True)
class WorkList:
    """Stacks `(num_stacks, ...)` and items `(num_items, ...)`, int64 or bool tensors.

    Beyond a stack's last row, `token` and `member` repeat it: they may be loaded, and are not
    stored (`is_row` is False). No row of an item sees a column outside `[key_start, key_stop)`, and
    some row sees each column inside.
    """

    tile_k: int
    share: int  # KV heads among which a gather of keys divides its partitions
    sequence: Tensor  # (num_stacks,); the padding tokens are one sequence more
    plane: Tensor  # (num_stacks,) which head; 0 where all heads go together
    token: Tensor  # (num_stacks, depth, tile_q) in the whole batch
    member: Tensor  # (num_stacks, depth, tile_q) of the group
    is_row: Tensor  # (num_stacks, depth, tile_q)
    position: Tensor  # (num_stacks, depth, tile_q) among the keys
    stack: Tensor  # (num_items,)
    is_first: Tensor  # (num_items,) of its stack
    is_last: Tensor  # (num_items,)
    keys: Tensor  # (num_items, tile_k / grain) position that each grain of columns starts at
    key_start: Tensor  # (num_items,) columns
    key_stop: Tensor  # (num_items,)
    row_start: Tensor  # (num_items, depth, tile_q) the columns a row sees
    row_stop: Tensor  # (num_items, depth, tile_q)

    @property
    def depth(self) -> int:
        """Tiles in a stack."""
        return self.token.shape[1]

    @property
    def num_items(self) -> int:
        """Tiles of keys that are read."""
        return self.stack.shape[0]

    @property
    def run(self) -> int:
        """Keys of a tile that lie side by side and are gathered as one row."""
        return self.tile_k // self.keys.shape[1]

    @property
    def is_seen(self) -> Tensor:
        """Which columns some row sees, `(num_items, tile_k)`."""
        column = torch.arange(self.tile_k)
        return (column >= self.key_start[:, None]) & (column < self.key_stop[:, None])


@dataclasses.dataclass(frozen=True)
class KeyTile:
    """A size that tiles of keys may have."""

    keys: int
    run: int  # that lie side by side and are gathered as one row; divides `keys`, and blocks
    deepest: int  # stack of queries that has room beside such a tile
    share: int = 1  # KV heads that divide a gather of keys: its runs are as many times as long


@dataclasses.dataclass(frozen=True)
class Spans:
    """Consecutive tokens of one sequence and head, `(num_spans,)` each."""

    sequence: Tensor
    plane: Tensor
    first: Tensor  # token within the sequence
    length: Tensor
    layout_row: Tensor

    def of(self, chosen: Tensor) -> Self:
        """Those of a mask, or at indices."""
        tensors = {n: x[chosen] for n, x in vars(self).items() if isinstance(x, Tensor)}
        return dataclasses.replace(self, **tensors)


@dataclasses.dataclass(frozen=True)
class Stacks(Spans):
    """Up to `depth` tiles of rows of one span each, and the stretch of keys that they meet:
    `(num_stacks,)` tensors. Tiles of keys begin at multiples of `grid` keys; 0: of their own size.
    """

    first_row: Tensor
    stop_row: Tensor
    key_start: Tensor
    key_stop: Tensor
    depth: int
    grid: int = 0


def spans_of(batch: Batch) -> Spans:
    """The spans of every plane: sequences, cut at the rows of a layout; padding tokens are last."""
    layout = batch.layout
    _, lengths, key_lens = batch.sequences()
    sequence = torch.arange(len(lengths))
    first, last_row = torch.zeros_like(lengths), torch.zeros_like(lengths)
    row = torch.zeros_like(lengths)
    if layout is not None:
        # tokens in one row of the layout; those before the first key are in rows below 0
        size, past = layout.q_block_size, key_lens - lengths
        row = past.div(size, rounding_mode="floor")
        last_row = (key_lens - 1).div(size, rounding_mode="floor")
        sequence, rank = count_up(torch.where(lengths > 0, last_row - row + 1, 0))
        row = row[sequence] + rank
        first = (row * size - past[sequence]).clamp(min=0)
        lengths = torch.minimum((row + 1) * size - past[sequence], lengths[sequence]) - first
    plane = torch.arange(batch.planes).repeat_interleave(len(sequence))
    sequence, first, lengths, row = (
        x.repeat(batch.planes) for x in (sequence, first, lengths, row)
    )
    return Spans(sequence, plane, first, lengths, row)


def build_work_lists(
    batch: Batch, key_tiles: Sequence[KeyTile], depths: Sequence[int]
) -> list[WorkList]:
    """One list for each depth that is used; items in the order of their queries, then of their
    keys.

    `depths` ascend from 1: a span is cut into stacks of the last of them, and what is left takes
    the first that holds it. Of `key_tiles`, stacks take what `_share_out` says among those with
    room for them.
    """
    spans, key_lens = spans_of(batch), batch.sequences()[2]
    tiles = -(-spans.length * batch.group_size // batch.tile_q)
    span, rank = count_up(-(-tiles // depths[-1]))
    first_tile = rank * depths[-1]
    num_tiles = (tiles[span] - first_tile).clamp(max=depths[-1])
    lists = []
    for shallower, depth in zip((0, *depths), depths, strict=False):
        chosen = (num_tiles > shallower) & (num_tiles <= depth)
        if chosen.any():
            owner, first_row = spans.of(span[chosen]), first_tile[chosen] * batch.tile_q
            stacks = Stacks(
                **vars(owner),
                first_row=first_row,
                stop_row=owner.length * batch.group_size,
                key_start=torch.zeros_like(first_row),
                key_stop=key_lens[owner.sequence],
                depth=depth,
            )
            fitting = [tile for tile in key_tiles if depth <= tile.deepest]
            for tile, part in _share_out(batch, stacks, fitting):
                lists.append(list_items(batch, part, tile))
    return lists


# of the columns that the shortest tiles have in all, what longer ones may add
MORE_COLUMNS = 1 / 8
# what gathers fewer does not get a launch of its own for longer tiles: of Llama-3-8B's shapes these
# are 32 MiB, some 90 us of Trainium2's DMA engines
LAUNCH_COLUMNS = 8192


def _items(columns: Columns, tile_k: int) -> Tensor:
    """How many tiles of keys each stack meets: at least one, `(num_stacks,)`."""
    return (-(-columns.width // tile_k)).clamp(min=1)


def _share_out(
    batch: Batch, stacks: Stacks, key_tiles: Sequence[KeyTile]
) -> list[tuple[KeyTile, Stacks]]:
    """Which stacks are computed with tiles of which size; `key_tiles` go from the longest to the
    shortest.

    Since tiles are gathered whole, long ones may gather more columns than the shortest. All stacks
    get the first size that adds few columns. If there is none, stacks to which a longer tile adds
    few may have it, in a list of their own: if these gather half of all columns or more, and enough
    for a launch.
    """
    *longer, shortest = key_tiles
    rows = _rows_of(batch, stacks)

    def gathered(tile: KeyTile) -> Tensor:
        """Columns that each stack gathers."""
        return _items(_columns_of(batch, stacks, rows, tile), tile.keys) * tile.keys

    least = gathered(shortest)
    for tile in longer:
        candidate = gathered(tile)
        if int(candidate.sum()) <= (1 + MORE_COLUMNS) * int(least.sum()):
            return [(tile, stacks)]
        fits = candidate <= (1 + MORE_COLUMNS) * least
    if longer and int(least[fits].sum()) >= max(LAUNCH_COLUMNS, int(least.sum()) // 2):
        return [(longer[-1], stacks.of(fits)), (shortest, stacks.of(~fits))]
    return [(shortest, stacks)]


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of some stacks, `(num_stacks, depth * tile_q)` each; see `WorkList`."""

    token: Tensor  # within its sequence
    member: Tensor
    is_row: Tensor
    position: Tensor
    start: Tensor  # the keys it sees
    stop: Tensor


def _rows_of(batch: Batch, stacks: Stacks) -> Rows:
    """The rows of each stack; beyond its last row, that row again."""
    first_row, num_rows = stacks.first_row, stacks.depth * batch.tile_q
    _, lengths, key_lens = batch.sequences()
    key_len = key_lens[stacks.sequence]
    past = key_len - lengths[stacks.sequence]

    last_row = torch.minimum(first_row + num_rows, stacks.stop_row) - 1
    row = first_row[:, None] + torch.arange(num_rows)
    is_row = row <= last_row[:, None]
    row = torch.minimum(row, last_row[:, None])
    token = stacks.first[:, None] + row // batch.group_size
    position = past[:, None] + token
    key_start, key_stop = stacks.key_start[:, None], stacks.key_stop[:, None]
    start, stop = (
        edge.clamp(min=key_start).minimum(key_stop)
        for edge in batch.visible(position, key_len[:, None])
    )
    return Rows(token, row % batch.group_size, is_row, position, start, stop)


def _columns_of(batch: Batch, stacks: Stacks, rows: Rows, tile: KeyTile) -> Columns:
    """The columns of each stack, where tiles are of this size."""
    start, stop, layout = rows.start[:, 0], rows.stop[:, -1], batch.layout
    if layout is None:
        return Stretch.over(start, stop, stacks.grid or tile.keys)
    head = stacks.plane
    if layout.crow_indices.shape[-2] == 1:
        head = torch.zeros_like(head)
    return Blocks.listed_in(layout, stacks.sequence, head, stacks.layout_row, start, stop)


def list_items(batch: Batch, stacks: Stacks, tile: KeyTile) -> WorkList:
    """The items of these stacks; a stack that sees no key has one."""
    rows = _rows_of(batch, stacks)
    columns = _columns_of(batch, stacks, rows, tile)
    tile_k, grain = tile.keys, tile.run
    num_items = _items(columns, tile_k)
    stack, rank = count_up(num_items)
    number = torch.arange(len(num_items))[:, None]
    first_column = rank * tile_k
    bounds = []
    for edge in (rows.start, rows.stop):
        column = columns.before(number, edge)[stack] - first_column[:, None]
        bounds.append(column.clamp(0, tile_k))
    # rows that see nothing of this tile have their bounds on either side of it: they get [0, 0)
    sees = rows.is_row[stack] & (bounds[0] < bounds[1])
    row_start, row_stop = (bound.where(sees, 0) for bound in bounds)
    key_stop = row_stop.amax(1)
    key_start = row_start.where(sees, tile_k).amin(1).minimum(key_stop)

    # a grain that no row sees is replaced by one that some row sees, so that no other key is read
    column = torch.arange(0, tile_k, grain)
    longest = grain * tile.share
    low, high = (edge // longest * longest for edge in (key_start, (key_stop - 1).clamp(min=0)))
    within = column % longest
    column = (column - within).clamp(low[:, None], high[:, None]) + within + first_column[:, None]
    shape = (-1, stacks.depth, batch.tile_q)
    return WorkList(
        tile_k=tile_k,
        share=tile.share,
        sequence=stacks.sequence,
        plane=stacks.plane,
        token=(batch.sequences()[0][stacks.sequence, None] + rows.token).view(shape),
        member=rows.member.view(shape),
        is_row=rows.is_row.view(shape),
        position=rows.position.view(shape),
        stack=stack,
        is_first=rank == 0,
        is_last=rank == num_items[stack] - 1,
        keys=columns.key(stack[:, None], column),
        key_start=key_start,
        key_stop=key_stop,
        row_start=row_start.view(shape),
        row_stop=row_stop.view(shape),
    )
