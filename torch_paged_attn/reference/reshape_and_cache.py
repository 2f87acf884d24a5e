"""Plain PyTorch `reshape_and_cache`, which writes into the cache like the op."""

from collections.abc import Iterator

import torch
from torch import Tensor

from torch_paged_attn.reference.attention import to_storage


def _places(slot_mapping: Tensor, page_size: int) -> Iterator[tuple[int, int, int]]:
    """The tokens that have a slot, each with its page and its offset there."""
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            yield token, slot // page_size, slot % page_size


def reshape_and_cache_split(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Arguments as in `ops.reshape_and_cache` with a pair of caches."""
    for token, page, offset in _places(slot_mapping, k_cache.shape[2]):
        for new, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
            row = new[token].float()
            if scale is not None:
                row = row / scale.view(-1, 1)
            cache[page, :, offset] = to_storage(row, cache.dtype)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Arguments as in `ops.reshape_and_cache` with one cache tensor."""
    reshape_and_cache_split(key, value, kv_cache[0], kv_cache[1], slot_mapping, k_scale, v_scale)


# dtype of a cache -> the largest number that a scaled row holds
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.int8: 127.0}
LARGEST[torch.uint8] = 7.0  # int4


def reshape_and_cache_quantize(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slot_mapping: Tensor,
) -> None:
    """Arguments as in the op `reshape_and_cache.quantize`."""
    for token, page, offset in _places(slot_mapping, k_cache.shape[2]):
        for new, cache, scales in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
            row = new[token].float()
            scale = row.abs().amax(-1) / LARGEST[cache.dtype]
            scale = scale.masked_fill(scale == 0.0, 1.0)
            scales[page, :, offset] = scale
            scaled = (row / scale[:, None]).clamp(-LARGEST[cache.dtype], LARGEST[cache.dtype])
            cache[page, :, offset] = to_storage(scaled, cache.dtype)
