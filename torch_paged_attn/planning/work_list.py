"""A batch as a flat list of items, each one tile of query rows against one tile of keys.

A row is a query token of one head of a group: `row = token * group_size + g`, so that a decode
step's heads share the keys they read. Rows of a sequence are cut into tiles of `tile_q`, its keys
into tiles of `tile_k`, and an item stands for each pair in which some row sees some key: cost
follows what is visible, whatever the mix of prefill and decode. The items of a query tile follow
one another; masks are a range of visible keys for each row.

Every row belongs to one tile, those of padding tokens and of sequences without keys too: their one
item shows no key, and makes the kernel write their empty result.
"""

import dataclasses

import torch
from torch import Tensor


@dataclasses.dataclass(frozen=True)
class WorkList:
    """`(num_items,)` and `(num_items, tile_q)` int64 or bool tensors; keys count from `first_key`.

    `rows` beyond the tile's last repeat it: they may be loaded, not stored (`is_row` is False). No
    row sees keys outside `[key_start, key_stop)`, and of these some row sees each.
    """

    tile_q: int
    tile_k: int
    sequence: Tensor  # (num_items,); the padding tokens are one sequence more
    first_key: Tensor  # (num_items,) within the sequence
    is_first: Tensor  # (num_items,) of its query tile
    is_last: Tensor  # (num_items,)
    key_start: Tensor  # (num_items,)
    key_stop: Tensor  # (num_items,)
    rows: Tensor  # (num_items, tile_q) in the whole batch
    is_row: Tensor  # (num_items, tile_q)
    row_start: Tensor  # (num_items, tile_q) the keys a row sees
    row_stop: Tensor  # (num_items, tile_q)
    position: Tensor  # (num_items, tile_q) of the query among the keys

    @property
    def num_items(self) -> int:
        """How many pairs of tiles there are."""
        return self.sequence.shape[0]


def _count_up(counts: Tensor) -> tuple[Tensor, Tensor]:
    """`[2, 3]` as which `[0, 0, 1, 1, 1]` and rank `[0, 1, 0, 1, 2]`."""
    which = torch.repeat_interleave(torch.arange(len(counts)), counts)
    rank = torch.arange(len(which)) - (counts.cumsum(0) - counts)[which]
    return which, rank


def _visible(position: Tensor, key_len: Tensor, left: int, right: int) -> tuple[Tensor, Tensor]:
    """The half-open range of keys that queries at these positions see."""
    start = torch.zeros_like(position) if left < 0 else (position - left).clamp(min=0)
    stop = key_len if right < 0 else torch.minimum(key_len, position + right + 1)
    return start, torch.maximum(stop, start)


def visible_range(
    cu_seqlens_q: Tensor,
    key_lens: Tensor,
    total_q: int,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> tuple[Tensor, Tensor]:
    """The half-open range of keys that each token sees, `(total_q,)` each; padding sees none."""
    starts = cu_seqlens_q.cpu().long()
    stops = torch.cat([starts[1:], torch.tensor([total_q])])
    key_lens = torch.cat([key_lens.cpu().long(), torch.tensor([0])])
    sequence, token = _count_up(stops - starts)
    lens = key_lens[sequence]
    position = lens - (stops - starts)[sequence] + token
    return _visible(position, lens, window_size_left, 0 if causal else window_size_right)


def build_work_list(
    cu_seqlens_q: Tensor,
    key_lens: Tensor,
    total_q: int,
    *,
    group_size: int,
    tile_q: int,
    tile_k: int,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
) -> WorkList:
    """Items in the order of their queries, then of their keys. Lengths are read on the host."""
    starts = cu_seqlens_q.cpu().long()
    stops = torch.cat([starts[1:], torch.tensor([total_q])])
    key_lens = torch.cat([key_lens.cpu().long(), torch.tensor([0])])
    past = key_lens - (stops - starts)
    left, right = window_size_left, 0 if causal else window_size_right

    num_rows = (stops - starts) * group_size
    sequence, tile = _count_up(-(-num_rows // tile_q))
    first_row = tile * tile_q
    last_row = torch.minimum(first_row + tile_q, num_rows[sequence]) - 1
    lens = key_lens[sequence]
    start, _ = _visible(past[sequence] + first_row // group_size, lens, left, right)
    _, stop = _visible(past[sequence] + last_row // group_size, lens, left, right)

    first_tile = start // tile_k
    num_key_tiles = (-(-stop // tile_k) - first_tile).clamp(min=1)
    query_tile, rank = _count_up(num_key_tiles)
    first_key = (first_tile[query_tile] + rank) * tile_k
    item_sequence = sequence[query_tile]

    local = first_row[query_tile, None] + torch.arange(tile_q)
    is_row = local <= last_row[query_tile, None]
    local = torch.minimum(local, last_row[query_tile, None])
    position = past[item_sequence, None] + local // group_size
    row_start, row_stop = _visible(position, lens[query_tile, None], left, right)
    # two rows that see nothing of this tile may bound it on either side: empty is [0, 0)
    row_start = (row_start - first_key[:, None]).clamp(0, tile_k)
    row_stop = (row_stop - first_key[:, None]).clamp(0, tile_k)
    sees = is_row & (row_start < row_stop)
    row_start, row_stop = row_start.where(sees, 0), row_stop.where(sees, 0)
    key_stop = row_stop.amax(1)
    return WorkList(
        tile_q=tile_q,
        tile_k=tile_k,
        sequence=item_sequence,
        first_key=first_key,
        is_first=rank == 0,
        is_last=rank == num_key_tiles[query_tile] - 1,
        key_start=row_start.where(sees, tile_k).amin(1).minimum(key_stop),
        key_stop=key_stop,
        rows=starts[item_sequence, None] * group_size + local,
        is_row=is_row,
        row_start=row_start,
        row_stop=row_stop,
        position=position - first_key[:, None],
    )
