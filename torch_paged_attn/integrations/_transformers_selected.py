"""Attention of models that list the keys of each query: DeepSeek V3.2 and its relatives single keys
(`indices`), MiniMax M3 blocks of keys (`block_indices`).

A call runs as `selected_attention` if that reads fewer keys than attention under a mask of all
pairs: in decode always, in prefill of long contexts. A bool mask of all pairs is applied to the
lists themselves, so that the result is exact whatever the mask shows.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations._transformers_dense import attend_rows
from torch_paged_attn.integrations._transformers_short import ShortMask
from torch_paged_attn.ops import checks, selected_attention
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.selected_checks import SELECT_SIZES

# rows of q that read a key together where all queries may see all keys
ROWS_OF_A_TILE = 128


@dataclasses.dataclass(frozen=True)
class KeyLists:
    """The keys that each query may see, of those that the mask shows."""

    entries: Tensor  # (batch, groups of heads, Lq, n) units of keys; -1 names none
    size: int  # keys of a unit

    @classmethod
    def of(cls, module: Any, indices: Tensor | None, block_indices: Tensor | None) -> "KeyLists":
        """From the keywords of a layer, of which one is given."""
        if indices is not None:
            return cls(indices[:, None], 1)
        assert block_indices is not None
        return cls(block_indices, module.indexer.block_size)

    def keys(self, shown: Tensor) -> "KeyLists":
        """The single keys of the lists that a mask shows. shown: (batch or 1, 1, Lq or 1, Lk)"""
        batch, groups, query_len, _ = self.entries.shape
        units = self.entries.long()[..., None]
        keys = (units * self.size + torch.arange(self.size, device=units.device)).flatten(-2)
        key_len = shown.shape[3]
        named = (keys >= 0) & (keys < key_len)  # a negative unit has negative keys
        shown = shown.expand(batch, groups, query_len, key_len)
        seen = shown.gather(3, keys.clamp(0, key_len - 1)) & named
        return KeyLists(keys.where(seen, -1), 1)

    def mask(self, num_heads: int, key_len: int) -> Tensor:
        """(batch, 1 or num_heads, Lq, key_len) bool: the keys that the lists name."""
        count = -(-key_len // self.size)
        named = (self.entries >= 0) & (self.entries < count)
        where = self.entries.long().where(named, count)
        shape = *where.shape[:-1], count + 1
        listed = torch.zeros(shape, dtype=torch.bool, device=where.device)
        listed = listed.scatter(-1, where, True)[..., :count]
        listed = listed.repeat_interleave(self.size, -1)[..., :key_len]
        groups = listed.shape[1]
        return listed if groups == 1 else listed.repeat_interleave(num_heads // groups, 1)


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a mask shows: pairs of queries and keys, or the first `length` keys as far as `options`
    let them through.
    """

    pairs: Tensor | None  # (batch or 1, 1 or num_heads, Lq or 1, Lk), bool or added to the logits
    length: int
    options: dict[str, Any]  # causal and windows

    @classmethod
    def of(
        cls, attention_mask: Tensor | None, query_len: int, key_len: int, options: dict[str, Any]
    ) -> "Shown":
        """From a mask of `make_mask`. options: the layer's, which count if the mask does not."""
        names = "causal", "window_size_left", "window_size_right"
        options = {name: options[name] for name in names}
        if isinstance(attention_mask, ShortMask):
            if attention_mask.keys is None and attention_mask.cu_seqlens is None:
                window = attention_mask.window
                values = attention_mask.causal, window, window
                return cls(None, attention_mask.written, dict(zip(names, values, strict=True)))
            attention_mask = attention_mask.full()
        if attention_mask is None:
            return cls(None, key_len, options)
        if attention_mask.dim() == 2:  # a static cache is longer than its written part
            length = attention_mask.shape[1]
            pairs = _pairs(query_len, length, length, options, attention_mask.device)
            return cls(attention_mask[:, None, None].bool() & pairs, length, {})
        if attention_mask.dim() != 4:
            raise NotImplementedError(
                "torch_paged_attn: lists of keys (indices, block_indices) are not supported with"
                " packed rows: use rows of one sequence each"
            )
        return cls(attention_mask, attention_mask.shape[3], {})


