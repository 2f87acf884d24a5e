"""Exchange of keys and values: each rank gets the rows that its queries see.

Each rank sends every other rank the rows that the other's queries see, in one all-to-all of keys
and one of values, and puts its own and the received rows in the order of its sequences. With a
causal mask, a window, or whole documents, that is much less than an all-gather. The backward sends
the gradients of the rows back, in float32, and adds them up in the order of ranks.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.distributed.shards import Shards, cumulative, on_host
from torch_paged_attn.distributed.shared_keys import Placement

# up to so many contiguous pieces of rows are concatenated; more are gathered row by row
MOST_RUNS = 64


class Mask(NamedTuple):
    """The options that decide which keys a query may see."""

    causal: bool
    window_size_left: int
    window_size_right: int
    # whether there is an attn_bias, whose columns count keys from the start of the document
    from_first: bool
    # whether any option depends on positions
    by_position: bool


class Sequences(NamedTuple):
    """The sequences of one rank's call of `flash_varlen`, `(sequences,)` int64 each.

    A sequence has consecutive queries of one document, and the keys of this document that they see.
    """

    document: Tensor
    first: Tensor  # position of the first query
    queries: Tensor  # number of queries
    low: Tensor  # position of the first key
    high: Tensor  # position of the last key, plus 1


def sequences_of(shards: Shards, rank: int, mask: Mask) -> Sequences:
    """The sequences of a rank's call, in the order of its rows."""
    counts, first = shards.counts[rank], shards.first[rank]
    if not mask.by_position:  # all pieces of a document see all its keys: one sequence
        counts, first = counts.sum(1, keepdim=True), first[:, :1]
    elif counts.shape[1] == 2:  # two adjacent pieces are one sequence
        joined = (first[:, 0] + counts[:, 0] == first[:, 1]) & (counts > 0).all(1)
        both = torch.stack([counts.sum(1), torch.zeros_like(counts[:, 0])], 1)
        counts = torch.where(joined[:, None], both, counts)
    exists = counts > 0
    document = exists.nonzero()[:, 0]
    first, queries = first[exists], counts[exists]
    length = shards.lengths[document]
    low, high = torch.zeros_like(first), length
    if mask.by_position:
        last = first + queries
        if mask.causal or mask.window_size_right == 0:
            high = last
        elif mask.window_size_right > 0:
            high = length.minimum(last + mask.window_size_right)
        if mask.window_size_left >= 0 and not mask.from_first:
            low = (first - mask.window_size_left).clamp(min=0)
    return Sequences(document, first, queries, low, high)


