"""Keys that a rank's queries see, each row once, in the order of the packing.

Sequences share rows (`k_start`), so that what other ranks send is put where it is read: nothing is
brought into order afterwards. Rows travel as pieces of the sender's shard, by point-to-point
messages, or by copies into memory that all GPUs of a group see, which no multiprocessor works on.
For calls without gradients: those of rows that sequences share would be added up in the backward.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.distributed.ranks import Group, Ranks
from torch_paged_attn.distributed.shards import Shards
from torch_paged_attn.distributed.symmetric import symmetric_memory
from torch_paged_attn.ops.checks import fail

OP = "SharedKeys"

# pieces for a rank that are sent one by one
MOST_PIECES = 64


class Piece(NamedTuple):
    """Rows of one rank's shard, and where they lie among the keys of another."""

    source: int
    target: int
    first: int
    place: int
    rows: int


class SharedKeys:
    """Memory that all GPUs of a group see, into which ranks write the keys and values that others'
    queries see: `all_gather_attention(..., memory=)`. Two barriers a call; no multicast is used.

    Made once, for all layers and batches; calls of a group come in the same order on all ranks.
    May be captured in a CUDA graph.

    Args:
        group: a process group, or a mesh of one dimension, of GPUs that reach each other's memory.
        max_keys: rows that the queries of any rank see at most; at worst, all tokens of a batch.
        num_kv_heads, head_dim, head_dim_v: of the keys and values.
        dtype: theirs.
        device: this rank's GPU.

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
    ) -> None:
        self.ranks = Ranks.of(OP, group)
        device = torch.device(device)
        memory = symmetric_memory(OP, device, "omit `memory`")
        self.max_keys = max_keys
        self.widths = (num_kv_heads, head_dim), (num_kv_heads, head_dim_v)
        size = max_keys * num_kv_heads * (head_dim + head_dim_v)
        self.buffer = memory.empty(size, dtype=dtype, device=device)
        self.handle = memory.rendezvous(self.buffer, self.ranks.group)
        # copies to other GPUs run beside those to this one
        self.stream = torch.get_device_module(device).Stream(device)

    def check(self, op: str, k: Tensor, v: Tensor, ranks: Ranks) -> None:
        """Raise for keys that this was not made for."""
        came = (*k.shape[1:],), (*v.shape[1:],)
        if came != self.widths or k.dtype != self.buffer.dtype or ranks.group != self.ranks.group:
            made = f"was made for heads {self.widths} of {self.buffer.dtype} and its own group"
            fail(op, "memory", made, f"one for heads {came} of {k.dtype}")

    def write(
        self, pieces: Sequence[Piece], rows: Sequence[int], k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Write this rank's rows where all ranks want them; returns its own keys and values, valid
        until the next call. `rows`: of each rank's keys."""
        rank, device = self.ranks.rank, k.device
        if max(rows) > self.max_keys:
            fail(OP, "max_keys", f"is {self.max_keys}", f"at least {max(rows)}, which a rank sees")
        whole = [self._keys_of(target, rows[target]) for target in range(self.ranks.size)]
        own = [x for x in pieces if x.source == rank and x.target == rank]
        others = [x for x in pieces if x.source == rank and x.target != rank]
        # every rank has read what the call before left
        self.handle.barrier(channel=0)
        streams = torch.get_device_module(device)
        here = streams.current_stream(device)
        self.stream.wait_stream(here)
        with streams.stream(self.stream):
            for piece in others:
                for to, x in zip(whole[piece.target], (k, v), strict=True):
                    _place(to, piece).copy_(_rows(x, piece))
        targets = [_place(to, piece) for piece in own for to in whole[rank]]
        if targets:
            torch._foreach_copy_(targets, [_rows(x, piece) for piece in own for x in (k, v)])
        here.wait_stream(self.stream)
        self.handle.barrier(channel=1)
        return whole[rank]

    def _keys_of(self, rank: int, rows: int) -> tuple[Tensor, Tensor]:
        """The keys and values of a rank, in its memory."""
        of_keys, of_values = ((rows, *width) for width in self.widths)
        heads, dim = self.widths[0]
        behind = self.max_keys * heads * dim
        get, dtype = self.handle.get_buffer, self.buffer.dtype
        return get(rank, of_keys, dtype, 0), get(rank, of_values, dtype, behind)


