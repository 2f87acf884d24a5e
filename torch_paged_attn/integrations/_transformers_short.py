"""A mask of Transformers that says in a few numbers which keys are seen, and that a model may use
as if it had an entry for each query and key.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Ranges(NamedTuple):
    """The keys that are no padding, of rows in which they are neighbours."""

    first: Tensor  # (batch,) int32: a row's first key
    lengths: Tensor  # (batch,) int32
    end_together: bool  # whether each row's last key is the newest one


class OfHeads(NamedTuple):
    """The keys that are no padding, where each head of a row's keys is a sequence of its own."""

    cu_seqlens_q: Tensor  # (batch * heads + 1,) int32, of one query each
    first: Tensor  # (batch * heads,) int32: the first key, in rows of head_dim numbers
    lengths: Tensor  # (batch * heads,) int32


class Packing(NamedTuple):
    """Where the tokens that are no padding are, of all rows end to end."""

    queries: Tensor  # (tokens,) int64, into the rows of (batch * queries)
    keys: Tensor  # the same of (batch * keys)
    cu_seqlens_q: Tensor  # (batch + 1,) int32
    cu_seqlens_k: Tensor


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names}


# what is true of this tensor and of the mask that it stands for
OF_BOTH = _getters("device", "dtype", "is_cuda", "layout", "requires_grad", "grad_fn", "is_leaf")
UNCHANGED = {Tensor.detach, Tensor.contiguous}
SIZES, DIMS = {*_getters("shape"), Tensor.size}, {*_getters("ndim"), Tensor.dim}


