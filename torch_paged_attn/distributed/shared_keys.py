"""Exchange of keys and values without gradients: each row that a rank's queries see is stored once.

Rows are in the order of the batch, and sequences that see the same rows share them (`k_start`). So
received rows go directly to where attention reads them, and need no reordering. Contiguous pieces
of another rank's rows come as point-to-point messages (`Placement.fetch`), or as copies from
symmetric memory by the GPU's copy engines (`SharedKeys`), which leave its multiprocessors free.
Gradients are not supported, because those of shared rows would have to be added up.
"""

import datetime
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.distributed.ranks import Group, Ranks
from torch_paged_attn.distributed.shards import Shards
from torch_paged_attn.distributed.symmetric import TIMEOUT, symmetric_memory
from torch_paged_attn.ops import reshape_and_cache
from torch_paged_attn.ops.checks import fail

OP = "SharedKeys"

# the largest number of pieces that a rank gets
MOST_PIECES = 64

# With many keys, those of the first KV heads (AHEAD of them) are copied first, and attention to
# them runs while the others are copied. That costs two kernel launches per call, 0.6 ms on the
# host, so it is done if a rank receives at least LEAST_AHEAD bytes, attention to which takes
# longer, and if the first heads have LEAST_ROWS rows of queries, which occupy the whole GPU.
AHEAD = 1
LEAST_AHEAD = 24 << 20
LEAST_ROWS = 132 * 128


class Piece(NamedTuple):
    """Contiguous rows that one rank sends to another, or keeps."""

    source: int  # the rank that has the rows
    target: int  # the rank whose queries see them
    first: int  # the first row in the source's shard
    place: int  # the first row among the target's keys
    rows: int  # how many
    at_source: int  # the first row among the source's own keys


class Arriving(NamedTuple):
    """Keys and values of some KV heads, and the CUDA stream on which their copies are made."""

    heads: slice
    k: Tensor
    v: Tensor
    stream: Any


class Route(NamedTuple):
    """The exchange of keys and values of some KV heads through symmetric memory.

    keys: k and v in this rank's memory, `(rows, heads, head_dim)` each
    pages: the same memory as a paged cache with page_size 1, for `reshape_and_cache`
    copies: (here, there), views of this rank's and of another rank's memory
    """

    heads: slice
    keys: tuple[Tensor, Tensor]
    pages: tuple[Tensor, Tensor]
    copies: list[tuple[Tensor, Tensor]]

    def copy(self) -> None:
        for to, source in self.copies:
            to.copy_(source)


