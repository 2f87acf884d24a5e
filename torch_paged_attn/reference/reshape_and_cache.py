"""Plain PyTorch `reshape_and_cache`, which writes into the cache like the op."""

from torch import Tensor

from torch_paged_attn.reference.attention import to_storage


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
    page_size = k_cache.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        for new, cache, scale in ((key, k_cache, k_scale), (value, v_cache, v_scale)):
            row = new[token].float()
            if scale is not None:
                row = row / scale.view(-1, 1)
            cache[slot // page_size, :, slot % page_size] = to_storage(row, cache.dtype)


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