class ShortMask(Tensor):
    """What `make_mask` returns for masks that have a short form. `attention_forward` reads its
    attributes; any other function of torch gets `full()`, so that a model may index it, add to it
    or look at its shape.

    Attributes:
        causal: whether queries see no later keys
        window: how many keys before its own a query sees (and after it, without `causal`); -1: all
        written: the number of keys that exist; a static cache may have room for more
        keys: (batch, written) bool, False for padding; None if there is no padding. The last keys
            are those of the queries
        cu_seqlens: (num_sequences + 1,) int32, if rows are several sequences each; else None
        steps: what the layers of a decoding step share, by what they may differ in
    """

    causal: bool
    window: int
    written: int
    keys: Tensor | None
    cu_seqlens: Tensor | None
    steps: dict[tuple[Any, ...], Any]
    _make: Callable[[], Tensor]
    _size: torch.Size
    _full: Tensor | None
    _ranges: "Ranges | bool | None"
    _packings: "dict[int, Packing]"
    _heads: "dict[tuple[int, int, int], OfHeads | None]"
    _kept: tuple[Any, ...]

    @staticmethod
    def of(
        make: Callable[[], Tensor],
        size: tuple[int, ...],
        device: Any,
        causal: bool,
        window: int,
        written: int,
        keys: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> "ShortMask":
        """A mask of `size`, (batch, 1, queries, keys); `make` makes it, if it is asked for."""
        mask = torch.empty(0, dtype=torch.bool, device=device).as_subclass(ShortMask)
        mask._make, mask._size, mask._full = make, torch.Size(size), None
        mask.causal, mask.window, mask.written = causal, window, written
        mask.keys, mask.cu_seqlens = keys, cu_seqlens
        mask._ranges, mask._packings, mask._heads = False, {}, {}
        mask._kept, mask.steps = (), {}
        return mask

    def full(self) -> Tensor:
        """The mask: (batch, 1, queries, keys) bool."""
        if self._full is None:
            self._full = self._make()
        return self._full

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        me = args[0] if args and isinstance(args[0], ShortMask) else None
        if me is not None and func in OF_BOTH:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if me is not None and func in UNCHANGED:
            return me
        if me is not None and func is Tensor.to:
            moved = me._moved(*args[1:], **kwargs)
            if moved is not None:
                return moved
        if me is not None and func in SIZES and len(args) == 1:
            return me._size
        if me is not None and func in DIMS:
            return len(me._size)
        args, kwargs = tree_map(_full_of, (args, kwargs))
        return func(*args, **kwargs)

    def _moved(self, *args: Any, **kwargs: Any) -> "ShortMask | None":
        """This mask on another device, where models are spread over several. None: another type."""
        with torch._C.DisableTorchFunctionSubclass():
            here = self.as_subclass(Tensor)
            there = here.to(*args, **kwargs)
            if there.dtype != torch.bool:
                return None
            if there.device == here.device:
                return self
            device = there.device
        move = lambda x: None if x is None else x.to(device, non_blocking=True)  # noqa: E731
        return ShortMask.of(
            lambda: self.full().to(device),
            self._size,
            device,
            self.causal,
            self.window,
            self.written,
            move(self.keys),
            move(self.cu_seqlens),
        )

    def once(self, make: Callable[[], Any]) -> Any:
        """What `make` returns for the first layer of a pass."""
        if not self._kept:
            self._kept = (make(),)
        return self._kept[0]

    def ranges(self) -> Ranges | None:
        """Where a padded row's keys are; None if there are holes in it. Waits for the device, once
        for all layers."""
        if self._ranges is False:
            assert self.keys is not None
            self._ranges = _ranges_of(self.keys)
        assert not isinstance(self._ranges, bool)
        return self._ranges

    def of_heads(self, batch: int, heads: int, apart: int) -> OfHeads | None:
        """Where the keys of each row's heads are, which follow each other `apart` rows apart. None
        if one query of a row does not see what these say. Made once for all layers.
        """
        key = batch, heads, apart
        if key not in self._heads:
            self._heads[key] = self._made_of_heads(*key)
        return self._heads[key]

    def _made_of_heads(self, batch: int, heads: int, apart: int) -> OfHeads | None:
        count = batch * heads
        int32: Any = {"dtype": torch.int32, "device": self.device}
        first = torch.arange(0, count * apart, apart, **int32)
        if self.keys is None:
            lengths = torch.full((count,), self.written, **int32)
        else:
            ranges = self.ranges()
            # without a causal mask or window no position matters
            if ranges is None or ranges.first.shape[0] != batch:
                return None
            if not ranges.end_together and (self.causal or self.window >= 0):
                return None
            first += ranges.first.repeat_interleave(heads)
            lengths = ranges.lengths.repeat_interleave(heads)
        return OfHeads(torch.arange(count + 1, **int32), first, lengths)

    def packing(self, query_len: int) -> Packing:
        """The tokens that are no padding. Waits for the device, once for all layers."""
        if query_len not in self._packings:
            assert self.keys is not None
            keys, queries = self.keys, self.keys[:, self.keys.shape[1] - query_len :]
            if not self.causal and self.window < 0:  # queries may be those of another sequence
                queries = torch.ones_like(keys[:, :1]).expand(-1, query_len)
            self._packings[query_len] = Packing(
                queries.flatten().nonzero()[:, 0],
                keys.flatten().nonzero()[:, 0],
                _cu_seqlens(queries.sum(1)),
                _cu_seqlens(keys.sum(1)),
            )
        return self._packings[query_len]


def _full_of(x: Any) -> Any:
    return x.full() if isinstance(x, ShortMask) else x


def _cu_seqlens(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))


def _ranges_of(keys: Tensor) -> Ranges | None:
    """keys: (batch, written) bool"""
    count, ones = keys.shape[1], keys.int()
    lengths = ones.sum(1, dtype=torch.int32)
    first = ones.argmax(1).int()
    end = torch.where(lengths > 0, count - ones.flip(1).argmax(1), 0).int()
    whole, together = torch.stack(
        [(end - first == lengths).all(), ((end == count) | (lengths == 0)).all()]
    ).tolist()
    return Ranges(first, lengths, together) if whole else None


def beside_all_pairs(mask: Tensor, short: ShortMask) -> Tensor:
    """`mask`, a tensor of all pairs for models that torch.compile traces, with its short form."""
    mask._paged_attn_short = short  # type: ignore[attr-defined]
    return mask


def short_form(mask: Tensor | None) -> ShortMask | None:
    """The short form of a mask, if it has one. In a graph none has: its numbers would be
    constants.
    """
    if mask is None or torch.compiler.is_compiling():
        return None
    return mask if isinstance(mask, ShortMask) else getattr(mask, "_paged_attn_short", None)
