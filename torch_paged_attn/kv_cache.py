"""A paged KV cache: the tensors, and the host's bookkeeping of who owns which page.

A sequence takes one page after another. Sequences share pages, which count their owners; a shared
page is copied when one of its owners writes to it (PagedAttention, arXiv 2309.06180). A full page
whose tokens are known is looked up by all tokens from the start of its sequence to its own end, so
sequences with a common prefix share the pages of that prefix. A page without an owner can still be
looked up until it is taken again; the least recently used page is taken first.

>>> cache = PagedKVCache(num_layers, num_pages, num_kv_heads, page_size, head_dim)
>>> reused = cache.append("a", prompt)  # tokens whose keys and values are in the cache already
>>> batch = cache.batch(["a"], [len(prompt) - reused])
>>> reshape_and_cache(key, value, cache.kv_cache[layer], batch.slot_mapping)
>>> k, v = cache.kv_cache[layer]
>>> out, lse = flash_varlen(q, k, v, **batch.arguments(), causal=True)
"""

from __future__ import annotations

import hashlib
import reprlib
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from numbers import Integral
from typing import Any

import torch
from torch import Tensor


class CacheFull(RuntimeError):
    """Too few pages are left. The call that raised it has changed nothing."""

    def __init__(self, needed: int, available: int) -> None:
        # copies and pickles are made by calling the class with `args` again
        super().__init__(needed, available)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return f"the KV cache is full: {self.needed} pages needed, {self.available} available"


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The metadata of one step, as tensors on the cache's device.

    slot_mapping: (total_q,) the slot of each query token's key and value; int32, or int64 for a
        cache of 2^31 slots and more
    block_table: (batch, max_pages) int32, unused entries -1
    seqused_k: (batch,) int32
    cu_seqlens_q: (batch + 1,) int32
    """

    slot_mapping: Tensor
    block_table: Tensor
    seqused_k: Tensor
    cu_seqlens_q: Tensor
    max_seqlen_q: int
    max_seqlen_k: int

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `flash_varlen` and `blocksparse` that this batch provides."""
        return {
            "cu_seqlens_q": self.cu_seqlens_q,
            "max_seqlen_q": self.max_seqlen_q,
            "max_seqlen_k": self.max_seqlen_k,
            "seqused_k": self.seqused_k,
            "block_table": self.block_table,
        }


@dataclass
class _Sequence:
    length: int = 0
    # an array, because tensors are made of it every step
    pages: array[int] = field(default_factory=lambda: array("i"))
    # ids; None after an append without ids
    tokens: list[int] | None = field(default_factory=list)
    # of each full page whose tokens are known: the digest of all tokens up to its end
    keys: list[bytes] = field(default_factory=list)