class Exchange:
    """Which rows of keys ranks send each other, and in which order a rank's call reads them.

    Attributes (of this rank's call):
        documents: `(sequences,)` int64, the document of each sequence.
        lengths: cu_seqlens_q and cu_seqlens_k, `(sequences + 1,)` int32, and hints.
        q_position: `(sequences,)` int32; None if every sequence's last query is at the position of
            its last key.
        placement: for calls without gradients: an order in which each row is stored once; None if
            that cannot be used.
    """

    @on_host
    def __init__(self, shards: Shards, mask: Mask) -> None:
        self.ranks = ranks = shards.ranks
        rank, size = ranks.rank, ranks.size
        own = sequences_of(shards, rank, mask)
        self.documents = shards.to_device(own.document)
        keys_each = own.high - own.low
        self.lengths: dict[str, Any] = {
            "cu_seqlens_q": shards.to_device(cumulative(own.queries)),
            "cu_seqlens_k": shards.to_device(cumulative(keys_each)),
            "max_seqlen_q": int(own.queries.max()) if len(own.queries) else 0,
            "max_seqlen_k": int(keys_each.max()) if len(own.queries) else 0,
        }
        self.q_position = None
        if mask.by_position and (own.high != own.first + own.queries).any():
            self.q_position = shards.to_device((own.first - own.low).int())

        needed = [_needed(shards, sequences_of(shards, other, mask)) for other in range(size)]
        starts = shards.starts[own.document] + own.low
        self.placement = Placement.of(shards, needed, starts)
        self.own_rows = len(shards.indices)
        owner = shards.owner_of_row
        sent = [(needed[other] & (owner == rank)).nonzero().flatten() for other in range(size)]
        came = [(needed[rank] & (owner == other)).nonzero().flatten() for other in range(size)]
        sent[rank] = came[rank] = torch.empty(0, dtype=torch.int64)
        self.sent_rows = [len(x) for x in sent]
        self.came_rows = [len(x) for x in came]
        # the same on every rank
        self.travels = any(bool((needed[r] & (owner != r)).any()) for r in range(size))
        given = shards.row_of[torch.cat(sent)]
        self.sent = shards.to_device(given)
        start = int(given[0]) if len(given) else 0
        is_run = bool((given == start + torch.arange(len(given))).all())
        self.sent_run = slice(start, start + len(given)) if is_run else None

        # row of the batch -> its row here: own rows come first, then received ones
        index_of = torch.full((shards.tokens,), -1)
        index_of[shards.owned[rank]] = torch.arange(self.own_rows)
        index_of[torch.cat(came)] = self.own_rows + torch.arange(sum(self.came_rows))
        keys = index_of[_ranges(starts, own.high - own.low)]
        total = self.own_rows + sum(self.came_rows)
        self.in_order = len(keys) == total and bool((keys == torch.arange(total)).all())
        self.keys = shards.to_device(keys)
        self.runs = _runs(keys, self.own_rows)
        # for gradients: the first place of each row among the keys, and the second one of rows that
        # two sequences see
        first, second = _uses(keys, total)
        self.used = shards.to_device((first >= 0).nonzero().flatten())
        self.first_use = shards.to_device(first[first >= 0])
        self.used_twice = shards.to_device((second >= 0).nonzero().flatten())
        self.second_use = shards.to_device(second[second >= 0])

    def fetch(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of this rank's sequences, one sequence after the other."""
        if not self.travels and self.in_order:
            return k[: self.own_rows], v[: self.own_rows]
        return self._fetched(k), self._fetched(v)

    def _fetched(self, x: Tensor) -> Tensor:
        """Own and received rows in the order of this rank's sequences."""
        theirs = x.new_empty(sum(self.came_rows), *x.shape[1:])
        if self.travels:
            # contiguous rows are sent without gathering them first
            run = self.sent_run
            sent = x.index_select(0, self.sent) if run is None else x[run].contiguous()
            group = self.ranks.group
            dist.all_to_all_single(theirs, sent, self.came_rows, self.sent_rows, group=group)
        n = self.own_rows
        if self.runs is None:
            return torch.cat([x[:n], theirs]).index_select(0, self.keys)
        return torch.cat([x[a:b] if b <= n else theirs[a - n : b - n] for a, b in self.runs])

    def hand_back(self, gradient: Tensor) -> Tensor:
        """The gradients of this rank's own rows, `(own_rows, width)` float32: the sum over all
        ranks of the gradients of these rows. `gradient` is that of this rank's fetched rows.
        """
        total = self.own_rows + sum(self.came_rows)
        if self.in_order:
            rows = gradient.float()
        else:
            rows = gradient.new_zeros(total, *gradient.shape[1:], dtype=torch.float32)
            rows.index_copy_(0, self.used, gradient.index_select(0, self.first_use).float())
            other = gradient.index_select(0, self.second_use).float()
            rows.index_add_(0, self.used_twice, other)  # deterministic: no row occurs twice
        own, theirs = rows.split([self.own_rows, sum(self.came_rows)])
        if not self.travels:
            return own
        back = rows.new_empty(sum(self.sent_rows), rows.shape[1])
        group = self.ranks.group
        dist.all_to_all_single(back, theirs, self.sent_rows, self.came_rows, group=group)
        own = own.clone()
        parts = zip(back.split(self.sent_rows), self.sent.split(self.sent_rows), strict=True)
        for part, at in parts:  # rank by rank, so that the order of additions is fixed
            own.index_add_(0, at, part)
        return own


def _needed(shards: Shards, sequences: Sequences) -> Tensor:
    """`(tokens,)` bool: the rows of the batch whose keys at least one of the sequences sees."""
    edges = torch.zeros(shards.tokens + 1, dtype=torch.int32)
    starts = shards.starts[sequences.document]
    one = torch.ones_like(starts, dtype=torch.int32)
    edges.index_add_(0, starts + sequences.low, one)
    edges.index_add_(0, starts + sequences.high, -one)
    return edges.cumsum(0)[:-1] > 0


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """The concatenation of `arange(starts[i], starts[i] + lengths[i])` over all i."""
    before = lengths.cumsum(0) - lengths
    return torch.arange(int(lengths.sum())) + (starts - before).repeat_interleave(lengths)


def _runs(keys: Tensor, own_rows: int) -> list[tuple[int, int]] | None:
    """`keys` as contiguous ranges `(start, stop)`, each of own or of received rows only; None if
    there are more than `MOST_RUNS`.
    """
    if not len(keys):
        return None
    follows = (keys[1:] == keys[:-1] + 1) & ((keys[1:] < own_rows) == (keys[:-1] < own_rows))
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), (~follows).nonzero().flatten() + 1])
    if len(starts) > MOST_RUNS:
        return None
    stops = torch.cat([starts[1:], torch.tensor([len(keys)])]) - 1
    return [(int(keys[a]), int(keys[b]) + 1) for a, b in zip(starts, stops, strict=True)]


def _uses(keys: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """For each of `total` rows, the indices of its first and of its second occurrence in `keys`; -1
    if there is none.
    """
    at = torch.arange(len(keys))
    first = torch.full((total,), len(keys)).scatter_reduce(0, keys, at, "amin")
    last = torch.full((total,), -1).scatter_reduce(0, keys, at, "amax")
    first[last < 0] = -1
    return first, torch.where(last > first, last, -1)


class Fetch(torch.autograd.Function):
    """`Exchange.fetch`, differentiable."""

    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, exchange: Exchange) -> tuple[Tensor, Tensor]:
        ctx.exchange = exchange
        ctx.dtype = k.dtype
        ctx.rows = len(k)
        return exchange.fetch(k, v)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        dk, dv = gradients
        both = ctx.exchange.hand_back(torch.cat([dk.flatten(1), dv.flatten(1)], 1))
        padding = ctx.rows - len(both)
        both = torch.cat([both, both.new_zeros(padding, both.shape[1])]) if padding else both
        width = dk.shape[1] * dk.shape[2]
        found_k = both[:, :width].to(ctx.dtype).unflatten(1, dk.shape[1:])
        return found_k, both[:, width:].to(ctx.dtype).unflatten(1, dv.shape[1:]), None