class SharedKeys:
    """Symmetric memory, which all GPUs of a group can read, for `all_gather_attention(...,
    memory=)`: each rank copies the keys and values that its queries see out of the other ranks'
    memory. It does not use NVLink multicast.

    With many keys, attention of the first KV head starts while the keys of the others are copied.

    Make one object and use it in all layers and batches. All ranks have to call it in the same
    order. Calls can be captured in a CUDA graph.

    Args:
        group: a process group, or a mesh of one dimension, of GPUs with access to each other's
            memory.
        max_keys: the largest number of rows that the queries of a rank see; all tokens of a batch
            are always enough.
        num_kv_heads, head_dim, head_dim_v, dtype: of the keys and values.
        device: this rank's GPU.
        timeout: how long a rank waits for the others; after that the GPU reports an error.

    Raises:
        NotImplementedError: the device or this torch has no symmetric memory.
    """

    def __init__(
        self,
        group: Group,
        max_keys: int,
        num_kv_heads: int,
        head_dim: int,
        head_dim_v: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        timeout: datetime.timedelta = TIMEOUT,
    ) -> None:
        self.ranks = Ranks.of(OP, group)
        device = torch.device(device)
        memory = symmetric_memory(OP, device, "omit `memory`")
        self.max_keys = max_keys
        self.widths = (num_kv_heads, head_dim), (num_kv_heads, head_dim_v)
        size = max_keys * num_kv_heads * (head_dim + head_dim_v)
        self.buffer = memory.empty(size, dtype=dtype, device=device)
        self.handle = memory.rendezvous(self.buffer, self.ranks.group)
        self.milliseconds = round(timeout.total_seconds() * 1000)
        # copies from other GPUs run on this stream, at the same time as kernels
        self.stream = torch.get_device_module(device).Stream(device)
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        self.least_ahead = LEAST_AHEAD if is_hopper else 1 << 62
        self.least_rows = LEAST_ROWS

    def check(self, op: str, k: Tensor, v: Tensor, ranks: Ranks) -> None:
        """Raise ValueError for keys of other sizes, or another group, than this was made for."""
        widths = (*k.shape[1:],), (*v.shape[1:],)
        if widths != self.widths or k.dtype != self.buffer.dtype or ranks.group != self.ranks.group:
            got = f"one for heads {self.widths} of {self.buffer.dtype} and its own group"
            fail(op, "memory", got, f"SharedKeys for heads {widths} of {k.dtype}")

    def bring(self, placement: "Placement", k: Tensor, v: Tensor, num_heads: int) -> list[Arriving]:
        """Copy the keys and values that this rank's queries see: of all heads in one part, or of
        the first head and of the others in two.

        k, v: this rank's rows; num_heads: query heads

        A part may be used on its own stream only, until the current stream has waited for that.
        Parts are valid until the next call.
        """
        rows, heads = placement.rows, k.shape[1]
        if max(rows) > self.max_keys:
            fail(OP, "max_keys", self.max_keys, f"at least {max(rows)}, which a rank sees")
        is_much = placement.most_sent * _bytes_of_row(k, v) >= self.least_ahead
        fills = len(k) * num_heads * AHEAD >= self.least_rows * heads
        ahead = AHEAD if heads > AHEAD and is_much and fills else 0
        routes = placement.keep((self, ahead), lambda: self._routes(placement, ahead))
        streams = torch.get_device_module(k.device)
        here = streams.current_stream(k.device)
        # no rank may overwrite its rows before all ranks have read those of the previous call
        self._barrier(0)
        found: list[Arriving] = []
        for channel, route in enumerate(routes, 1):
            own = k[:, route.heads], v[:, route.heads]
            reshape_and_cache(*own, route.pages, placement.slots)
            # all ranks have written their own rows
            self._barrier(channel)
            if len(routes) == 1:
                route.copy()
            else:
                # the current stream waits for the first part, while the second one is copied
                if found:
                    here.wait_stream(self.stream)
                self.stream.wait_stream(here)
                with streams.stream(self.stream):
                    route.copy()
            is_last = channel == len(routes) > 1
            stream = self.stream if is_last else here
            found.append(Arriving(route.heads, route.keys[0], route.keys[1], stream))
        return found

    def _routes(self, placement: "Placement", ahead: int) -> list["Route"]:
        """The routes of the first `ahead` heads and of the others; one route if `ahead` is 0."""
        rows, rank, heads = placement.rows, self.ranks.rank, self.widths[0][0]
        groups = [slice(0, ahead), slice(ahead, heads)] if ahead else [slice(0, heads)]
        found = []
        for group in groups:
            memory = [self._of(other, rows[other], group) for other in range(len(rows))]
            copies = [
                (_rows(memory[rank], x.place, x.rows), _rows(memory[x.source], x.at_source, x.rows))
                for x in placement.pieces
                if x.target == rank and x.source != rank
            ]
            k, v = self._heads_of(memory[rank], group)
            found.append(Route(group, (k, v), (k.unsqueeze(2), v.unsqueeze(2)), copies))
        return found

    def _barrier(self, channel: int) -> None:
        self.handle.barrier(channel=channel, timeout_ms=self.milliseconds)

    def _of(self, rank: int, rows: int, group: slice) -> Tensor:
        """The part of a rank's memory that holds the heads `group`:
        `(rows, heads * (head_dim + head_dim_v))`, where a row has the keys and then the values.
        """
        width = self.widths[0][1] + self.widths[1][1]
        shape = rows, (group.stop - group.start) * width
        behind = group.start * width * self.max_keys
        return self.handle.get_buffer(rank, shape, self.buffer.dtype, behind)

    def _heads_of(self, x: Tensor, group: slice) -> tuple[Tensor, Tensor]:
        """The keys and values, each `(rows, heads, head_dim)`, of the rows that `_of` returns."""
        heads = group.stop - group.start
        dim, dim_v = (width for _, width in self.widths)
        k, v = x.split([heads * dim, heads * dim_v], 1)
        return k.unflatten(1, (heads, dim)), v.unflatten(1, (heads, dim_v))


def _bytes_of_row(k: Tensor, v: Tensor) -> int:
    return k.shape[1] * (k.shape[2] + v.shape[2]) * k.itemsize


