"""A paged KV cache: its tensors, and bookkeeping on the host of which sequence holds which page.

A sequence grows by a page at a time. Several sequences may hold the same page, which has a
reference count; a shared page is copied when one of them appends to it (copy on write,
PagedAttention, arXiv 2309.06180). A full page whose token ids are known is found by a hash of all
tokens from the start of its sequence to its own end, so that sequences with a common prefix share
the pages of that prefix. A page that no sequence holds can still be found this way until it is
reused; the least recently used page is reused first.

>>> cache = PagedKVCache(num_layers, num_pages, num_kv_heads, page_size, head_dim)
>>> reused = cache.append("a", prompt)  # tokens whose keys and values are in the cache already
>>> batch = cache.batch(["a"], [len(prompt) - reused])
>>> reshape_and_cache(key, value, cache.kv_cache[layer], batch.slot_mapping)
>>> k, v = cache.kv_cache[layer]
>>> out, lse = flash_varlen(q, k, v, **batch.arguments(), causal=True)
"""

from __future__ import annotations

import hashlib
import operator
import reprlib
from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from numbers import Integral
from typing import Any, Literal

import torch
from torch import Tensor

from torch_paged_attn.ops.checks import FLOAT, INT4, QUANTISED, fail, names
from torch_paged_attn.page_pool import PagePool


class CacheFull(RuntimeError):
    """Too few pages are free. The call that raised this has changed nothing.

    needed, available: numbers of pages
    """

    def __init__(self, needed: int, available: int) -> None:
        # copy and pickle call the class again with `args`, so these must be its own arguments
        super().__init__(needed, available)
        self.needed = needed
        self.available = available

    def __str__(self) -> str:
        return f"the KV cache is full: {self.needed} pages needed, {self.available} available"


@dataclass(frozen=True, eq=False)
class PagedBatch:
    """The metadata of one step of a model: tensors on the cache's device, and two lengths.

    slot_mapping: (total_q,) the slot of each query token's key and value; int32, or int64 for a
        cache of 2^31 slots and more
    block_table: (batch, max_pages) int32, the pages of each sequence, unused entries -1
    seqused_k: (batch,) int32, tokens of each sequence
    cu_seqlens_q: (batch + 1,) int32, the row of q where each sequence starts
    max_seqlen_q, max_seqlen_k: queries and tokens of the longest sequence
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
    # an array, because every step makes a tensor of it
    pages: array[int] = field(default_factory=lambda: array("i"))
    # token ids; None after an append without ids
    tokens: list[int] | None = field(default_factory=list)
    # for each full page whose tokens are known: the hash of all tokens up to its end
    hashes: list[bytes] = field(default_factory=list)


def _stored_as(
    where: str, dtype: torch.dtype | Literal["int4"] | None, token_scales: bool
) -> tuple[torch.dtype, bool]:
    """The dtype of a cache's tensors, and whether each row has a scale."""
    if dtype == "int4":
        return INT4, True
    stored = dtype or torch.get_default_dtype()
    allowed = (*QUANTISED, INT4) if token_scales else (*FLOAT, *QUANTISED)
    if stored not in allowed:
        given = names((stored,)) if isinstance(stored, torch.dtype) else repr(stored)
        fail(where, "dtype", given, f'{names(allowed)}, "int4"')
    return stored, token_scales