class Placement:
    """Where the rows that this rank's queries see lie, and which rows go to whom.

    Attributes:
        k_start: `(sequences,)` int32, the first row of each sequence's keys.
    """

    def __init__(
        self, shards: Shards, needed: list[Tensor], first: Tensor, pieces: list[Piece]
    ) -> None:
        """`needed`: for each rank, which of the packing's rows its queries see. `first`: the
        packing's rows where the keys of this rank's sequences begin."""
        self.ranks = ranks = shards.ranks
        self.pieces = pieces
        self.rows = [int(x.sum()) for x in needed]
        self.travels = any(x.source != x.target for x in pieces)
        before = torch.nn.functional.pad(needed[ranks.rank].cumsum(0), (1, 0))
        self.k_start = shards.to_device(before[first].int())
        mine = [x for x in pieces if x.target == ranks.rank]
        # rows that lie here as they are wanted
        self.lies_here = mine[0] if len(mine) == 1 and mine[0].source == ranks.rank else None

    @classmethod
    def of(cls, shards: Shards, needed: list[Tensor], first: Tensor) -> "Placement | None":
        """None, on all ranks, where pieces are too many, or a rank would have nobody to talk to
        while others talk."""
        size = shards.ranks.size
        found = [_pieces(shards, needed[target], target) for target in range(size)]
        if max(map(len, found)) > MOST_PIECES:
            return None
        pieces = [x for of_target in found for x in of_target]
        talking = {rank for x in pieces if x.source != x.target for rank in (x.source, x.target)}
        if len(talking) not in (0, size):
            return None
        return cls(shards, needed, first, pieces)

    def fetch(self, k: Tensor, v: Tensor, memory: SharedKeys | None) -> tuple[Tensor, Tensor]:
        """Keys and values that this rank's queries see."""
        if self.travels and memory is not None:
            return memory.write(self.pieces, self.rows, k, v)
        rank, rows = self.ranks.rank, self.rows[self.ranks.rank]
        here = self.lies_here
        whole = tuple(
            x.new_empty(rows, *x.shape[1:]) if here is None else _rows(x, here) for x in (k, v)
        )
        operations = []
        for piece in self.pieces:
            if (piece.source == rank) == (piece.target == rank):
                continue
            is_sent = piece.source == rank
            other = self.ranks.global_rank(piece.target if is_sent else piece.source)
            for to, x in zip(whole, (k, v), strict=True):
                part = _rows(x, piece).contiguous() if is_sent else _place(to, piece)
                way = dist.isend if is_sent else dist.irecv
                operations.append(dist.P2POp(way, part, other, self.ranks.group))
        works = dist.batch_isend_irecv(operations) if operations else []
        if here is None:
            for piece in self.pieces:
                if piece.source == piece.target == rank:
                    for to, x in zip(whole, (k, v), strict=True):
                        _place(to, piece).copy_(_rows(x, piece))
        for work in works:
            work.wait()
        return whole[0], whole[1]


def _rows(x: Tensor, piece: Piece) -> Tensor:
    return x[piece.first : piece.first + piece.rows]


def _place(x: Tensor, piece: Piece) -> Tensor:
    return x[piece.place : piece.place + piece.rows]


def _pieces(shards: Shards, needed: Tensor, target: int) -> list[Piece]:
    """The rows that `needed` says, in the order of the packing, as pieces of shards."""
    at = needed.nonzero().flatten()
    owner, row = shards.owner_of_row[at], shards.row_of[at]
    starts = torch.ones(len(at), dtype=torch.bool)
    starts[1:] = (owner[1:] != owner[:-1]) | (row[1:] != row[:-1] + 1)
    places = starts.nonzero().flatten()
    if len(places) > MOST_PIECES:
        places = places[: MOST_PIECES + 1]  # too many, however they go on
    sizes = torch.cat([places[1:], torch.tensor([len(at)])]) - places
    columns = owner[places], row[places], places, sizes
    return [
        Piece(source, target, first, place, rows)
        for source, first, place, rows in zip(*(x.tolist() for x in columns), strict=True)
    ]
