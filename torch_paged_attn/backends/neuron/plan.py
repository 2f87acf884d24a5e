"""The tables of a call's work lists, planned on the host from its metadata.

The layers of a step have equal metadata, and share one plan. It is found by the metadata's values,
which every call reads on the host. That waits for the device; `keep_plans` is for callers who
promise not to change values without PyTorch's knowledge, and so need not wait.
"""

import contextlib
import contextvars
import dataclasses
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, BlockLayout, key_lengths
from torch_paged_attn.backends.neuron.kernels.query_tile import P
from torch_paged_attn.backends.neuron.paged_kv import PagedKV
from torch_paged_attn.backends.neuron.tables import WorkInfo, lay_out
from torch_paged_attn.backends.neuron.tile_sizes import DEPTHS, TileSizes
from torch_paged_attn.backends.neuron.work_list import Batch, WorkList, build_work_lists
from torch_paged_attn.lru import LRU

T = TypeVar("T")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


class HostCopies:
    """Host copies of tensors, each read once for as long as its tensor lives in one version.

    A write through `tensor.data` or a raw pointer leaves the version as it is and is not seen.
    Inference tensors have no version: they are read every time.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy as old as the tensor's version, or younger."""
        if tensor.is_inference():
            return _copy(tensor)
        place, version = id(tensor), tensor._version
        known = self._copies.get(place)
        if known is None or known[0]() is not tensor or known[1] != version:
            forget = weakref.ref(tensor, lambda _: self._copies.pop(place, None))
            known = self._copies[place] = (forget, version, _copy(tensor))
        return known[2]


_kept: contextvars.ContextVar[HostCopies | None] = contextvars.ContextVar("_kept", default=None)


@contextlib.contextmanager
def keep_plans() -> Iterator[None]:
    """Within it, a metadata tensor that was read is not read again until its version changes.

    The layers of a step then wait for the device once. The caller promises that lengths,
    block tables and layouts change by PyTorch's in-place operations only: a write through
    `tensor.data` or a raw pointer is not noticed, and the result is that of the old values.
    """
    token = _kept.set(_kept.get() or HostCopies())
    try:
        yield
    finally:
        _kept.reset(token)


def read(tensor: Tensor) -> Tensor:
    """A host copy of a metadata tensor: a plan and the key it is kept by see the same values."""
    return (_kept.get() or _copy)(tensor)


class PlanCache(LRU, Generic[T]):
    """The last plans, found by the values of the tensors and options they depend on."""

    def __call__(
        self, tensors: Sequence[Tensor | None], options: Hashable, make: Callable[[], T]
    ) -> T:
        """The plan that was made for equal tensors and options, else `make()`."""
        key = (tuple(_values(t) for t in tensors), options)
        if (plan := self.get(key)) is None:
            self.put(key, plan := make())
        return plan


