"""`reshape_and_cache` on GPUs: one launch, one program a token, keys and values together.

Tokens of one slot take turns: a program holds the slot's lock (one of LOCKS, shared by slots that
are equal modulo LOCKS) while it writes, so that the last of them wins whole.
"""

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.formats import as_stored, decode, encode
from torch_paged_attn.backends.triton.launch import launch
from torch_paged_attn.backends.triton.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.values import values_are_checked
from torch_paged_attn.ops.reshape_and_cache import check, check_split, check_values_split

LOCKS = 1 << 16

# elements of one head block: more would not stay in registers
BLOCK_ELEMENTS = 4096


@functools.cache
def _cached_locks(device: torch.device) -> Tensor:
    return torch.zeros(LOCKS, dtype=torch.int32, device=device)


def _locks(device: torch.device) -> Tensor:
    """All zero between launches: every program that takes a lock gives it back."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        # zeros made under capture are zero only when the graph has run: not for others to share
        return torch.zeros(LOCKS, dtype=torch.int32, device=device)
    return _cached_locks(device)


@triton.jit
def _write_rows(
    source_ptr,
    cache_ptr,
    stride_source_head,
    stride_cache_head,
    scale_ptr,
    stride_scale,
    num_heads,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SOURCE_FORMAT: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
):
    """All heads of one token, from its row of `source` to its slot of `cache`."""
    dims = tl.arange(0, WIDTH)
    for h0 in tl.range(0, num_heads, BLOCK_H):
        head = (h0 + tl.arange(0, BLOCK_H)).to(tl.int64)
        inside = (head < num_heads)[:, None] & (dims < DIM)[None, :]
        source = source_ptr + (head * stride_source_head)[:, None] + dims[None, :]
        x = decode(tl.load(source, mask=inside, other=0), SOURCE_FORMAT, tl.float32)
        if scale_ptr is not None:
            scale = tl.load(scale_ptr + head * stride_scale, mask=head < num_heads, other=1.0)
            x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        cache = cache_ptr + (head * stride_cache_head)[:, None] + dims[None, :]
        tl.store(cache, encode(x, cache_ptr.dtype.element_ty, CACHE_FORMAT), mask=inside)


@triton.jit(do_not_specialize=("num_slots",))
def _reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    lock_ptr,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_k_page,
    stride_k_head,
    stride_k_slot,
    stride_v_page,
    stride_v_head,
    stride_v_slot,
    stride_slot,
    stride_k_scale,
    stride_v_scale,
    num_heads,
    num_slots,
    page_size,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_H: tl.constexpr,
    DIM_V: tl.constexpr,
    WIDTH_V: tl.constexpr,
    BLOCK_H_V: tl.constexpr,
    SOURCE_FORMAT: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    LOCKS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token * stride_slot).to(tl.int64)
    if (slot < 0) | (slot >= num_slots):
        return
    page, offset = slot // page_size, slot % page_size
    lock = lock_ptr + slot % LOCKS
    while tl.atomic_cas(lock, 0, 1) != 0:
        pass
    _write_rows(
        key_ptr + token * stride_key_token,
        k_cache_ptr + page * stride_k_page + offset * stride_k_slot,
        stride_key_head,
        stride_k_head,
        k_scale_ptr,
        stride_k_scale,
        num_heads,
        DIM,
        WIDTH,
        BLOCK_H,
        SOURCE_FORMAT,
        CACHE_FORMAT,
    )
    _write_rows(
        value_ptr + token * stride_value_token,
        v_cache_ptr + page * stride_v_page + offset * stride_v_slot,
        stride_value_head,
        stride_v_head,
        v_scale_ptr,
        stride_v_scale,
        num_heads,
        DIM_V,
        WIDTH_V,
        BLOCK_H_V,
        SOURCE_FORMAT,
        CACHE_FORMAT,
    )
    # every thread has written before one of them gives the lock back
    tl.debug_barrier()
    tl.atomic_xchg(lock, 0)


def reshape_and_cache(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Arguments as in the op `reshape_and_cache`."""
    check(key, value, kv_cache, slot_mapping, k_scale, v_scale)
    _launch(key, value, kv_cache[0], kv_cache[1], slot_mapping, k_scale, v_scale)


def reshape_and_cache_split(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Arguments as in the op `reshape_and_cache.split`."""
    check_split(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)
    _launch(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale)


def _launch(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    if values_are_checked():
        check_values_split(key, value, k_cache, v_cache, slot_mapping)
    num_tokens, num_heads = slot_mapping.shape[0], key.shape[1]
    if num_tokens == 0:
        return
    target = target_of(key.device)
    (k_new, source_format), (v_new, _) = as_stored(key, target), as_stored(value, target)
    (k_old, cache_format), (v_old, _) = as_stored(k_cache, target), as_stored(v_cache, target)
    dim, dim_v = key.shape[2], value.shape[2]
    width, width_v = next_power_of_2(dim), next_power_of_2(dim_v)
    heads = next_power_of_2(num_heads)
    launch(
        _reshape_and_cache_kernel,
        (num_tokens,),
        k_new,
        v_new,
        k_old,
        v_old,
        slot_mapping,
        k_scale,
        v_scale,
        _locks(key.device),
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        slot_mapping.stride(0),
        0 if k_scale is None else k_scale.expand(num_heads).stride(0),
        0 if v_scale is None else v_scale.expand(num_heads).stride(0),
        num_heads,
        k_cache.shape[0] * k_cache.shape[2],
        k_cache.shape[2],
        DIM=dim,
        WIDTH=width,
        BLOCK_H=max(1, min(heads, BLOCK_ELEMENTS // width)),
        DIM_V=dim_v,
        WIDTH_V=width_v,
        BLOCK_H_V=max(1, min(heads, BLOCK_ELEMENTS // width_v)),
        SOURCE_FORMAT=source_format,
        CACHE_FORMAT=cache_format,
        LOCKS=LOCKS,
    )
