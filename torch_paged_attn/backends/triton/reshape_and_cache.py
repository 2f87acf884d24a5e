"""`reshape_and_cache` on GPUs: a program copies some elements of the keys and values of a few
tokens. `quantize_rows.py` has the overload `quantize`.
"""

import logging
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.cache_write import quantize_rows
from torch_paged_attn.backends.triton.cache_write.written_slots import (
    CLAIMED,
    FEW_TOKENS,
    PAIRS,
    WIDTHS,
    claims_of,
    slots_of,
    writes_of_any,
)
from torch_paged_attn.backends.triton.common.dequant import as_stored, decode, encode, stored_format
from torch_paged_attn.backends.triton.runtime.contiguous import picker
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan, PlannedOp, Resizable
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.ops.reshape_and_cache import check, check_split

logger = logging.getLogger(__name__)

# elements of keys, and the same number of values, that a program copies at most, and of how many
# it takes whole tokens: not more, since few tokens are spread over many programs
BLOCK, BLOCK_OF_TOKENS = 2048, 1024


class Pointers(NamedTuple):
    key: Any
    value: Any
    k_cache: Any
    v_cache: Any
    slots: Any
    k_scale: Any
    v_scale: Any
    claims: Any  # by slot: the number of the token that writes it


BY_TOKENS = "key", "value", "slots"
CACHE, SLOTS = Pointers._fields.index("k_cache"), Pointers._fields.index("slots")


class RowStrides(NamedTuple):
    """Strides in elements, of keys or values: of the new rows, of the cache and of the scales."""

    token: int
    head: int
    page: int
    cache_head: int
    slot: int
    scale: int


class Strides(NamedTuple):
    """Strides in elements."""

    k: RowStrides
    v: RowStrides
    slots: int


class Options(NamedTuple):
    DIM: int
    DIM_V: int
    SOURCE_FORMAT: str
    CACHE_FORMAT: str
    BLOCK_T: int  # tokens of a program
    BLOCK_E: int  # elements of each
    WIDTH: int  # tokens that are compared with at a time: see `written_slots.py`


