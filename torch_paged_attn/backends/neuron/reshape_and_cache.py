"""`reshape_and_cache` on Neuron: one scatter of rows for the keys, one for the values."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged_attn.backends.neuron.attention import refuse
from torch_paged_attn.backends.neuron.kernels.gather_scatter import P, reshape_and_cache_kernel
from torch_paged_attn.backends.neuron.paged_kv import as_rows
from torch_paged_attn.backends.neuron.runtime import launch, write_back
from torch_paged_attn.ops.checks import FLOAT8
from torch_paged_attn.ops.reshape_and_cache import OP


def reshape_and_cache(
    key: Tensor, value: Tensor, kv_cache: Tensor, *slots_and_scales: Any, **options: Any
) -> None:
    """Arguments as in `ops.reshape_and_cache` with one cache tensor."""
    options["names"] = "kv_cache", "kv_cache"
    reshape_and_cache_split(key, value, kv_cache[0], kv_cache[1], *slots_and_scales, **options)


def reshape_and_cache_split(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    names: tuple[str, str] = ("k_cache", "v_cache"),
) -> None:
    """Arguments as in `ops.reshape_and_cache` with a pair of caches; refusals call them `names`."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens == 0 or k_cache.shape[0] == 0:
        return
    # every refusal comes before the first write
    caches = [as_rows(cache, allow_copy=False) for cache in (k_cache, v_cache)]
    for name, cache, rows in zip(names, (k_cache, v_cache), caches, strict=True):
        if rows is None:
            refuse(OP, f"{name} has strides {cache.stride()}, no rows of a multiple of their gcd")
    slots = _last_of_each(slot_mapping.long(), k_cache.shape[0] * k_cache.shape[2])
    padding = -num_tokens % P
    slots = F.pad(slots, (0, padding), value=-1)
    page, offset = slots // k_cache.shape[2], slots % k_cache.shape[2]
    for new, scale, rows in zip((key, value), (k_scale, v_scale), caches, strict=True):
        assert rows is not None
        index = rows.row_of(page, 0, offset).where(slots >= 0, -1).to(torch.int32)
        written = launch(
            reshape_and_cache_kernel,
            rows=F.pad(_stored(new[:num_tokens], scale, rows.storage.dtype), (0, 0, 0, padding)),
            index=index[:, None],
            cache=_bytes(rows.storage),
            num_kv_heads=new.shape[1],
            layout=rows.layout,
        )
        write_back(_bytes(rows.storage), written)


def _stored(new: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Tokens in the cache's dtype, one a row; the graph compiler fuses this arithmetic."""
    if dtype == new.dtype:
        return new.flatten(1)
    real = new.float() if scale is None else new.float() / scale.view(-1, 1)
    if dtype == torch.int8:
        real = real.round().clamp(-128, 127)
    else:
        real = real.clamp(torch.finfo(dtype).min, torch.finfo(dtype).max)
    return _bytes(real.to(dtype)).flatten(1)


def _bytes(stored: Tensor) -> Tensor:
    """8-bit floats viewed as bytes: NKI's differ by generation."""
    return stored.view(torch.uint8) if stored.dtype in FLOAT8 else stored


def _last_of_each(slots: Tensor, num_slots: int) -> Tensor:
    """The slots, but -1 outside the cache and for all but a slot's last token: scatters race."""
    slots = slots.where((slots >= 0) & (slots < num_slots), -1)
    ordered, token = slots.sort(stable=True)
    is_last = F.pad(ordered[1:] != ordered[:-1], (0, 1), value=True)
    return torch.empty_like(slots).scatter_(0, token, ordered.where(is_last, -1))