class Placement:
    """The order of the keys that each rank's queries see, and which rows each rank sends to which.

    Attributes:
        k_start: `(sequences,)` int32, the row where the keys of each of this rank's sequences
            start.
        slots: `(shards.rows,)` int64, the place of each of this rank's own rows among its keys;
            -1 for rows that it does not see, and for padding.
        most_sent: the largest number of rows that any rank receives.
    """

    def __init__(
        self, shards: Shards, needed: list[Tensor], first: Tensor, pieces: list[Piece]
    ) -> None:
        """needed: for each rank `(tokens,)` bool, the rows of the batch that its queries see
        first: `(sequences,)`, the row of the batch where the keys of each own sequence start
        """
        self.ranks = ranks = shards.ranks
        self.pieces = pieces
        self.kept: dict[Any, Any] = {}
        self.rows = [int(x.sum()) for x in needed]
        self.travels = any(x.source != x.target for x in pieces)
        before = torch.nn.functional.pad(needed[ranks.rank].cumsum(0), (1, 0))
        self.k_start = shards.to_device(before[first].int())
        slots = torch.full((shards.rows,), -1)
        own_rows = shards.owned[ranks.rank]
        slots[: len(own_rows)] = torch.where(needed[ranks.rank][own_rows], before[own_rows], -1)
        self.slots = shards.to_device(slots)
        sent = [0] * ranks.size
        for x in pieces:
            sent[x.target] += x.rows if x.source != x.target else 0
        self.most_sent = max(sent)
        mine = [x for x in pieces if x.target == ranks.rank]
        # the piece, if all keys are one piece of this rank's own rows, which need not be copied
        self.lies_here = mine[0] if len(mine) == 1 and mine[0].source == ranks.rank else None

    @classmethod
    def of(cls, shards: Shards, needed: list[Tensor], first: Tensor) -> "Placement | None":
        """The placement. None, on all ranks, if a rank gets more than `MOST_PIECES` pieces; if some
        ranks exchange rows and others do not; or if a rank's queries do not see all its own keys,
        because others copy them from there.
        """
        size = shards.ranks.size
        places = torch.stack([x.cumsum(0) - 1 for x in needed])
        is_own = all(bool(needed[rank][shards.owned[rank]].all()) for rank in range(size))
        found = [_pieces(shards, needed[target], target, places) for target in range(size)]
        if max(map(len, found)) > MOST_PIECES:
            return None
        pieces = [x for of_target in found for x in of_target]
        talking = {rank for x in pieces if x.source != x.target for rank in (x.source, x.target)}
        if len(talking) not in (0, size) or not is_own:
            return None
        return cls(shards, needed, first, pieces)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make()`, which is called once for each key."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def fetch(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Send and receive messages; return the keys and values that this rank's queries see."""
        rank, rows = self.ranks.rank, self.rows[self.ranks.rank]
        here = self.lies_here
        whole = tuple(
            x.new_empty(rows, *x.shape[1:]) if here is None else _sent(x, here) for x in (k, v)
        )
        operations = []
        for piece in self.pieces:
            if (piece.source == rank) == (piece.target == rank):
                continue
            is_sent = piece.source == rank
            other = self.ranks.global_rank(piece.target if is_sent else piece.source)
            for to, x in zip(whole, (k, v), strict=True):
                part = _sent(x, piece).contiguous() if is_sent else _place(to, piece)
                way = dist.isend if is_sent else dist.irecv
                operations.append(dist.P2POp(way, part, other, self.ranks.group))
        works = dist.batch_isend_irecv(operations) if operations else []
        if here is None:
            for piece in self.pieces:
                if piece.source == piece.target == rank:
                    for to, x in zip(whole, (k, v), strict=True):
                        _place(to, piece).copy_(_sent(x, piece))
        for work in works:
            work.wait()
        return whole[0], whole[1]


def _rows(x: Tensor, first: int, rows: int) -> Tensor:
    return x[first : first + rows]


def _sent(x: Tensor, piece: Piece) -> Tensor:
    return _rows(x, piece.first, piece.rows)


def _place(x: Tensor, piece: Piece) -> Tensor:
    return _rows(x, piece.place, piece.rows)


def _pieces(shards: Shards, needed: Tensor, target: int, places: Tensor) -> list[Piece]:
    """The rows of the batch that rank `target` sees, as contiguous pieces of the ranks' shards.

    needed: `(tokens,)` bool, the rows that it sees
    places: `(ranks, tokens)`, the place of each row of the batch among a rank's keys
    """
    at = needed.nonzero().flatten()
    owner, row = shards.owner_of_row[at], shards.row_of[at]
    at_source = places[owner, at]
    starts = torch.ones(len(at), dtype=torch.bool)
    starts[1:] = (owner[1:] != owner[:-1]) | (row[1:] != row[:-1] + 1)
    starts[1:] |= at_source[1:] != at_source[:-1] + 1
    first = starts.nonzero().flatten()
    if len(first) > MOST_PIECES:
        first = first[: MOST_PIECES + 1]  # the caller only needs to know that there are too many
    sizes = torch.cat([first[1:], torch.tensor([len(at)])]) - first
    columns = owner[first], row[first], first, sizes, at_source[first]
    return [
        Piece(source, target, row, place, rows, there)
        for source, row, place, rows, there in zip(*(x.tolist() for x in columns), strict=True)
    ]