class PagedKVCache:
    """Keys and values of many sequences in pages.

    kv_cache: (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim), uninitialised;
        `kv_cache[layer]` is what `reshape_and_cache` takes, and unpacks into k and v
    head_dim_v: of the values; None: head_dim. If it differs, kv_cache is as with `separate`
    separate: kv_cache is instead a list with a pair of tensors (k, v) for each layer. Use it on a
        TPU, where XLA copies a slice of a tensor
    dtype: any dtype of the ops' caches, the 8-bit ones included, or "int4", which is torch.uint8
        with token_scales: rows of `head_dim / 2` bytes; None: torch's default. ValueError for
        another
    token_scales: whether rows of 8 bits or int4 have a scale each, which
        `reshape_and_cache(..., *scales[layer], quantize=True)` writes and attention takes as
        `k_descale` and `v_descale`
    scales: (num_layers, 2, num_pages, num_kv_heads, page_size) float32, or None

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
        head_dim_v: int | None = None,
        dtype: torch.dtype | Literal["int4"] | None = None,
        device: torch.device | str | None = None,
        separate: bool = False,
        token_scales: bool = False,
    ) -> None:
        # plain integers, whatever integers were given
        num_layers = _whole("PagedKVCache", "num_layers", num_layers, 1)
        num_pages = _whole("PagedKVCache", "num_pages", num_pages, 1)
        num_kv_heads = _whole("PagedKVCache", "num_kv_heads", num_kv_heads, 1)
        page_size = _whole("PagedKVCache", "page_size", page_size, 1)
        head_dim = _whole("PagedKVCache", "head_dim", head_dim, 1)
        dims = [head_dim] * 2
        if head_dim_v is not None:
            dims[1] = _whole("PagedKVCache", "head_dim_v", head_dim_v, 1)
        stored, token_scales = _stored_as("PagedKVCache", dtype, token_scales)
        if stored == INT4:
            for name, dim in zip(("head_dim", "head_dim_v"), dims, strict=True):
                if dim % 2:
                    fail("PagedKVCache", name, dim, "even for int4, two numbers a byte")
            dims = [dim // 2 for dim in dims]
        page = num_pages, num_kv_heads, page_size
        self.kv_cache: Any
        if separate or dims[0] != dims[1]:
            shapes = [(*page, dim) for dim in dims] * num_layers
            parts = (torch.empty(shape, dtype=stored, device=device) for shape in shapes)
            self.kv_cache = list(zip(parts, parts, strict=True))
        else:
            shape = num_layers, 2, *page, dims[0]
            self.kv_cache = torch.empty(shape, dtype=stored, device=device)
        self.scales: Tensor | None = None
        if token_scales:
            self.scales = torch.empty((num_layers, 2, *page), dtype=torch.float32, device=device)
        self.num_pages = num_pages
        self.page_size = page_size
        self._sequences: dict[Hashable, _Sequence] = {}
        self._pool = PagePool(num_pages)

    @staticmethod
    def bytes_per_token(
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        dtype: torch.dtype | Literal["int4"] | None = None,
        token_scales: bool = False,
    ) -> int:
        """Bytes of one token's keys and values, and their scales, in all layers together."""
        stored, token_scales = _stored_as("PagedKVCache.bytes_per_token", dtype, token_scales)
        numbers = head_dim + (head_dim if head_dim_v is None else head_dim_v)
        row = numbers // 2 if stored == INT4 else numbers * stored.itemsize
        return num_layers * num_kv_heads * (row + 8 * token_scales)

    @staticmethod
    def pages_for(lengths: Sequence[int], page_size: int) -> int:
        """Number of pages that sequences of these lengths (in tokens) need if they share none."""
        where = "PagedKVCache.pages_for"
        page_size = _whole(where, "page_size", page_size, 1)
        return sum(-(-_whole(where, "a length", n) // page_size) for n in lengths)

    def __contains__(self, seq: Hashable) -> bool:
        return seq in self._sequences

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def num_free_pages(self) -> int:
        """Pages that no sequence holds, those that can still be found by their tokens included."""
        return self._pool.num_free

    def length(self, seq: Hashable) -> int:
        """Number of tokens of a sequence."""
        return self._sequence(seq).length

    def pages(self, seq: Hashable) -> tuple[int, ...]:
        """Page ids of a sequence, in order."""
        return tuple(self._sequence(seq).pages)

    def ref_count(self, page: int) -> int:
        """How many sequences hold a page."""
        return self._pool.ref_counts[page]

    def append(self, seq: Hashable, tokens: int | Sequence[int]) -> int:
        """Make room for more tokens of a sequence; return how many of them the cache holds already.

        An unknown sequence is created. With token ids, full pages are shared between sequences: the
        keys and values of a prefix that the cache holds need not be computed again. The last token
        is never counted as held, because its output is needed.

        tokens: token ids, or the number of tokens. After a number, pages that the sequence fills
            are neither shared nor found by other sequences

        Raises CacheFull, and changes nothing, if too few pages are free.
        """
        count, ids = _count_tokens(tokens)
        state = self._sequences.get(seq) or _Sequence()
        page_size, pool = self.page_size, self._pool
        filled = state.length % page_size
        hashes = self._next_hashes(state, ids)
        hits = [] if filled else pool.find(hashes[: max(count - 1, 0) // page_size])

        copied = bool(filled and count and pool.ref_counts[state.pages[-1]] > 1)
        length = state.length + count
        needed = -(-length // page_size) - len(state.pages) - len(hits) + copied
        available = pool.free_beside(hits)
        if needed > available:
            raise CacheFull(needed, available)

        if copied:
            self._copy_last_page(state)
        elif filled and count:
            # after a truncate, the page may still be listed under tokens that are now overwritten
            pool.forget(state.pages[-1])
        for page in hits:
            pool.share(page)
        state.pages.extend(hits)
        state.pages.extend(pool.take() for _ in range(needed - copied))
        state.length = length
        if ids is None and count:
            state.tokens = None
        elif ids and state.tokens is not None:
            state.tokens += ids
        for digest in hashes:
            pool.list_under(digest, state.pages[len(state.hashes)])
            state.hashes.append(digest)
        self._sequences[seq] = state
        return len(hits) * page_size

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Create a sequence `child` with the tokens of `parent`. The two share all pages."""
        if child in self._sequences:
            raise ValueError(
                f"PagedKVCache.fork: child must be a new sequence, got {child!r}, which exists"
            )
        state = self._sequence(parent)
        for page in state.pages:
            self._pool.share(page)
        tokens = None if state.tokens is None else list(state.tokens)
        self._sequences[child] = _Sequence(state.length, state.pages[:], tokens, list(state.hashes))

    def truncate(self, seq: Hashable, length: int) -> None:
        """Shorten a sequence to its first `length` tokens, for example to drop rejected drafts."""
        state = self._sequence(seq)
        length = _whole("PagedKVCache.truncate", "length", length, 0, state.length)
        kept = -(-length // self.page_size)
        self._pool.release(state.pages[kept:])
        del state.pages[kept:]
        del state.hashes[length // self.page_size :]
        if state.tokens is not None:
            del state.tokens[length:]
        state.length = length

    def free(self, seq: Hashable, written: int | None = None) -> None:
        """Remove a sequence. Its pages are free unless another sequence holds them.

        written: how many of its tokens have their keys and values in the cache; None: all. Give it
            if a step fails between append and write, so that no other sequence finds a page that
            was never written
        """
        state = self._sequence(seq)
        if written is not None:
            written = _whole("PagedKVCache.free", "written", written, 0, state.length)
            for page in state.pages[written // self.page_size :]:
                self._pool.forget(page)
        self._pool.release(state.pages)
        del self._sequences[seq]

    def batch(
        self, seqs: Sequence[Hashable], query_lens: Sequence[int], max_pages: int | None = None
    ) -> PagedBatch:
        """The metadata of a step in which the last query_lens[b] tokens of seqs[b] are queries.

        max_pages: width of the block table, for shapes that must not change; None: as narrow as
        the longest sequence allows
        """
        where = "PagedKVCache.batch"
        if len(seqs) != len(query_lens):
            raise ValueError(
                f"{where}: query_lens must have one entry per sequence, "
                f"got {len(query_lens)} for {len(seqs)} sequences"
            )
        states = [self._sequence(seq) for seq in seqs]
        query_lens = [
            _whole(where, f"query_lens[{b}]", query_len, 0, state.length)
            for b, (state, query_len) in enumerate(zip(states, query_lens, strict=True))
        ]
        width = max((len(state.pages) for state in states), default=0)
        if max_pages is not None:
            width = _whole(where, "max_pages", max_pages, width)

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

    def _next_hashes(self, state: _Sequence, ids: list[int] | None) -> list[bytes]:
        """The hashes of pages that `ids` fill, each of the page's tokens and the hash before it."""
        if state.tokens is None or ids is None:
            return []
        pending = state.tokens[len(state.hashes) * self.page_size :] + ids
        digest = state.hashes[-1] if state.hashes else b""
        hashes = []
        for end in range(self.page_size, len(pending) + 1, self.page_size):
            page_tokens = array("q", pending[end - self.page_size : end])
            digest = hashlib.sha256(digest + page_tokens.tobytes()).digest()
            hashes.append(digest)
        return hashes

    def _copy_last_page(self, state: _Sequence) -> None:
        shared, own = state.pages[-1], self._pool.take()
        try:
            # the indices are Python integers, so that nothing waits for the device
            if isinstance(self.kv_cache, Tensor):
                self.kv_cache[:, :, own].copy_(self.kv_cache[:, :, shared])
            else:
                for part in (x for layer in self.kv_cache for x in layer):
                    part[own].copy_(part[shared])
            if self.scales is not None:
                self.scales[:, :, own].copy_(self.scales[:, :, shared])
        except BaseException:
            self._pool.release([own])
            raise
        self._pool.ref_counts[shared] -= 1
        state.pages[-1] = own

    def _to_device(self, tensor: Tensor) -> Tensor:
        device = self.kv_cache[0][0].device
        # a copy from pinned memory does not wait for the stream
        tensor = tensor.pin_memory() if device.type == "cuda" else tensor
        return tensor.to(device, non_blocking=True)


def _whole(where: str, name: str, value: Any, least: int = 0, most: int | None = None) -> int:
    """`value` as an int; ValueError unless it is between `least` and `most`, which may be open.

    where, name: the call and the argument, as errors spell them
    """
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{where}: {name} must be an integer, got {reprlib.repr(value)}") from None
    if number < least or (most is not None and number > most):
        allowed = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ValueError(f"{where}: {name} must be {allowed}, got {number}")
    return number


def _count_tokens(tokens: int | Sequence[int]) -> tuple[int, list[int] | None]:
    """The number of tokens that are appended, and their ids; None if only a number is given."""
    if isinstance(tokens, int | Integral):
        count = int(tokens)
        if count < 0:
            raise ValueError(f"PagedKVCache.append: tokens must not be negative, got {count}")
        return count, None
    # array("q", bytes) would read each byte as an id
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