def _pairs(
    query_len: int, key_len: int, length: int, options: dict[str, Any], device: Any
) -> Tensor:
    """(Lq, key_len) bool: the keys below `length` that a causal mask and windows show."""
    key = torch.arange(key_len, device=device)
    query = torch.arange(length - query_len, length, device=device)[:, None]
    seen = (key < length).expand(query_len, key_len)
    right = 0 if options["causal"] else options["window_size_right"]
    if right >= 0:
        seen = seen & (key <= query + right)
    if (left := options["window_size_left"]) >= 0:
        seen = seen & (key >= query - left)
    return seen


def listed_mask(lists: KeyLists, shown: Shown, query: Tensor, key: Tensor) -> Tensor:
    """A mask (batch, 1 or num_heads, Lq, Lk) of the keys that the lists name and the mask shows."""
    num_heads, query_len, key_len = query.shape[1], query.shape[2], key.shape[2]
    if shown.pairs is None:
        pairs = _pairs(query_len, key_len, shown.length, shown.options, key.device)
        return lists.mask(num_heads, key_len) & pairs
    listed = lists.mask(num_heads, shown.pairs.shape[3])
    if shown.pairs.dtype == torch.bool:
        return shown.pairs & listed
    return shown.pairs.masked_fill(~listed, float("-inf"))


def attend_listed(
    lists: KeyLists,
    shown: Shown,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    options: dict[str, Any],
) -> Tensor | None:
    """Attention to the listed keys, (batch * Lq, num_heads, head_dim_v); None if the call needs a
    mask of all pairs, or is faster with one.
    """
    num_heads, num_kv_heads, query_len = query.shape[1], key.shape[1], query.shape[2]
    batch, groups, _, entries = lists.entries.shape
    if groups not in (1, num_kv_heads) or lists.size not in SELECT_SIZES:
        return None
    if shown.pairs is not None and (shown.pairs.dtype != torch.bool or shown.pairs.shape[1] != 1):
        return None
    if options.get("dropout_p") or not _is_served(key.device.type):
        return None
    rows_of_a_head = query_len * num_heads // num_kv_heads
    if not reads_less(query_len * entries * lists.size, rows_of_a_head, shown.length):
        return None
    options = options | {"causal": False, "window_size_left": -1, "window_size_right": -1}
    if shown.pairs is None:
        options |= shown.options
    else:
        lists = lists.keys(shown.pairs)
    named = lists.entries.transpose(1, 2).flatten(0, 1).int()

    def attend(q: Tensor, k: Tensor, v: Tensor, *args: Any, **keywords: Any) -> Any:
        return selected_attention(q, k, v, named, *args, select_size=lists.size, **keywords)

    lengths = _constants.repeated(shown.length, batch, key)
    return attend_rows(query, key, value, lengths, options, shown.length, attend)


def reads_less(selected: int, rows: int, key_len: int) -> bool:
    """Whether the queries' lists are no more keys than attention to all keys reads.

    selected: listed keys of all queries; rows: of q that a KV head serves
    """
    return selected <= key_len * -(-rows // ROWS_OF_A_TILE)


@functools.cache
def _is_served(device_type: str) -> bool:
    """Whether the backend that serves a device has `selected_attention`."""
    backend, _ = serving_device(torch.device(device_type))
    return backend is not None and (backend.is_compiled or backend.has("selected_attention"))


def refuse_lists(cache: Any, cu_seqlens: Any, attention_mask: Tensor | None) -> None:
    """Raise NotImplementedError for what lists of keys do not go with."""
    for name, given in (("cache", cache), ("cu_seq_lens_q", cu_seqlens)):
        if given is not None and (name == "cache" or attention_mask is None):
            checks.refuse(
                "attention_forward",
                f"indices and block_indices are not supported with {name}",
                "use rows of one sequence each, without generate_batch",
            )