@triton.jit
def load_rows(ptr, token, num_tokens, strides, num_heads, DIM: tl.constexpr, OPTIONS: tl.constexpr):
    """This program's elements of the tokens' rows, (tokens, BLOCK_E) float32, where a row has all
    heads.
    """
    FORMAT: tl.constexpr = OPTIONS.SOURCE_FORMAT
    e = tl.program_id(1) * OPTIONS.BLOCK_E + tl.arange(0, OPTIONS.BLOCK_E)
    inside = (token < num_tokens)[:, None] & (e < num_heads * DIM)[None, :]
    row = (token.to(tl.int64) * strides.token)[:, None]
    offset = (e // DIM).to(tl.int64) * strides.head + e % DIM
    loaded = tl.load(ptr + row + offset[None, :], mask=inside, other=0)
    return decode(loaded, FORMAT, tl.float32)


@triton.jit
def store_rows(
    x, ptr, scale_ptr, place, strides, num_heads, DIM: tl.constexpr, OPTIONS: tl.constexpr
):
    """Write rows to a cache. `place`: page, offset in the page, and whether the token writes."""
    FORMAT: tl.constexpr = OPTIONS.CACHE_FORMAT
    page, offset_in_page, writes = place
    e = tl.program_id(1) * OPTIONS.BLOCK_E + tl.arange(0, OPTIONS.BLOCK_E)
    exists = e < num_heads * DIM
    if scale_ptr is not None:
        scale = tl.load(scale_ptr + e // DIM * strides.scale, mask=exists, other=1.0)
        x = tl.div_rn(x, tl.broadcast_to(scale[None, :], x.shape))
    row = (page * strides.page + offset_in_page * strides.slot)[:, None]
    offset = (e // DIM).to(tl.int64) * strides.cache_head + e % DIM
    stored = encode(x, ptr.dtype.element_ty, FORMAT)
    tl.store(ptr + row + offset[None, :], stored, mask=writes[:, None] & exists[None, :])


@triton.jit(do_not_specialize=("num_tokens", "num_slots"))
def _reshape_and_cache_kernel(
    pointers,
    strides,
    num_heads,
    page_size,
    num_tokens,
    num_slots,
    OPTIONS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """A program copies BLOCK_E elements of the keys and of the values of BLOCK_T tokens."""
    DIM: tl.constexpr = OPTIONS.DIM
    DIM_V: tl.constexpr = OPTIONS.DIM_V
    gdc_wait(IS_DEPENDENT)
    token = tl.program_id(0) * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)
    slot = slots_of(pointers.slots, strides.slots, token, num_tokens, num_slots)
    # both loads are issued before anything waits for the slots
    key = load_rows(pointers.key, token, num_tokens, strides.k, num_heads, DIM, OPTIONS)
    value = load_rows(pointers.value, token, num_tokens, strides.v, num_heads, DIM_V, OPTIONS)
    writes = writes_of_any(token, slot, pointers, strides, num_tokens, num_slots, OPTIONS.WIDTH)
    place = slot // page_size, slot % page_size, writes
    store_rows(key, pointers.k_cache, pointers.k_scale, place, strides.k, num_heads, DIM, OPTIONS)
    store_rows(
        value, pointers.v_cache, pointers.v_scale, place, strides.v, num_heads, DIM_V, OPTIONS
    )


def _plan(
    key: Tensor,
    value: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Resizable:
    check(key, value, kv_cache, slot_mapping, k_scale, v_scale)
    k_cache, v_cache = kv_cache.unbind(0)
    v_offset = kv_cache.stride(0) * kv_cache.itemsize
    tensors = key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale
    return _resizable(*tensors, v_offset=v_offset)


def _plan_split(*tensors: Any) -> Resizable:
    check_split(*tensors)
    return _resizable(*tensors)


def row_strides(new: Tensor, cache: Tensor, scale: Tensor | None) -> RowStrides:
    stride_scale = 0 if scale is None else scale.expand(new.shape[1]).stride(0)
    token, head, _ = new.stride()
    page, cache_head, slot, _ = cache.stride()
    return RowStrides(token, head, page, cache_head, slot, stride_scale)


def choose_rows(
    key: Tensor, value: Tensor, k_cache: Tensor, num_tokens: int, target: Target
) -> tuple[tuple[int, int], Options]:
    """The grid and the compile-time constants of a kernel that copies rows into a cache."""
    _, num_heads, dim = key.shape
    dim_v = value.shape[2]
    elements = num_heads * max(dim, dim_v)
    block_e = min(next_power_of_2(elements), BLOCK)
    block_t = max(BLOCK_OF_TOKENS // block_e, 1)
    options = Options(
        DIM=dim,
        DIM_V=dim_v,
        SOURCE_FORMAT=stored_format(key.dtype, target),
        CACHE_FORMAT=stored_format(k_cache.dtype, target),
        BLOCK_T=block_t,
        BLOCK_E=block_e,
        WIDTH=min(max(PAIRS // block_t, 16), WIDTHS[0]),
    )
    return (cdiv(num_tokens, block_t), cdiv(elements, block_e)), options


def _resizable(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    *,
    v_offset: int | None = None,
) -> Resizable:
    """Plans for calls with tensors like these. If `v_offset` is given, their caches are halves of
    one tensor, which calls get in their place, and the second half begins so many bytes after it.
    """
    num_slots, target = k_cache.shape[0] * k_cache.shape[2], target_of(key.device)
    is_dependent = dependent_launch(target.overlaps_launches)
    # whether there are claims -> the launches
    launches: dict[bool, tuple[Launch, Allocation | None, Launch | None]] = {}
    # one kernel is compiled for few and many tokens: the array's pointer is read with many alone
    no_claims = Allocation((0,), torch.int32, key.device)
    tensors = key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale
    names = [name for name, x in zip(Pointers._fields, tensors, strict=False) if x is not None]
    if v_offset is not None:
        # the half that calls do not get is put behind what they get
        names.remove("v_cache")
        names.append("v_cache")
    slots = names.index("slots")
    pick = picker([*names, "claims"], Pointers._fields)
    arguments = {
        "strides": Strides(
            k=row_strides(key, k_cache, k_scale),
            v=row_strides(value, v_cache, v_scale),
            slots=slot_mapping.stride(0),
        ),
        "num_heads": key.shape[1],
        "page_size": k_cache.shape[2],
    }

    def plan(tensors: tuple[Tensor, ...]) -> Plan:
        key, value, k_cache = tensors[:3]
        num_tokens = tensors[slots].shape[0]
        if num_tokens == 0:
            return lambda tensors, addresses: None
        is_many = num_tokens > FEW_TOKENS
        said = "two launches" if is_many else "one launch"
        logger.debug("reshape_and_cache: %s for %d tokens", said, num_tokens)
        grid, rows = choose_rows(key, value, k_cache, num_tokens, target)
        if (first := launches.get(is_many)) is None:
            sizes = {"num_tokens": num_tokens, "num_slots": num_slots}
            options = arguments | sizes | {"OPTIONS": rows} | is_dependent
            copy = Launch(_reshape_and_cache_kernel, grid, **options)
            new_claims, claim = claims_of(tensors[slots], num_slots, is_dependent)
            launches[is_many] = copy, new_claims, claim
        else:
            copy, new_claims, claim = first
            copy = copy.resized(grid, num_tokens=num_tokens)
            if claim is not None:
                claim = claim.resized((cdiv(num_tokens, CLAIMED),), num_tokens=num_tokens)

        def run(tensors: tuple[Any, ...], addresses: Any) -> None:
            claims = None if new_claims is None else new_claims()
            if copy.is_ready:
                at_claims = 0
                if claims is not None and claim is not None:
                    at_claims = claims.data_ptr()
                    claim.start(addresses[slots], at_claims)
                if v_offset is not None:
                    addresses = *addresses, addresses[CACHE] + v_offset
                copy.start(pick((*addresses, at_claims, None)))
                return
            if v_offset is not None:
                # making views of the halves takes longer than the rest of a call
                first, second = tensors[CACHE].unbind(0)
                tensors = *tensors[:CACHE], first, *tensors[CACHE + 1 :], second
            found = Pointers(*pick((*tensors, no_claims() if claims is None else claims, None)))
            if claims is not None and claim is not None:
                claim(found.slots, claims)
            rows = (as_stored(x, target)[0] for x in found[:SLOTS])
            copy(Pointers(*rows, *found[SLOTS:]))

        return run

    given = names if v_offset is None else names[:-1]
    sizes = tuple(["num_tokens" if name in BY_TOKENS else None for name in given])
    first = key, value, *((k_cache, v_cache) if v_offset is None else (k_cache,)), slot_mapping
    return Resizable(plan(first), sizes, plan)


# with the arguments of the ops `reshape_and_cache`, its `split` and its `quantize`
reshape_and_cache = PlannedOp("reshape_and_cache", _plan)
reshape_and_cache_split = PlannedOp("reshape_and_cache.split", _plan_split)
reshape_and_cache_quantize = PlannedOp("reshape_and_cache.quantize", quantize_rows.plan)
