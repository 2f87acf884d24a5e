"""`reshape_and_cache` on GPUs: a program writes elements of keys and of values of a few tokens.

Tokens of one slot must not write at once. Of few tokens, each looks whether a later one has its
slot. Of many, each first leaves its number with the slot, in a launch of its own: whatever number
is found there then is that of the one that writes, so that memory nobody initialised will do.
"""

import functools
import logging
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.dequant import as_stored, decode, encode
from torch_paged_attn.backends.triton.runtime import recipes
from torch_paged_attn.backends.triton.runtime.launch import allocate, follow, following, launch
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.ops._again import UNKNOWN
from torch_paged_attn.ops.reshape_and_cache import check, check_split

logger = logging.getLogger(__name__)

# up to so many tokens a program looks through all slots, in one of few widths
FEW_TOKENS = 1024
WIDTHS = (1, 32, 256, FEW_TOKENS)

# tokens of a program that leaves their numbers
CLAIMED = 256

# elements of keys, and as many of values, that a program copies
BLOCK = 2048


@triton.jit
def _slots(slot_ptr, stride_slot, token, num_tokens, num_slots):
    """The slots of these tokens; -1 for those that write nothing."""
    slot = tl.load(slot_ptr + token * stride_slot, mask=token < num_tokens, other=-1).to(tl.int64)
    return tl.where(slot < num_slots, slot, -1)


