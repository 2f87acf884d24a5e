"""Keys that a rank's queries see, each row once, in the order of the packing.

Sequences share rows (`k_start`), so that what other ranks send is put where it is read: nothing is
brought into order afterwards. Rows travel as pieces of the sender's shard, by point-to-point
messages, or by copies out of memory that all GPUs of a group see, which no multiprocessor works on.
For calls without gradients: those of rows that sequences share would be added up in the backward.
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

# pieces for a rank that are sent one by one
MOST_PIECES = 64

# bytes that a rank is sent from which on one head's go ahead of the others': attention to so many
# keys takes longer than the host does to launch two kernels for a call (0.6 ms), which is the cost
LEAST_AHEAD = 24 << 20
# rows of queries that fill the chip, so that the first head's kernel is that of all heads
LEAST_ROWS = 132 * 128
# KV heads that go ahead
AHEAD = 1


class Piece(NamedTuple):
    """Rows of one rank's shard, and where they lie among the keys of another, and among its own."""

    source: int
    target: int
    first: int
    place: int
    rows: int
    at_source: int


class Arriving(NamedTuple):
    """Keys and values of some heads, and the stream on which they are there."""

    heads: slice
    k: Tensor
    v: Tensor
    stream: Any


class Route(NamedTuple):
    """Where keys and values of some heads lie in this rank's memory, as rows and as pages of one
    slot, and what is copied there from which other memory."""

    heads: slice
    keys: tuple[Tensor, Tensor]
    pages: tuple[Tensor, Tensor]
    copies: list[tuple[Tensor, Tensor]]

    def copy(self) -> None:
        for to, source in self.copies:
            to.copy_(source)


class SharedKeys:
    """Memory that all GPUs of a group see, from which ranks copy the keys and values that their
    queries see: `all_gather_attention(..., memory=)`. No multicast is used.

    Where much travels the first head's keys go ahead, and are attended to while the others' travel.

    Made once, for all layers and batches; calls of a group come in the same order on all ranks.
    May be captured in a CUDA graph.

    Args:
        group: a process group, or a mesh of one dimension, of GPUs that reach each other's memory.
        max_keys: rows that the queries of any rank see at most; at worst, all tokens of a batch.
        num_kv_heads, head_dim, head_dim_v: of the keys and values.
        dtype: theirs.
        device: this rank's GPU.
        timeout: how long a rank waits for the others; then the device stops with an error.

    Raises:
        NotImplementedError: no such memory on this device, or not in this torch.
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
        # copies from other GPUs run beside kernels on this one
        self.stream = torch.get_device_module(device).Stream(device)
        is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
        self.least_ahead = LEAST_AHEAD if is_hopper else 1 << 62
        self.least_rows = LEAST_ROWS

    def check(self, op: str, k: Tensor, v: Tensor, ranks: Ranks) -> None:
        """Raise for keys that this was not made for."""
        came = (*k.shape[1:],), (*v.shape[1:],)
        if came != self.widths or k.dtype != self.buffer.dtype or ranks.group != self.ranks.group:
            made = f"was made for heads {self.widths} of {self.buffer.dtype} and its own group"
            fail(op, "memory", made, f"one for heads {came} of {k.dtype}")

    def bring(self, placement: "Placement", k: Tensor, v: Tensor, num_heads: int) -> list[Arriving]:
        """The keys and values that this rank's queries see, of all heads or of the first one and
        then of the others. Each is there on its stream, which the caller's waits for in the end;
        valid until the next call. `num_heads`: of queries."""
        rows, heads = placement.rows, k.shape[1]
        if max(rows) > self.max_keys:
            fail(OP, "max_keys", f"is {self.max_keys}", f"at least {max(rows)}, which a rank sees")
        is_much = placement.most_sent * _bytes_of_row(k, v) >= self.least_ahead
        fills = len(k) * num_heads * AHEAD >= self.least_rows * heads
        ahead = AHEAD if heads > AHEAD and is_much and fills else 0
        routes = placement.keep((self, ahead), lambda: self._routes(placement, ahead))
        streams = torch.get_device_module(k.device)
        here = streams.current_stream(k.device)
        # every rank has read what the call before left
        self._barrier(0)
        found: list[Arriving] = []
        for channel, route in enumerate(routes, 1):
            own = k[:, route.heads], v[:, route.heads]
            reshape_and_cache(*own, route.pages, placement.slots)
            # all ranks' own rows are where others find them
            self._barrier(channel)
            if len(routes) == 1:
                route.copy()
            else:
                # what came before is there, what comes now is on its way
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
        """What travels of the first `ahead` heads, and of the others."""
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
        """Rows `(rows, heads * (head_dim + head_dim_v))` in a rank's memory: the keys of a group of
        heads, then their values. Groups of heads follow each other.
        """
        width = self.widths[0][1] + self.widths[1][1]
        shape = rows, (group.stop - group.start) * width
        behind = group.start * width * self.max_keys
        return self.handle.get_buffer(rank, shape, self.buffer.dtype, behind)

    def _heads_of(self, x: Tensor, group: slice) -> tuple[Tensor, Tensor]:
        """The keys and values, each `(rows, heads, head_dim)`, of such rows."""
        heads = group.stop - group.start
        dim, dim_v = (width for _, width in self.widths)
        k, v = x.split([heads * dim, heads * dim_v], 1)
        return k.unflatten(1, (heads, dim)), v.unflatten(1, (heads, dim_v))


def _bytes_of_row(k: Tensor, v: Tensor) -> int:
    return k.shape[1] * (k.shape[2] + v.shape[2]) * k.itemsize


class Placement:
    """Where the rows that this rank's queries see lie, and which rows go to whom.

    Attributes:
        k_start: `(sequences,)` int32, the first row of each sequence's keys.
        slots: `(shards.rows,)` int64, where this rank's own rows lie; -1 for padding.
        most_sent: rows that the rank is sent which is sent the most.
    """

    def __init__(
        self, shards: Shards, needed: list[Tensor], first: Tensor, pieces: list[Piece]
    ) -> None:
        """`needed`: for each rank, which of the packing's rows its queries see. `first`: the
        packing's rows where the keys of this rank's sequences begin."""
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
        # rows that lie here as they are wanted
        self.lies_here = mine[0] if len(mine) == 1 and mine[0].source == ranks.rank else None

    @classmethod
    def of(cls, shards: Shards, needed: list[Tensor], first: Tensor) -> "Placement | None":
        """The placement; None, on all ranks, if there are too many pieces, if some rank would have
        no partner while others exchange, or if a rank does not see its own keys (others would then
        not find them).
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
        """What `make` returns, made once for all layers."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def fetch(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values that this rank's queries see, by messages."""
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
    """The rows that `needed` says, in the order of the packing, as pieces of shards; `places` says
    where each rank has the packing's rows among its own keys."""
    at = needed.nonzero().flatten()
    owner, row = shards.owner_of_row[at], shards.row_of[at]
    at_source = places[owner, at]
    starts = torch.ones(len(at), dtype=torch.bool)
    starts[1:] = (owner[1:] != owner[:-1]) | (row[1:] != row[:-1] + 1)
    starts[1:] |= at_source[1:] != at_source[:-1] + 1
    first = starts.nonzero().flatten()
    if len(first) > MOST_PIECES:
        first = first[: MOST_PIECES + 1]  # too many, however they go on
    sizes = torch.cat([first[1:], torch.tensor([len(at)])]) - first
    columns = owner[first], row[first], first, sizes, at_source[first]
    return [
        Piece(source, target, row, place, rows, there)
        for source, row, place, rows, there in zip(*(x.tolist() for x in columns), strict=True)
    ]
