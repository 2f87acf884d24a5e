"""`reshape_and_cache.quantize` on GPUs: a program has some heads of a few tokens. It finds the
scales of their rows, writes them, and writes the rows divided by them.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.cache_write.written_slots import (
    WIDTHS,
    claims_of,
    slots_of,
    width_of,
    writes_of,
)
from torch_paged_attn.backends.triton.common.dequant import as_stored, decode, encode, stored_format
from torch_paged_attn.backends.triton.common.int4 import encode_two
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.ops.reshape_and_cache import check_quantize

# elements of keys, and as many of values, of a program of one warp: of blocks of 1,024 to 8,192 and
# of one to eight warps, the fastest for each format on an H200
BLOCK, NUM_WARPS = 1024, 1

LARGEST = {
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
    torch.int8: 127.0,
    torch.uint8: 7.0,
}


class QuantizePointers(NamedTuple):
    key: Any
    value: Any
    k_cache: Any
    v_cache: Any
    k_scale: Any
    v_scale: Any
    slots: Any
    claims: Any  # by slot: the number of the token that writes it


class ScaledStrides(NamedTuple):
    """Strides in elements, of keys or values: of the new rows, of the cache and of the scales."""

    token: int
    head: int
    page: int
    cache_head: int
    slot: int
    scale_page: int
    scale_head: int
    scale_slot: int


class QuantizeStrides(NamedTuple):
    """Strides in elements."""

    k: ScaledStrides
    v: ScaledStrides
    slots: int


class QuantizeOptions(NamedTuple):
    NUM_HEADS: int
    DIM: int
    DIM_V: int
    SOURCE_FORMAT: str
    CACHE_FORMAT: str
    LARGEST: float  # number of the cache's format
    HAS_FMA: bool  # the interpreter rounds twice
    BLOCK_T: int  # tokens of a program
    BLOCK_H: int  # heads of each
    WIDTH: int  # see `written_slots.py`


@triton.jit
def _load_rows(ptr, token, head, num_tokens, strides, DIM: tl.constexpr, OPTIONS: tl.constexpr):
    """Rows (tokens, heads, DIM or more) in float32; elements that do not exist are 0."""
    FORMAT: tl.constexpr = OPTIONS.SOURCE_FORMAT
    d = tl.arange(0, triton.next_power_of_2(DIM))
    exists = (token < num_tokens)[:, None] & (head < OPTIONS.NUM_HEADS)[None, :]
    row = token.to(tl.int64)[:, None] * strides.token + head.to(tl.int64)[None, :] * strides.head
    inside = exists[:, :, None] & (d < DIM)[None, None, :]
    x = tl.load(ptr + row[:, :, None] + d[None, None, :], mask=inside, other=0)
    return decode(x, FORMAT, tl.float32)


@triton.jit
def _encode(x, pointer_type: tl.constexpr, FORMAT: tl.constexpr):
    """Numbers that are inside the format's range, but for a rounding, as they are stored."""
    if FORMAT == "INT4":
        even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
        return encode_two(even, odd)
    elif pointer_type == tl.int8:
        # adding 1.5 * 2**23 rounds, and leaves the integer in the last bits
        return (x + 12582912.0).to(tl.uint32, bitcast=True).to(tl.int8)
    else:
        return encode(x, pointer_type, FORMAT)


@triton.jit
def _quantize(x, pointer_type: tl.constexpr, OPTIONS: tl.constexpr):
    """Rows as they are stored, and their scales."""
    FORMAT: tl.constexpr = OPTIONS.CACHE_FORMAT
    LARGEST: tl.constexpr = OPTIONS.LARGEST
    # the bits of sizes are ordered as sizes are, and NaN comes after all of them
    bits = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 2)
    largest = bits.to(tl.float32, bitcast=True)
    scale = tl.div_rn(largest, tl.full(largest.shape, LARGEST, tl.float32))
    scale = tl.where(scale == 0.0, 1.0, scale)
    # Without sizes at the ends of float32's range, a product with the inverse becomes the rounded
    # quotient by one correction (P. Markstein, IBM J. Res. Dev. 34, 1990): the remainder is exact.
    is_usual = (largest == 0.0) | ((largest > 2.0**-60) & (largest < 2.0**60))
    if OPTIONS.HAS_FMA and tl.min(tl.ravel(is_usual).to(tl.int32), 0) == 1:
        inverse = tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)
        inverse = tl.broadcast_to(inverse[:, :, None], x.shape)
        quotient = x * inverse
        rest = tl.fma(quotient, tl.broadcast_to(-scale[:, :, None], x.shape), x)
        x = tl.fma(rest, inverse, quotient)
    else:
        x = tl.div_rn(x, tl.broadcast_to(scale[:, :, None], x.shape))
        x = tl.clamp(x, -LARGEST, LARGEST)
    return _encode(x, pointer_type, FORMAT), scale