@triton.jit(do_not_specialize=("num_tokens", "num_slots"))
def _claim_kernel(
    slot_ptr,
    claims_ptr,
    stride_slot,
    num_tokens,
    num_slots,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Leave the number of each token with its slot; one of those that share a slot stays."""
    follow(IS_DEPENDENT)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = _slots(slot_ptr, stride_slot, token, num_tokens, num_slots)
    tl.store(claims_ptr + slot, token, mask=slot >= 0)


@triton.jit
def _load_rows(
    ptr,
    token,
    num_tokens,
    stride_token,
    stride_head,
    num_heads,
    DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    """This program's elements of the tokens' rows of all heads, one after another, in float32."""
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    inside = (token < num_tokens)[:, None] & (e < num_heads * DIM)[None, :]
    row = (token.to(tl.int64) * stride_token)[:, None]
    offset = (e // DIM).to(tl.int64) * stride_head + e % DIM
    return decode(tl.load(ptr + row + offset[None, :], mask=inside, other=0), FORMAT, tl.float32)


@triton.jit
def _store_rows(
    x,
    ptr,
    page,
    offset_in_page,
    writes,
    stride_page,
    stride_head,
    stride_slot,
    scale_ptr,
    stride_scale,
    num_heads,
    DIM: tl.constexpr,
    FORMAT: tl.constexpr,
    BLOCK_E: tl.constexpr,
):
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    exists = e < num_heads * DIM
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + e // DIM * stride_scale, mask=exists, other=1.0)
        x = tl.div_rn(x, tl.broadcast_to(scale[None, :], x.shape))
    row = (page * stride_page + offset_in_page * stride_slot)[:, None]
    offset = (e // DIM).to(tl.int64) * stride_head + e % DIM
    stored = encode(x, ptr.dtype.element_ty, FORMAT)
    tl.store(ptr + row + offset[None, :], stored, mask=writes[:, None] & exists[None, :])


@triton.jit(do_not_specialize=("num_tokens", "num_slots"))
def _reshape_and_cache_kernel(
    key_ptr,
    value_ptr,
    k_cache_ptr,
    v_cache_ptr,
    slot_ptr,
    k_scale_ptr,
    v_scale_ptr,
    claims_ptr,
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
    num_tokens,
    num_heads,
    num_slots,
    page_size,
    DIM: tl.constexpr,
    DIM_V: tl.constexpr,
    SOURCE_FORMAT: tl.constexpr,
    CACHE_FORMAT: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_E: tl.constexpr,
    WIDTH: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    follow(IS_DEPENDENT)
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    slot = _slots(slot_ptr, stride_slot, token, num_tokens, num_slots)
    # on their way before anybody knows whether they are written
    key = _load_rows(
        key_ptr, token, num_tokens, stride_key_token, stride_key_head, num_heads,
        DIM, SOURCE_FORMAT, BLOCK_E,
    )  # fmt: skip
    value = _load_rows(
        value_ptr, token, num_tokens, stride_value_token, stride_value_head, num_heads,
        DIM_V, SOURCE_FORMAT, BLOCK_E,
    )  # fmt: skip
    writes = slot >= 0
    if claims_ptr is not None:
        writes = writes & (tl.load(claims_ptr + slot, mask=writes, other=-1) == token)
    elif WIDTH > 1:
        other = tl.arange(0, WIDTH)
        other_slot = _slots(slot_ptr, stride_slot, other, num_tokens, num_slots)
        is_later = (other[None, :] > token[:, None]) & (other_slot[None, :] == slot[:, None])
        writes = writes & (tl.sum(is_later.to(tl.int32), 1) == 0)
    page, offset = slot // page_size, slot % page_size
    _store_rows(
        key, k_cache_ptr, page, offset, writes, stride_k_page, stride_k_head, stride_k_slot,
        k_scale_ptr, stride_k_scale, num_heads, DIM, CACHE_FORMAT, BLOCK_E,
    )  # fmt: skip
    _store_rows(
        value, v_cache_ptr, page, offset, writes, stride_v_page, stride_v_head, stride_v_slot,
        v_scale_ptr, stride_v_scale, num_heads, DIM_V, CACHE_FORMAT, BLOCK_E,
    )  # fmt: skip


def reshape_and_cache(*args: Any) -> None:
    """Arguments as in the op `reshape_and_cache`."""
    tensors = *args, *(None,) * (6 - len(args))
    if recipes.play("reshape_and_cache", tensors, {}) is UNKNOWN:
        recipes.make(functools.partial(_write, *tensors), "reshape_and_cache", tensors, {})


def reshape_and_cache_split(*args: Any) -> None:
    """Arguments as in the op `reshape_and_cache.split`."""
    tensors = *args, *(None,) * (7 - len(args))
    if recipes.play("reshape_and_cache.split", tensors, {}) is UNKNOWN:
        write = functools.partial(_write_split, *tensors)
        recipes.make(write, "reshape_and_cache.split", tensors, {})


def _write(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    check(key, value, kv_cache, slot_mapping, k_scale, v_scale)
    _launch(key, value, kv_cache[0], kv_cache[1], slot_mapping, k_scale, v_scale)


def _write_split(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
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
    num_tokens, num_heads = slot_mapping.shape[0], key.shape[1]
    if num_tokens == 0:
        return
    target = target_of(key.device)
    (k_new, source_format), (v_new, _) = as_stored(key, target), as_stored(value, target)
    (k_old, cache_format), (v_old, _) = as_stored(k_cache, target), as_stored(v_cache, target)
    num_slots = k_cache.shape[0] * k_cache.shape[2]
    is_following = following(target.overlaps_launches)
    claims = None
    is_few = num_tokens <= FEW_TOKENS
    launches = "one launch" if is_few else "two launches"
    logger.debug("reshape_and_cache: %s for %d tokens", launches, num_tokens)
    if not is_few:
        claims = allocate((num_slots,), torch.int32, slot_mapping.device)
        grid = (triton.cdiv(num_tokens, CLAIMED),)
        slots = (slot_mapping, claims, slot_mapping.stride(0), num_tokens, num_slots)
        launch(_claim_kernel, grid, *slots, BLOCK=CLAIMED, **is_following)
    dim, dim_v = key.shape[2], value.shape[2]
    elements = num_heads * max(dim, dim_v)
    block_e = min(next_power_of_2(elements), BLOCK)
    block_t = max(min(BLOCK // block_e, next_power_of_2(num_tokens) // 2), 1)
    launch(
        _reshape_and_cache_kernel,
        (triton.cdiv(num_tokens, block_t), triton.cdiv(elements, block_e)),
        k_new,
        v_new,
        k_old,
        v_old,
        slot_mapping,
        k_scale,
        v_scale,
        claims,
        *key.stride()[:2],
        *value.stride()[:2],
        *k_cache.stride()[:3],
        *v_cache.stride()[:3],
        slot_mapping.stride(0),
        0 if k_scale is None else k_scale.expand(num_heads).stride(0),
        0 if v_scale is None else v_scale.expand(num_heads).stride(0),
        num_tokens,
        num_heads,
        num_slots,
        k_cache.shape[2],
        DIM=dim,
        DIM_V=dim_v,
        SOURCE_FORMAT=source_format,
        CACHE_FORMAT=cache_format,
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        WIDTH=1 if claims is not None else next(w for w in WIDTHS if num_tokens <= w),
        **is_following,
    )
