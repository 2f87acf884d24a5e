"""`reshape_and_cache` on GPUs: a program writes elements of keys and of values of a few tokens.

Tokens of one slot must not write at once. Of few tokens, each looks whether a later one has its
slot. Of many, each first leaves its number with the slot, in a launch of its own: whatever number
is found there then is that of the one that writes, so that memory nobody initialised will do.
"""

import logging
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.dequant import as_stored, decode, encode
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
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
    gdc_wait(IS_DEPENDENT)
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
    gdc_wait(IS_DEPENDENT)
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
    launch_cache.call("reshape_and_cache", _plan, (*args, *(None,) * (6 - len(args))), {})


def reshape_and_cache_split(*args: Any) -> None:
    """Arguments as in the op `reshape_and_cache.split`."""
    tensors = *args, *(None,) * (7 - len(args))
    launch_cache.call("reshape_and_cache.split", _plan_split, tensors, {})


def _plan(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> Plan:
    check(key, value, kv_cache, slot_mapping, k_scale, v_scale)
    write = _Write(key, value, kv_cache[0], kv_cache[1], slot_mapping, k_scale, v_scale)
    v_offset = kv_cache.stride(0) * kv_cache.itemsize

    def run(key: Tensor, value: Tensor, kv_cache: Tensor, *rest: Any) -> None:
        if write.is_ready:
            # half of a tensor costs more than the rest of this function
            write(key, value, kv_cache, kv_cache.data_ptr() + v_offset, *rest)
        else:
            write(key, value, kv_cache[0], kv_cache[1], *rest)

    return run


def _plan_split(*tensors: Any) -> Plan:
    check_split(*tensors)
    return _Write(*tensors)


class _Write:
    """The launches for calls like one."""

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        slot_mapping: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None:
        num_tokens, num_heads = slot_mapping.shape[0], key.shape[1]
        num_slots = k_cache.shape[0] * k_cache.shape[2]
        self._target = target = target_of(key.device)
        is_dependent = dependent_launch(target.overlaps_launches)
        self._is_empty = num_tokens == 0
        self._claim: Launch | None = None
        if num_tokens > FEW_TOKENS:
            self._new_claims = Allocation((num_slots,), torch.int32, key.device)
            self._claim = Launch(
                _claim_kernel,
                (triton.cdiv(num_tokens, CLAIMED),),
                stride_slot=slot_mapping.stride(0),
                num_tokens=num_tokens,
                num_slots=num_slots,
                BLOCK=CLAIMED,
                **is_dependent,
            )
        logger.debug(
            "reshape_and_cache: %s for %d tokens",
            "one launch" if self._claim is None else "two launches",
            num_tokens,
        )
        dim, dim_v = key.shape[2], value.shape[2]
        elements = num_heads * max(dim, dim_v)
        block_e = min(next_power_of_2(elements), BLOCK)
        block_t = max(min(BLOCK // block_e, next_power_of_2(num_tokens) // 2), 1)
        self._copy = Launch(
            _reshape_and_cache_kernel,
            (triton.cdiv(num_tokens, block_t), triton.cdiv(elements, block_e)),
            stride_key_token=key.stride(0),
            stride_key_head=key.stride(1),
            stride_value_token=value.stride(0),
            stride_value_head=value.stride(1),
            stride_k_page=k_cache.stride(0),
            stride_k_head=k_cache.stride(1),
            stride_k_slot=k_cache.stride(2),
            stride_v_page=v_cache.stride(0),
            stride_v_head=v_cache.stride(1),
            stride_v_slot=v_cache.stride(2),
            stride_slot=slot_mapping.stride(0),
            stride_k_scale=0 if k_scale is None else k_scale.expand(num_heads).stride(0),
            stride_v_scale=0 if v_scale is None else v_scale.expand(num_heads).stride(0),
            num_tokens=num_tokens,
            num_heads=num_heads,
            num_slots=num_slots,
            page_size=k_cache.shape[2],
            DIM=dim,
            DIM_V=dim_v,
            SOURCE_FORMAT=as_stored(key, target)[1],
            CACHE_FORMAT=as_stored(k_cache, target)[1],
            BLOCK_T=block_t,
            BLOCK_E=block_e,
            WIDTH=1 if self._claim is not None else next(w for w in WIDTHS if num_tokens <= w),
            **is_dependent,
        )

    @property
    def is_ready(self) -> bool:
        """Whether addresses may stand for the caches."""
        return self._copy.is_ready

    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        k_cache: Any,
        v_cache: Any,
        slot_mapping: Tensor,
        k_scale: Tensor | None,
        v_scale: Tensor | None,
    ) -> None:
        if self._is_empty:
            return
        claims = None
        if self._claim is not None:
            claims = self._new_claims()
            self._claim(slot_mapping, claims)
        rows: Any = key, value, k_cache, v_cache
        if not self._copy.is_ready:
            rows = [as_stored(x, self._target)[0] for x in rows]
        self._copy(*rows, slot_mapping, k_scale, v_scale, claims)
