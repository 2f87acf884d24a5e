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
from typing import Any, Generic, TypeVar

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, key_lengths
from torch_paged_attn.backends.neuron.paged_kv import PagedKV
from torch_paged_attn.backends.neuron.tables import Heads, WorkInfo, lay_out
from torch_paged_attn.backends.neuron.tile_sizes import TileSizes
from torch_paged_attn.backends.neuron.work_list import Batch, build_work_lists
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

METADATA = "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table"
LAYOUT = "crow_indices", "col_indices"


def on_host(call: AttentionCall) -> AttentionCall:
    """The call with the tensors that decide a plan read on the host: lengths, table, layout."""
    changed = values_of(call, METADATA)
    if call.layout is not None:
        changed["layout"] = dataclasses.replace(call.layout, **values_of(call.layout, LAYOUT))
    return dataclasses.replace(call, **changed)


def values_of(given: Any, names: tuple[str, ...]) -> dict[str, Any]:
    """Tensors of a call, read on the host, by their names."""
    return {n: None if (x := getattr(given, n)) is None else read(x) for n in names}


def planned(
    cache: PlanCache[T],
    host: AttentionCall,
    tiles: TileSizes,
    rows: tuple[PagedKV, PagedKV],
    make: Callable[[], T],
    given: Hashable = None,
) -> T:
    """The plan of a call whose metadata is on the host: that of one of which all that it depends
    on, what is `given` too, was equal.
    """
    tensors = [getattr(host, name) for name in METADATA]
    blocks: tuple[int, ...] = ()
    if (layout := host.layout) is not None:
        tensors += layout.crow_indices, layout.col_indices
        blocks = layout.q_block_size, layout.k_block_size
    lengths = host.total_q, host.k.shape[0], host.page_size, host.head_dim, host.head_dim_v
    window = host.window_size_left, host.window_right, host.dropout_p > 0.0
    places = [(r.first_row, r.page_rows, r.head_rows, r.slot_rows, r.rows_of_head) for r in rows]
    options = lengths, window, blocks, tuple(places), tiles, host.q.device, given
    return cache(tensors, options, make)


def plan(call: AttentionCall, tiles: TileSizes, rows: tuple[PagedKV, PagedKV]) -> list[WorkInfo]:
    """Tables of each work list, on the call's device; the layers of a step share them."""
    host = on_host(call)

    def make() -> list[WorkInfo]:
        depths = sorted({1, max(1, tiles.deepest // 4), tiles.deepest})
        lists = build_work_lists(batch_of(host, tiles.heads), tiles.key_tiles, depths)
        infos = (lay_out(work, host, tiles.heads, rows, tiles.item_programs) for work in lists)
        return [info.to(host.q.device) for info in infos]

    return planned(plan_cache, host, tiles, rows, make)


def batch_of(host: AttentionCall, heads: Heads) -> Batch:
    """The lengths that the metadata gives."""
    return Batch(
        host.cu_seqlens_q.long(),
        key_lengths(host.cu_seqlens_q, host.cu_seqlens_k, host.seqused_k).long(),
        host.total_q,
        host.window_size_left,
        host.window_right,
        heads.members,
        heads.planes,
        host.layout,
    )
