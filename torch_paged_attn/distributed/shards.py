"""`Shards`: which rank of a group has which tokens of a packed batch."""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.distributed.load_balance import SCHEMES, owners
from torch_paged_attn.distributed.ranks import Group, Ranks, agree
from torch_paged_attn.ops.checks import check_dtype, fail

OP = "Shards"


def on_host(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose new tensors are on the CPU, whatever torch's default device is."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with torch.device("cpu"):
            return function(*args, **kwargs)

    return wrapped


class Shards:
    """The distribution of a packed batch over the ranks of a group. Make it once for a batch and
    use it in all layers.

    Every rank has `rows` rows: its tokens in the order of the batch, then padding. With W ranks,
    `load_balance` decides which tokens these are:

        "contiguous"   rank r has the r-th of W parts of the batch; balanced without a causal mask
        "head_tail"    rank r has parts r and 2 W - 1 - r of 2 W; balanced for one long document
                       with a causal mask
        "documents"    each rank has whole documents and shares at most one with the next rank;
                       balanced for many documents with a causal mask. Only the keys of shared
                       documents are sent

    Args:
        cu_seqlens: `(documents + 1,)` int32, of the whole batch, the same on every rank. On an
            accelerator this constructor waits for it; pass a copy on the CPU to avoid that.
        group: a process group, a mesh of one dimension, or None for all processes.
        load_balance: as above.
        rows: the least number of rows per rank, if shapes must be the same for all batches.
        device: of the tensors that are passed later; that of `cu_seqlens` if omitted.

    Attributes:
        rows: number of rows of every rank.
        indices: `(tokens,)` int64, the rows of the batch that this rank has.
        positions: `(rows,)` int64, the position of each row in its document (for rotary
            embeddings); 0 for padding.
        cu_seqlens_q: `(documents + 1,)` int32, where each document's tokens start among this rank's
            rows.

    Raises:
        ValueError: an argument outside the above.
    """

    @on_host
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

        # every rank has its pieces in the order of the batch
        counts = self.bounds.diff(dim=1)
        per_token = self.owners.repeat(len(lengths)).repeat_interleave(counts.flatten())
        self.owned = [(per_token == rank).nonzero().flatten() for rank in range(ranks.size)]
        self.owner_of_row = per_token
        self.row_of = torch.empty(self.tokens, dtype=torch.int64)
        for rows_of_rank in self.owned:
            self.row_of[rows_of_rank] = torch.arange(len(rows_of_rank))
        self.rows = even
        # (ranks, documents, pieces of a rank): number of tokens, and below position of the first
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
        """Copy a CPU tensor to the device of the batch, without waiting for it."""
        if self.device.type == "cpu":
            return x
        return x.pin_memory().to(self.device, non_blocking=True)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """The result of `make()`, which is called once for each key and kept for this batch."""
        if key not in self.kept:
            self.kept[key] = make()
        return self.kept[key]

    def is_first(self, op: str) -> bool:
        """True when it is called for the first time with this `op` for this batch."""
        if op in self.called:
            return False
        self.called.add(op)
        return True

    def shard(self, x: Tensor) -> Tensor:
        """This rank's rows `(rows, ...)` of a tensor `(>= tokens, ...)` of the whole batch, with
        zeros in padding rows. Differentiable.
        """
        if x.shape[0] < self.tokens:
            fail(OP, "x.shape[0]", x.shape[0], f"at least the batch's {self.tokens} tokens")
        own = x.index_select(0, self.indices)
        padding = self.rows - len(self.indices)
        return torch.cat([own, own.new_zeros(padding, *own.shape[1:])]) if padding else own

    def unshard(self, x: Tensor) -> Tensor:
        """The whole batch `(tokens, ...)` on every rank, gathered from each rank's rows
        `(rows, ...)`. Differentiable: the gradients of all ranks are added up.
        """
        if x.shape[0] != self.rows:
            fail(OP, "x.shape[0]", x.shape[0], f"{self.rows}, as on every rank")
        return self.in_order(_Gather.apply(x, self.ranks))

    def in_order(self, x: Tensor) -> Tensor:
        """Rows of all ranks `(ranks * rows, ...)` in the order of the batch `(tokens, ...)`."""
        return x.index_select(0, self._gathered)

    def by_rank(self, x: Tensor) -> Tensor:
        """The inverse of `in_order`, with zeros in padding rows."""
        found = x.new_zeros(self.ranks.size * self.rows, *x.shape[1:])
        return found.index_copy(0, self._gathered, x)


def cumulative(counts: Tensor) -> Tensor:
    """`[2, 3]` as int32 `[0, 2, 5]`."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()


def _check(cu_seqlens: Tensor, size: int, load_balance: str, rows: int) -> None:
    check_dtype(OP, "cu_seqlens", cu_seqlens, (torch.int32,))
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1:
        fail(OP, "cu_seqlens", f"shape {tuple(cu_seqlens.shape)}", "(documents + 1,)")
    if cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
        fail(OP, "cu_seqlens", cu_seqlens.tolist(), "nondecreasing, from 0")
    if load_balance not in SCHEMES:
        fail(OP, "load_balance", repr(load_balance), f"one of {', '.join(SCHEMES)}")
    tokens = int(cu_seqlens[-1])
    if rows < 0 or 0 < rows * size < tokens:
        fail(OP, "rows", rows, f"0, or at least a rank's share of {tokens} tokens")


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
    """Every rank's `(n, ...)` concatenated: `(ranks * n, ...)`."""
    found = x.new_empty(ranks.size * x.shape[0], *x.shape[1:])
    gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
    gather(found, x.contiguous(), group=ranks.group)
    return found