def _values(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()


plan_cache: PlanCache[list[WorkInfo]] = PlanCache(16)


@dataclasses.dataclass(frozen=True)
class Metadata:
    """The tensors that decide a plan: lengths, block table and layout."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    block_table: Tensor | None
    layout: BlockLayout | None

    @classmethod
    def of(cls, call: AttentionCall) -> "Metadata":
        """The metadata of a call."""
        return cls(
            call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k, call.block_table, call.layout
        )

    def on_host(self) -> "Metadata":
        """Its values, read on the host."""
        k_starts, used, table = (
            None if t is None else read(t)
            for t in (self.cu_seqlens_k, self.seqused_k, self.block_table)
        )
        layout = self.layout
        if layout is not None:
            csr = read(layout.crow_indices), read(layout.col_indices)
            layout = BlockLayout(*csr, layout.q_block_size, layout.k_block_size)
        return Metadata(read(self.cu_seqlens_q), k_starts, used, table, layout)


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The numbers that decide a plan, besides the metadata."""

    total_q: int
    window_size_left: int
    window_size_right: int
    has_dropout: bool
    num_pages: int
    page_size: int
    tiles: TileSizes

    @classmethod
    def of(cls, call: AttentionCall, tiles: TileSizes) -> "PlanOptions":
        """The options of a call."""
        return cls(
            total_q=call.total_q,
            window_size_left=call.window_size_left,
            window_size_right=call.window_right,
            has_dropout=call.dropout_p > 0.0,
            num_pages=call.k.shape[0],
            page_size=call.page_size,
            tiles=tiles,
        )


def plan(call: AttentionCall, tiles: TileSizes, rows: tuple[PagedKV, PagedKV]) -> list[WorkInfo]:
    """Tables of each work list, on the call's device; the layers of a step share them."""
    host, device = Metadata.of(call).on_host(), call.q.device
    options = PlanOptions.of(call, tiles)
    tensors: tuple[Tensor | None, ...]
    tensors = host.cu_seqlens_q, host.cu_seqlens_k, host.seqused_k, host.block_table
    blocks: tuple[int, ...] = ()
    if (layout := host.layout) is not None:
        tensors += layout.crow_indices, layout.col_indices
        blocks = layout.q_block_size, layout.k_block_size

    def make() -> list[WorkInfo]:
        return [tables.to(device) for tables in _make(host, options, rows)]

    return plan_cache(tensors, (options, places_of(rows), blocks, device), make)


def places_of(rows: tuple[PagedKV, ...]) -> tuple[tuple[int, ...], ...]:
    """The fields of the rows that a plan depends on."""
    return tuple((r.first_row, r.page_rows, r.head_rows, r.slot_rows, r.rows_of_head) for r in rows)


def _make(host: Metadata, options: PlanOptions, rows: tuple[PagedKV, PagedKV]) -> list[WorkInfo]:
    """The tables of each work list for such metadata, on the host."""
    batch = batch_of(host, options)
    tiles = options.tiles
    heads, deepest = tiles.heads, _deepest(tiles, host.layout)
    lists = build_work_lists(
        batch,
        group_size=heads.members,
        planes=heads.planes,
        tile_q=P,
        key_tiles=tiles.key_tiles,
        depths=sorted({1, max(1, deepest // 4), deepest}),
        layout=host.layout,
    )
    in_sequence = tokens_in_sequence(batch, options)
    return [
        lay_out(work, heads, rows, slots_of(work, host, options), in_sequence, tiles.item_programs)
        for work in lists
    ]


def _deepest(tiles: TileSizes, layout: BlockLayout | None) -> int:
    """Tiles in the deepest stack: a row of a layout fills no more than this."""
    if layout is None:
        return tiles.deepest
    needed = -(-layout.q_block_size * tiles.heads.members // P)
    return min(n for n in DEPTHS if n >= min(needed, tiles.deepest))


def batch_of(host: Metadata, options: PlanOptions) -> Batch:
    """The lengths that the metadata gives."""
    return Batch(
        host.cu_seqlens_q.long(),
        key_lengths(host.cu_seqlens_q, host.cu_seqlens_k, host.seqused_k).long(),
        options.total_q,
        options.window_size_left,
        options.window_size_right,
    )


def tokens_in_sequence(batch: Batch, options: PlanOptions) -> Tensor | None:
    """Every query's place in its sequence, which dropout's bits depend on; None without."""
    if not options.has_dropout:
        return None
    _, lengths, _ = batch.sequences()
    return torch.arange(options.total_q) - batch.cu_seqlens_q.repeat_interleave(lengths)


def slots_of(work: WorkList, host: Metadata, options: PlanOptions) -> tuple[Tensor, Tensor]:
    """Page and slot that each run of an item's keys starts at, `(num_items, tile_k / run)`."""
    page, slot = torch.zeros_like(work.keys), torch.zeros_like(work.keys)
    sees = work.key_start < work.key_stop
    sequence, key = work.sequence[work.stack][sees, None], work.keys[sees]
    if not len(key):
        return page, slot
    if host.block_table is None:
        starts = host.cu_seqlens_q if host.cu_seqlens_k is None else host.cu_seqlens_k
        slot[sees] = starts.long()[sequence] + key
        return page, slot
    table = host.block_table.long()
    # page ids are not checked: a wrong one must not read outside the cache
    column = (key // options.page_size).clamp(max=table.shape[1] - 1)
    page[sees] = table[sequence, column].clamp(0, options.num_pages - 1)
    slot[sees] = key % options.page_size
    return page, slot