@triton.jit
def _write_rows(
    quantized, ptr, scale_ptr, place, head, strides, DIM: tl.constexpr, OPTIONS: tl.constexpr
):  # fmt: skip
    """Write rows and their scales. `place`: page, offset in the page, whether the token writes."""
    stored, scale = quantized
    page, offset, writes = place
    head_offset = head.to(tl.int64)
    exists = writes[:, None] & (head < OPTIONS.NUM_HEADS)[None, :]
    at = (page * strides.scale_page + offset * strides.scale_slot)[:, None]
    at += (head_offset * strides.scale_head)[None, :]
    tl.store(scale_ptr + at, scale, mask=exists)
    STORED: tl.constexpr = DIM // 2 if OPTIONS.CACHE_FORMAT == "INT4" else DIM
    d = tl.arange(0, stored.shape[2])
    row = (page * strides.page + offset * strides.slot)[:, None]
    row += (head_offset * strides.cache_head)[None, :]
    inside = exists[:, :, None] & (d < STORED)[None, None, :]
    tl.store(ptr + row[:, :, None] + d[None, None, :], stored, mask=inside)


@triton.jit(do_not_specialize=("num_tokens", "num_slots"))
def _quantize_rows_kernel(
    pointers,
    strides,
    page_size,
    num_tokens,
    num_slots,
    OPTIONS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    # The kernel that writes claims waits for all kernels before it, and this one starts after that:
    # until claims are read, there is nothing else to wait for.
    if pointers.claims is None:
        gdc_wait(IS_DEPENDENT)
    token = tl.program_id(0) * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)
    head = tl.program_id(1) * OPTIONS.BLOCK_H + tl.arange(0, OPTIONS.BLOCK_H)
    slot = slots_of(pointers.slots, strides.slots, token, num_tokens, num_slots)
    # both loads are issued before anything waits for the slots
    key = _load_rows(pointers.key, token, head, num_tokens, strides.k, OPTIONS.DIM, OPTIONS)
    value = _load_rows(pointers.value, token, head, num_tokens, strides.v, OPTIONS.DIM_V, OPTIONS)
    keys = _quantize(key, pointers.k_cache.dtype.element_ty, OPTIONS)
    values = _quantize(value, pointers.v_cache.dtype.element_ty, OPTIONS)
    if pointers.claims is not None:
        gdc_wait(IS_DEPENDENT)
    writes = writes_of(token, slot, pointers, strides, num_tokens, num_slots, OPTIONS.WIDTH)
    place = slot // page_size, slot % page_size, writes
    _write_rows(
        keys, pointers.k_cache, pointers.k_scale, place, head, strides.k, OPTIONS.DIM, OPTIONS
    )
    _write_rows(
        values, pointers.v_cache, pointers.v_scale, place, head, strides.v, OPTIONS.DIM_V, OPTIONS
    )


def plan(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scale: Tensor,
    v_scale: Tensor,
    slot_mapping: Tensor,
) -> Plan:
    """A plan for calls of `reshape_and_cache.quantize` with tensors like these."""
    check_quantize(key, value, k_cache, v_cache, k_scale, v_scale, slot_mapping)
    num_tokens, (_, num_heads, dim) = slot_mapping.shape[0], key.shape
    page_size, dim_v = k_cache.shape[2], value.shape[2]
    num_slots = k_cache.shape[0] * page_size
    if num_tokens == 0 or num_heads == 0:
        return lambda tensors, addresses: None
    target = target_of(key.device)
    is_dependent = dependent_launch(target.overlaps_launches)
    width = next_power_of_2(max(dim, dim_v))
    block_h = min(next_power_of_2(num_heads), max(BLOCK // width, 1))
    # few tokens are spread over many programs; not more finely, since a kernel is compiled for each
    block_t = max(BLOCK // (width * block_h), 1) if num_tokens > WIDTHS[0] else 1
    options = QuantizeOptions(
        NUM_HEADS=num_heads,
        DIM=dim,
        DIM_V=dim_v,
        SOURCE_FORMAT=stored_format(key.dtype, target),
        CACHE_FORMAT=stored_format(k_cache.dtype, target),
        LARGEST=LARGEST[k_cache.dtype],
        HAS_FMA=target.arch != "interpreter",
        BLOCK_T=block_t,
        BLOCK_H=block_h,
        WIDTH=width_of(num_tokens),
    )
    new_claims, claim = claims_of(slot_mapping, num_slots, is_dependent)
    write = Launch(
        _quantize_rows_kernel,
        (cdiv(num_tokens, block_t), cdiv(num_heads, block_h)),
        strides=QuantizeStrides(
            k=_strides_of(key, k_cache, k_scale),
            v=_strides_of(value, v_cache, v_scale),
            slots=slot_mapping.stride(0),
        ),
        page_size=page_size,
        num_tokens=num_tokens,
        num_slots=num_slots,
        OPTIONS=options,
        num_warps=NUM_WARPS,
        **is_dependent,
    )

    def run(tensors: tuple[Any, ...], addresses: Any) -> None:
        claims = None if new_claims is None else new_claims()
        if write.is_ready:
            at_claims = None
            if claims is not None and claim is not None:
                at_claims = claims.data_ptr()
                claim.start(addresses[-1], at_claims)
            write.start((*addresses, at_claims))
            return
        if claims is not None and claim is not None:
            claim(tensors[-1], claims)
        rows = (as_stored(x, target)[0] for x in tensors[:4])
        write(QuantizePointers._make((*rows, *tensors[4:], claims)))

    return run


def _strides_of(new: Tensor, cache: Tensor, scale: Tensor) -> ScaledStrides:
    token, head, _ = new.stride()
    page, cache_head, slot, _ = cache.stride()
    return ScaledStrides(token, head, page, cache_head, slot, *scale.stride())