class PagedKVCache:
    """Keys and values of many sequences in pages of one tensor.

    kv_cache: (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim), uninitialised;
        `kv_cache[layer]` is what `reshape_and_cache` takes, and unpacks into k and v
    separate: kv_cache is a list of each layer's pair (k, v), tensors of their own. A TPU wants it:
        to XLA, a part of a tensor is a copy
    dtype: any dtype of the ops' caches, the 8-bit ones included

    Any hashable object names a sequence. Write the keys and values of appended tokens before the
    next append or fork of their sequence, and before the attention of their batch: pages are shared
    and copied as if every appended token had been written. An unknown sequence raises KeyError. Not
    thread-safe.
    """

    def __init__(
        self,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        page_size: int,
        head_dim: int,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        separate: bool = False,
    ) -> None:
        names = ("num_layers", "num_pages", "num_kv_heads", "page_size", "head_dim")
        sizes = (num_layers, num_pages, num_kv_heads, page_size, head_dim)
        for name, size in zip(names, sizes, strict=True):
            if size < 1:
                raise ValueError(f"PagedKVCache: {name} must be at least 1, got {size}")
        page = num_pages, num_kv_heads, page_size, head_dim
        self.kv_cache: Any
        if separate:
            parts = (torch.empty(page, dtype=dtype, device=device) for _ in range(2 * num_layers))
            self.kv_cache = list(zip(parts, parts, strict=True))
        else:
            self.kv_cache = torch.empty((num_layers, 2, *page), dtype=dtype, device=device)
        self.num_pages = num_pages
        self.page_size = page_size
        self._sequences: dict[Hashable, _Sequence] = {}
        self._ref_counts = [0] * num_pages
        # a page without an owner is in one of these two: nothing can be found in it, or its tokens
        self._blank = list(reversed(range(num_pages)))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._page_of_key: dict[bytes, int] = {}
        self._key_of_page: dict[int, bytes] = {}

    @staticmethod
    def bytes_per_token(
        num_layers: int, num_kv_heads: int, head_dim: int, *, dtype: torch.dtype | None = None
    ) -> int:
        """Bytes that the keys and values of one token take in all layers together."""
        size = (dtype or torch.get_default_dtype()).itemsize
        return 2 * num_layers * num_kv_heads * head_dim * size

    @staticmethod
    def pages_for(lengths: Sequence[int], page_size: int) -> int:
        """Pages that sequences of these lengths take, if none is shared."""
        return sum(-(-length // page_size) for length in lengths)

    def __contains__(self, seq: Hashable) -> bool:
        return seq in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_free_pages(self) -> int:
        """Pages that an append may take, with those that can still be looked up."""
        return len(self._blank) + len(self._evictable)

    def length(self, seq: Hashable) -> int:
        """Tokens of a sequence."""
        return self._sequence(seq).length

    def pages(self, seq: Hashable) -> tuple[int, ...]:
        """Page ids of a sequence, in order."""
        return tuple(self._sequence(seq).pages)

    def ref_count(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._ref_counts[page]

    def append(self, seq: Hashable, tokens: int | Sequence[int]) -> int:
        """Make room for more tokens of a sequence; return how many of them the cache holds already.

        A sequence that is not there yet begins. Token ids let sequences share full pages: the
        tokens of a prefix that the cache holds need not be computed again. The last token always
        has to be computed.

        tokens: token ids, or how many tokens. After a number, later pages of the sequence are
        neither shared nor looked up

        Raises CacheFull and changes nothing if too few pages are left.
        """
        count, ids = _count_tokens(tokens)
        state = self._sequences.get(seq) or _Sequence()
        page_size = self.page_size
        filled = state.length % page_size
        keys = self._next_keys(state, ids)
        hits: list[int] = []
        if not filled:
            for key in keys[: max(count - 1, 0) // page_size]:
                if key not in self._page_of_key:
                    break
                hits.append(self._page_of_key[key])

        copied = bool(filled and count and self._ref_counts[state.pages[-1]] > 1)
        length = state.length + count
        needed = -(-length // page_size) - len(state.pages) - len(hits) + copied
        available = self.num_free_pages - sum(page in self._evictable for page in hits)
        if needed > available:
            raise CacheFull(needed, available)

        if copied:
            self._copy_last_page(state)
        elif filled and count:
            # a truncated page can still be looked up by the tokens that filled it
            self._forget(state.pages[-1])
        for page in hits:
            self._share(page)
        state.pages.extend(hits)
        state.pages.extend(self._take() for _ in range(needed - copied))
        state.length = length
        if ids is None and count:
            state.tokens = None
        elif ids and state.tokens is not None:
            state.tokens += ids
        for key in keys:
            page = state.pages[len(state.keys)]
            if key not in self._page_of_key:
                self._page_of_key[key], self._key_of_page[page] = page, key
            state.keys.append(key)
        self._sequences[seq] = state
        return len(hits) * page_size

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begin a sequence with the tokens of another one, which shares all its pages."""
        if child in self._sequences:
            raise ValueError(
                f"PagedKVCache.fork: child must be a new sequence, got {child!r}, which exists"
            )
        state = self._sequence(parent)
        for page in state.pages:
            self._share(page)
        tokens = None if state.tokens is None else list(state.tokens)
        self._sequences[child] = _Sequence(state.length, state.pages[:], tokens, list(state.keys))

    def truncate(self, seq: Hashable, length: int) -> None:
        """Forget a sequence's tokens from position length on, such as rejected drafts."""
        state = self._sequence(seq)
        if not 0 <= length <= state.length:
            raise ValueError(
                f"PagedKVCache.truncate: length must be between 0 and {state.length}, got {length}"
            )
        kept = -(-length // self.page_size)
        self._release(state.pages[kept:])
        del state.pages[kept:]
        del state.keys[length // self.page_size :]
        if state.tokens is not None:
            del state.tokens[length:]
        state.length = length

    def free(self, seq: Hashable, written: int | None = None) -> None:
        """Remove a sequence. Pages that no other sequence holds can be taken again.

        written: how many of its tokens were written, None: all. Give it when a step fails between
        append and write: a page that was not written must not be looked up.
        """
        state = self._sequence(seq)
        if written is not None:
            if not 0 <= written <= state.length:
                raise ValueError(
                    f"PagedKVCache.free: written must be between 0 and {state.length}, "
                    f"got {written}"
                )
            for page in state.pages[written // self.page_size :]:
                self._forget(page)
        self._release(state.pages)
        del self._sequences[seq]

    def batch(
        self, seqs: Sequence[Hashable], query_lens: Sequence[int], max_pages: int | None = None
    ) -> PagedBatch:
        """The metadata of a step in which the last query_lens[b] tokens of seqs[b] are queries.

        max_pages: width of the block table, for shapes that must not change; None: as narrow as
        the longest sequence allows
        """
        if len(seqs) != len(query_lens):
            raise ValueError(
                "PagedKVCache.batch: query_lens must have one entry per sequence, "
                f"got {len(query_lens)} for {len(seqs)} sequences"
            )
        states = [self._sequence(seq) for seq in seqs]
        for seq, state, query_len in zip(seqs, states, query_lens, strict=True):
            if not 0 <= query_len <= state.length:
                raise ValueError(
                    f"PagedKVCache.batch: query_lens of {seq!r} must be between 0 and "
                    f"{state.length}, got {query_len}"
                )
        longest = max((len(state.pages) for state in states), default=0)
        width = longest if max_pages is None else max_pages
        if width < longest:
            raise ValueError(
                f"PagedKVCache.batch: max_pages must be at least {longest}, got {max_pages}"
            )

        # made on the CPU, whatever torch's default device is, and copied to the cache's at the end
        block_table = torch.full((len(states), width), -1, dtype=torch.int32, device="cpu")
        for row, state in zip(block_table, states, strict=True):
            if state.pages:
                row[: len(state.pages)] = torch.frombuffer(state.pages, dtype=torch.int32)
        lengths = torch.tensor([state.length for state in states], dtype=torch.int32, device="cpu")
        cu_seqlens_q = torch.tensor([0, *accumulate(query_lens)], dtype=torch.int32, device="cpu")
        # the last query row of a sequence stands at its last position
        seq = torch.arange(len(states), device="cpu").repeat_interleave(cu_seqlens_q.diff())
        position = torch.arange(seq.numel(), device="cpu") + (lengths - cu_seqlens_q[1:])[seq]
        slots = block_table[seq, position // self.page_size].long() * self.page_size
        slots += position % self.page_size
        wide = self.num_pages * self.page_size > torch.iinfo(torch.int32).max
        return PagedBatch(
            self._to_device(slots.to(torch.int64 if wide else torch.int32)),
            self._to_device(block_table),
            self._to_device(lengths),
            self._to_device(cu_seqlens_q),
            max(query_lens, default=0),
            max((state.length for state in states), default=0),
        )

    def _sequence(self, seq: Hashable) -> _Sequence:
        if seq not in self._sequences:
            raise KeyError(f"no sequence {seq!r} in the cache")
        return self._sequences[seq]

    def _next_keys(self, state: _Sequence, ids: list[int] | None) -> list[bytes]:
        """The keys of pages that ids fill: a digest of the key before and of the page's tokens."""
        if state.tokens is None or ids is None:
            return []
        pending = state.tokens[len(state.keys) * self.page_size :] + ids
        key = state.keys[-1] if state.keys else b""
        keys = []
        for end in range(self.page_size, len(pending) + 1, self.page_size):
            page_tokens = array("q", pending[end - self.page_size : end])
            key = hashlib.sha256(key + page_tokens.tobytes()).digest()
            keys.append(key)
        return keys

    def _take(self) -> int:
        """Give a page its first owner: a blank page, else the least recently used one."""
        if self._blank:
            page = self._blank.pop()
        else:
            page, _ = self._evictable.popitem(last=False)
            self._forget(page)
        self._ref_counts[page] = 1
        return page

    def _share(self, page: int) -> None:
        self._evictable.pop(page, None)
        self._ref_counts[page] += 1

    def _release(self, pages: Sequence[int]) -> None:
        # the end of a prefix is useless without its start, so the end is evicted first
        for page in reversed(pages):
            self._ref_counts[page] -= 1
            if self._ref_counts[page] == 0:
                if page in self._key_of_page:
                    self._evictable[page] = None
                else:
                    self._blank.append(page)

    def _forget(self, page: int) -> None:
        key = self._key_of_page.pop(page, None)
        if key is not None:
            del self._page_of_key[key]

    def _copy_last_page(self, state: _Sequence) -> None:
        shared, own = state.pages[-1], self._take()
        try:
            # integers index the tensor: the copy runs on the device, in stream order
            if isinstance(self.kv_cache, Tensor):
                self.kv_cache[:, :, own].copy_(self.kv_cache[:, :, shared])
            else:
                for part in (x for layer in self.kv_cache for x in layer):
                    part[own].copy_(part[shared])
        except BaseException:
            self._release([own])
            raise
        self._ref_counts[shared] -= 1
        state.pages[-1] = own

    def _to_device(self, tensor: Tensor) -> Tensor:
        device = self.kv_cache[0][0].device
        # a copy from pinned memory does not wait for the stream
        tensor = tensor.pin_memory() if device.type == "cuda" else tensor
        return tensor.to(device, non_blocking=True)


def _count_tokens(tokens: int | Sequence[int]) -> tuple[int, list[int] | None]:
    """How many tokens an append brings, and their ids, None if it gives only a number."""
    if isinstance(tokens, int | Integral):
        count = int(tokens)
        if count < 0:
            raise ValueError(f"PagedKVCache.append: tokens must not be negative, got {count}")
        return count, None
    # an array would take the letters of bytes for ids
    if not isinstance(tokens, bytes | bytearray):
        try:
            ids = array("q", tokens).tolist()
        except (TypeError, OverflowError):
            pass
        else:
            return len(ids), ids
    raise TypeError(
        "PagedKVCache.append: tokens must be a number of tokens, or a sequence of ids that fit "
        f"in 64 bits, got {reprlib.repr(tokens)}"
    )
