"""A packed batch, cut over the ranks of a group: who has which tokens, and what they attend to."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.distributed.load_balance import SCHEMES, owners
from torch_paged_attn.distributed.ranks import Group, Ranks, agree
from torch_paged_attn.ops.checks import check_dtype, fail

OP = "Shards"


class Shards:
    """The tokens of a packed batch over the ranks of a group, made once for a batch and used by all
    its layers.

    Every rank has `rows` rows: its tokens in the order of the packing, then padding. Whole
    documents or pieces of them, as `load_balance` says:

        "contiguous"   rank r has the r-th part of the packing; balanced where nothing is causal
        "head_tail"    parts r and 2 W - 1 - r of 2 W: for one long document, causal
        "documents"    whole documents, and one cut between each rank and the next: for packs of
                       many documents, causal, of which only the keys of cut ones travel

    Args:
        cu_seqlens: `(documents + 1,)` int32, of the whole batch, the same on every rank. On an
            accelerator it is read once, here; a copy on the CPU saves the wait.
        group: a process group, a mesh of one dimension, or None for all processes.
        load_balance: as above.
        rows: tokens of a rank at least, where shapes have to be the same from batch to batch.
        device: of the tensors to come; that of `cu_seqlens` if omitted.

    Attributes:
        rows: rows of every rank.
        indices: `(tokens,)` int64, the rows of the packing that this rank has.
        positions: `(rows,)` int64, where each stands in its document (for rotary embeddings); 0 for
            padding.
        cu_seqlens_q: `(documents + 1,)` int32: documents among this rank's rows.

    Raises:
        ValueError: an argument outside the above.
    """

    def __init__(
        self,
        cu_seqlens: Tensor,
        group: Group = None,
        *,
        load_balance: str = "head_tail",
        rows: int = 0,
        device: torch.device | str | None = None,
    ) -> None:
        self.ranks = ranks = Ranks.of(OP, group)
        self.device = torch.device(device) if device is not None else cu_seqlens.device
        given = cu_seqlens.detach().cpu() if isinstance(cu_seqlens, Tensor) else cu_seqlens
        agree(
            *(OP, ranks, self.device, (_listed(given), load_balance, rows)),
            lambda: _check(given, ranks.size, load_balance, rows),
            is_first=True,
        )
        self.called: set[str] = set()
        self.load_balance = load_balance
        bounds = given.long()
        self.lengths = lengths = bounds.diff()
        self.starts = bounds[:-1]
        self.tokens = int(bounds[-1])
        even = max(rows, -(-self.tokens // ranks.size))
        cut = SCHEMES[load_balance]
        self.bounds = cut(lengths, ranks.size, even)  # (documents, chunks + 1)
        chunks = self.bounds.shape[1] - 1
        self.owners = torch.tensor(owners(chunks, ranks.size))

        # pieces in the order of the packing, which is every rank's order
        counts = self.bounds.diff(dim=1)
        per_token = self.owners.repeat(len(lengths)).repeat_interleave(counts.flatten())
        self.owned = [(per_token == rank).nonzero().flatten() for rank in range(ranks.size)]
        self.owner_of_row = per_token
        self.row_of = torch.empty(self.tokens, dtype=torch.int64)
        for rows_of_rank in self.owned:
            self.row_of[rows_of_rank] = torch.arange(len(rows_of_rank))
        self.rows = even
        # (ranks, documents, pieces of a rank): tokens
        mine = [(self.owners == rank).nonzero().flatten() for rank in range(ranks.size)]
        self.counts = torch.stack([counts[:, chunk] for chunk in mine])
        self.first = torch.stack([self.bounds[:, :-1][:, chunk] for chunk in mine])

        own = self.owned[ranks.rank]
        self.indices = self.to_device(own)
        document = torch.arange(len(lengths)).repeat_interleave(lengths)[own]
        positions = torch.zeros(self.rows, dtype=torch.int64)
        positions[: len(own)] = own - self.starts[document]
        self.positions = self.to_device(positions)
        self.cu_seqlens_q = self.to_device(cumulative(self.counts[ranks.rank].sum(-1)))
        gathered = self.owner_of_row * self.rows + self.row_of
        self._gathered = self.to_device(gathered)
        self.kept: dict[Any, Any] = {}

    def to_device(self, x: Tensor) -> Tensor:
        """A tensor of the host on the device of the batch, without a wait."""
        if self.device.type == "cpu":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns, made once for this batch."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def is_first(self, op: str) -> bool:
        """Whether this is the first time that `is_first` is called for this batch and scheme."""
        if op in self.called:
            return False
        self.called.add(op)
        return True

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows `(rows, ...)` of a tensor `(tokens or more, ...)` of the whole batch;
        zeros for padding. Differentiable.
        """
        if x.shape[0] < self.tokens:
            fail(OP, "x", f"has {x.shape[0]} rows", f"the batch's {self.tokens} tokens, or more")
        own = x.index_select(0, self.indices)
        padding = self.rows - len(self.indices)
        return torch.cat([own, own.new_zeros(padding, *own.shape[1:])]) if padding else own

    def unshard(self, x: Tensor) -> Tensor:
        """The whole batch `(tokens, ...)` on every rank, of each rank's rows `(rows, ...)`. Its
        gradients add up those of all ranks.
        """
        if x.shape[0] != self.rows:
            fail(OP, "x", f"has {x.shape[0]} rows", f"{self.rows}, as every rank")
        return self.in_order(_Gather.apply(x, self.ranks))

    def in_order(self, x: Tensor) -> Tensor:
        """`(tokens, ...)` in the packing's order, of `(ranks * rows, ...)` in that of the ranks."""
        return x.index_select(0, self._gathered)

    def by_rank(self, x: Tensor) -> Tensor:
        """The way back: zeros for padding."""
        found = x.new_zeros(self.ranks.size * self.rows, *x.shape[1:])
        return found.index_copy(0, self._gathered, x)


def cumulative(counts: Tensor) -> Tensor:
    """`[2, 3]` as int32 `[0, 2, 5]`."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def _check(cu_seqlens: Tensor, size: int, load_balance: str, rows: int) -> None:
    check_dtype(OP, "cu_seqlens", cu_seqlens, (torch.int32,))
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        fail(OP, "cu_seqlens", f"has shape {tuple(cu_seqlens.shape)}", "(documents + 1,)")
    if cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
        fail(OP, "cu_seqlens", "falls, or does not start at 0", "nondecreasing, from 0")
    if load_balance not in SCHEMES:
        fail(OP, "load_balance", f"is {load_balance!r}", ", ".join(SCHEMES))
    tokens = int(cu_seqlens[-1])
    if rows < 0 or 0 < rows * size < tokens:
        fail(OP, "rows", f"is {rows}", f"0, or at least a rank's share of {tokens} tokens")


def _listed(x: Any) -> Any:
    return x.tolist() if isinstance(x, Tensor) else x


class _Gather(torch.autograd.Function):
    """All-gather along the first dimension; its gradient is a reduce-scatter."""

    @staticmethod
    def forward(ctx, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return all_gather(x, ranks)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ranks = ctx.ranks
        own = gradient.new_empty(gradient.shape[0] // ranks.size, *gradient.shape[1:])
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        reduce_scatter(own, gradient.contiguous(), group=ranks.group)
        return own, None


def all_gather(x: Tensor, ranks: Ranks) -> Tensor:
    """`(ranks * n, ...)` of every rank's `(n, ...)`."""
    found = x.new_empty(ranks.size * x.shape[0], *x.shape[1:])
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(found, x.contiguous(), group=ranks.group)
    return found
