"""Attention in a step of Transformers' `generate_batch`, over the pages that Transformers keeps."""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.ops import flash_varlen, reshape_and_cache


def rows(x: Tensor) -> Tensor:
    """(batch, heads, length, head_dim) as (tokens, heads, head_dim)."""
    return x.transpose(1, 2).flatten(0, 1)


@functools.cache
def _models_update_caches() -> bool:
    """Whether a model hands its keys to the cache by itself, as from 5.19 on."""
    from transformers.generation.continuous_batching import PagedAttentionCache

    return "kwargs" in inspect.signature(PagedAttentionCache.update).parameters


def keep_pages(names: tuple[str, ...]) -> None:
    """From 5.24 on a model hands its new keys and values to the cache before it calls attention,
    and gets all keys of the step gathered. For models with one of these implementations the cache
    stays as it is, and attention gets it, which then writes and reads its pages.
    """
    from transformers.generation.continuous_batching import PagedAttentionCache

    update: Any = PagedAttentionCache.update
    if not _models_update_caches() or hasattr(update, "torch_paged_attn"):
        return

    @functools.wraps(update)
    def keep(
        cache: Any,
        key_states: Tensor,
        value_states: Tensor,
        layer_idx: int,
        kwargs: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        if cache.config._attn_implementation not in names:
            return update(cache, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = cache
        return key_states, value_states

    keep.torch_paged_attn = True  # type: ignore[attr-defined]
    setattr(PagedAttentionCache, "update", keep)  # noqa: B010


def continuous(
    layer_idx: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Any,
    cache: Any,
    step: dict[str, Any],
    options: dict[str, Any],
) -> Tensor:
    """Attention in a step of `generate_batch`. The row has the new tokens of all sequences; older
    keys are in Transformers' cache.
    """
    group, pages = _pages(cache, layer_idx)
    max_seqlen_k = step["max_length_k" if "max_length_k" in step else "max_seqlen_k"]  # 5.17
    if isinstance(cu_seqlens_k, dict):
        layer_type = "sliding_attention" if pages is None else "full_attention"
        cu_seqlens_k, max_seqlen_k = cu_seqlens_k[layer_type], max_seqlen_k[layer_type]
    if pages is None:
        key, value = _gathered(cache, layer_idx, key, value, step, group)
        return flash_varlen(rows(query), key, value, cu_seqlens_q, cu_seqlens_k, **options)[0]

    k_pages, v_pages = pages
    written, read = step["write_index"][group], step["read_index"][group]
    reshape_and_cache(rows(key), rows(value), pages, written)
    # if there is nothing to read, every key of these sequences is new
    slots = read if read.numel() else written
    return flash_varlen(
        rows(query),
        k_pages,
        v_pages,
        cu_seqlens_q,
        cu_seqlens_k,
        block_table=_block_table(slots, cu_seqlens_k, k_pages.shape[2], max_seqlen_k),
        **options,
    )[0]


def _block_table(slots: Tensor, cu_seqlens_k: Tensor, page_size: int, max_seqlen_k: int) -> Tensor:
    """The block table, computed on the device from the slots of all sequences' keys."""
    first_keys = torch.arange(0, max_seqlen_k, page_size, device=slots.device)
    keys = cu_seqlens_k[:-1, None] + first_keys
    return (slots[keys.clamp_(max=len(slots) - 1)] // page_size).int()


def _pages(cache: Any, layer_idx: int) -> tuple[int, tuple[Tensor, Tensor] | None]:
    """A layer's index in the step's index lists, and its pages (k, v); None for a sliding layer."""
    if hasattr(cache, "layer_to_allocator"):
        allocator = cache.layer_to_allocator[layer_idx]
        if not allocator.supports_block_table:
            return allocator.index, None
        group, pages = allocator.index, allocator.get_cache_for_block_table(layer_idx)
    else:  # 5.17
        group, i = cache.layer_index_to_group_indices[layer_idx]
        if cache.sliding_windows[layer_idx] != 1:
            return group, None
        shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
        pages = cache.key_cache[i].view(shape), cache.value_cache[i].view(shape)
    k_pages, v_pages = pages
    return group, (k_pages.transpose(1, 2), v_pages.transpose(1, 2))


def _gathered(
    cache: Any, layer_idx: int, key: Tensor, value: Tensor, step: dict[str, Any], group: int
) -> tuple[Tensor, Tensor]:
    """Write a sliding layer's new keys and values, and return all rows that its sequences see."""
    if _models_update_caches():
        indices = step["read_index"][group], step["write_index"][group]
        allocator = cache.layer_to_allocator[layer_idx]
        return allocator.update(rows(key), rows(value), layer_idx, *indices)
    # 5.17, 5.18
    return cache.update(key, value, layer_idx, step["read_index"], step["write_index"])
