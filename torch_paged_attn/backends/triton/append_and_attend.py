"""`append_and_attend` on GPUs. The first launch writes new tokens and the new lengths, and rotates
keys and queries; the second is attention.

A program of the first kernel copies some elements of the keys and values of a few tokens, as in
`reshape_and_cache.py`, but computes their slots itself. Of few tokens it computes all slots,
because a later token with the same slot has to win; of many, a launch before it writes the number
of each token at its slot, as in `written_slots.py`. Further programs rotate queries.
"""

import functools
import operator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.append_slots import place_of, slots_of_new, store_lengths
from torch_paged_attn.backends.triton.attend_cache import ranges
from torch_paged_attn.backends.triton.dequant import as_stored, decode, encode, stored_format
from torch_paged_attn.backends.triton.flash_varlen import flash_varlen, said_of_longest
from torch_paged_attn.backends.triton.reshape_and_cache import (
    choose_rows,
    load_rows,
    row_strides,
    store_rows,
)
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation, Constants
from torch_paged_attn.backends.triton.written_slots import CLAIMED, FEW_TOKENS, is_written_later
from torch_paged_attn.ops.append_and_attend import OP, Parts, check, check_rows, parts_of

# the operator's tensors
TENSORS = (
    "q", "k_cache", "v_cache", "key", "value", "cache_seqlens", "block_table", "sinks", "k_descale",
    "v_descale", "cu_seqlens_q", "cu_seqlens_k_new", "rotary_cos", "rotary_sin",
)  # fmt: skip
# those that `parts_of` and `check` take
SHAPED = (
    "q", "k_cache", "v_cache", "key", "value", "cache_seqlens", "cu_seqlens_q", "cu_seqlens_k_new",
)  # fmt: skip
CHECKED = (
    "cache_seqlens", "block_table", "sinks", "k_descale", "v_descale", "rotary_cos", "rotary_sin",
)  # fmt: skip
# those of `flash_varlen` behind queries and caches
ATTENTION = "seqused_k", "block_table", "sinks", "k_descale", "v_descale"


class Pointers(NamedTuple):
    """The kernel's tensors; those of a rotary embedding and some others may be None."""

    key: Any
    value: Any
    k_cache: Any
    v_cache: Any
    k_descale: Any
    v_descale: Any
    cache_seqlens: Any
    block_table: Any
    cu_seqlens_k_new: Any
    rotary_cos: Any
    rotary_sin: Any
    q: Any
    cu_seqlens_q: Any
    seqused_k: Any
    bounds: Any  # cu_seqlens_q of a call that has none
    turned: Any  # q, rotated
    claims: Any  # by slot: the number of the token that writes it


class HeadStrides(NamedTuple):
    """Strides in elements, of queries."""

    token: int
    head: int


class Strides(NamedTuple):
    """Strides in elements."""

    k: Any  # RowStrides
    v: Any
    q: Any  # HeadStrides
    cache_seqlens: int
    page: int  # block_table.stride(1)
    cu_seqlens_k_new: int
    cu_seqlens_q: int
    cos: int
    sin: int


class Rotary(NamedTuple):
    """Compile-time constants of a rotary embedding."""

    HALF: int  # rotary_dim / 2; 0: there is none
    IS_INTERLEAVED: bool = False  # pairs are neighbours (GPT-J), else the halves (GPT-NeoX)
    IS_STILL: bool = False  # all queries of a sequence are at the position of its first new token
    FORMAT: str = ""  # of cos and sin
    NUM_HEADS: int = 0  # of q


@triton.jit
def _turn(
    x, ptr, token, num_tokens, row_strides, num_heads, position, pointers, strides, num_positions,
    DIM: tl.constexpr, OPTIONS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Rows from `load_rows`, rotated to these positions, as rounded as they would be in memory."""
    FORMAT: tl.constexpr = OPTIONS.SOURCE_FORMAT
    TABLE: tl.constexpr = ROTARY.FORMAT
    e = tl.program_id(1) * OPTIONS.BLOCK_E + tl.arange(0, OPTIONS.BLOCK_E)
    column = e % DIM
    if ROTARY.IS_INTERLEAVED:
        pair, is_first, step = column // 2, column % 2 == 0, 1
    else:
        pair, is_first, step = column % ROTARY.HALF, column < ROTARY.HALF, ROTARY.HALF
    turns = (column < 2 * ROTARY.HALF) & (e < num_heads * DIM)
    is_given = (token < num_tokens)[:, None] & turns[None, :]
    row = (token.to(tl.int64) * row_strides.token)[:, None]
    offset = (e // DIM).to(tl.int64) * row_strides.head + column + tl.where(is_first, step, -step)
    other = tl.load(ptr + row + offset[None, :], mask=is_given, other=0)
    other = decode(other, FORMAT, tl.float32)
    # padding has invalid positions; its results are not used
    at = tl.minimum(tl.maximum(position, 0), num_positions - 1)[:, None]
    cos = tl.load(pointers.rotary_cos + at * strides.cos + pair[None, :], mask=is_given, other=0)
    sin = tl.load(pointers.rotary_sin + at * strides.sin + pair[None, :], mask=is_given, other=0)
    cos, sin = decode(cos, TABLE, tl.float32), decode(sin, TABLE, tl.float32)
    found = x * cos + tl.where(is_first[None, :], -other, other) * sin
    found = decode(encode(found, ptr.dtype.element_ty, FORMAT), FORMAT, tl.float32)
    return tl.where(turns[None, :], found, x)


@triton.jit
def _turn_queries(
    block, pointers, strides, num_queries, num_positions, batch,
    OPTIONS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_E elements of BLOCK_T queries, rotated."""
    FORMAT: tl.constexpr = OPTIONS.SOURCE_FORMAT
    DIM: tl.constexpr = OPTIONS.DIM
    token = block * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)
    b, offset, exists = place_of(
        token, pointers.cu_seqlens_q, strides.cu_seqlens_q, batch, num_queries
    )
    before = tl.load(pointers.cache_seqlens + b * strides.cache_seqlens, mask=exists, other=-1)
    position = before.to(tl.int64)
    if not ROTARY.IS_STILL:
        position += offset
    x = load_rows(pointers.q, token, num_queries, strides.q, ROTARY.NUM_HEADS, DIM, OPTIONS)
    x = _turn(
        x, pointers.q, token, num_queries, strides.q, ROTARY.NUM_HEADS, position, pointers,
        strides, num_positions, DIM, OPTIONS, ROTARY,
    )  # fmt: skip
    e = tl.program_id(1) * OPTIONS.BLOCK_E + tl.arange(0, OPTIONS.BLOCK_E)
    mask = (token < num_queries)[:, None] & (e < ROTARY.NUM_HEADS * DIM)[None, :]
    rows = pointers.turned + (token.to(tl.int64) * (ROTARY.NUM_HEADS * DIM))[:, None]
    turned = encode(x, pointers.turned.dtype.element_ty, FORMAT)
    tl.store(rows + e[None, :], turned, mask=mask)


@triton.jit(do_not_specialize=("batch", "num_tokens", "num_slots", "stride_row", "max_pages"))
def _claim_kernel(
    pointers,
    strides,
    page_size,
    batch,
    num_tokens,
    num_slots,
    stride_row,
    max_pages,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write each token's number at its slot; of tokens with the same slot, one number stays."""
    gdc_wait(IS_DEPENDENT)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    _, slot = slots_of_new(
        pointers, strides, stride_row, page_size, max_pages, batch, token, num_tokens
    )
    tl.store(pointers.claims + slot, token, mask=(slot >= 0) & (slot < num_slots))


@triton.jit
def _append(
    block, pointers, strides, num_heads, page_size, batch, num_tokens, num_slots, stride_row,
    max_pages, num_queries, num_positions, OPTIONS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Write BLOCK_E elements of the keys and of the values of BLOCK_T tokens."""
    DIM: tl.constexpr = OPTIONS.DIM
    DIM_V: tl.constexpr = OPTIONS.DIM_V
    token = block * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)
    position, slot = slots_of_new(
        pointers, strides, stride_row, page_size, max_pages, batch, token, num_tokens
    )
    slot = tl.where(slot < num_slots, slot, -1)
    key = load_rows(pointers.key, token, num_tokens, strides.k, num_heads, DIM, OPTIONS)
    value = load_rows(pointers.value, token, num_tokens, strides.v, num_heads, DIM_V, OPTIONS)
    if ROTARY.HALF > 0:
        key = _turn(
            key, pointers.key, token, num_tokens, strides.k, num_heads, position, pointers,
            strides, num_positions, DIM, OPTIONS, ROTARY,
        )  # fmt: skip
    writes = slot >= 0
    if pointers.claims is not None:
        writes = writes & (tl.load(pointers.claims + slot, mask=writes, other=-1) == token)
    elif OPTIONS.WIDTH > 1:
        other = tl.arange(0, OPTIONS.WIDTH)
        _, other_slot = slots_of_new(
            pointers, strides, stride_row, page_size, max_pages, batch, other, num_tokens
        )
        writes = writes & ~is_written_later(token, slot, other, other_slot)
    place = slot // page_size, slot % page_size, writes
    store_rows(key, pointers.k_cache, pointers.k_descale, place, strides.k, num_heads, DIM, OPTIONS)
    store_rows(
        value, pointers.v_cache, pointers.v_descale, place, strides.v, num_heads, DIM_V, OPTIONS
    )
    if tl.program_id(1) == 0:
        store_lengths(pointers, strides, token, batch, num_tokens)
        if pointers.bounds is not None:
            each = num_queries // batch
            tl.store(pointers.bounds + token, token * each, mask=token < batch)
            tl.store(pointers.bounds + token + 1, token * each + each, mask=token == batch - 1)


@triton.jit(
    do_not_specialize=(
        "batch", "num_tokens", "num_slots", "stride_row", "max_pages", "num_queries",
        "num_positions", "num_blocks",
    )
)  # fmt: skip
def _append_kernel(
    pointers,
    strides,
    num_heads,
    page_size,
    batch,
    num_tokens,
    num_slots,
    stride_row,
    max_pages,
    num_queries,
    num_positions,
    num_blocks,
    OPTIONS: tl.constexpr,
    ROTARY: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """The first `num_blocks` programs write new tokens, and all others rotate queries."""
    gdc_wait(IS_DEPENDENT)
    block = tl.program_id(0)
    if block >= num_blocks:
        if ROTARY.HALF > 0:
            _turn_queries(
                block - num_blocks, pointers, strides, num_queries, num_positions, batch, OPTIONS,
                ROTARY,
            )  # fmt: skip
    else:
        _append(
            block, pointers, strides, num_heads, page_size, batch, num_tokens, num_slots,
            stride_row, max_pages, num_queries, num_positions, OPTIONS, ROTARY,
        )  # fmt: skip


class AppendAndAttend:
    """The operator, called with the arguments of `ops.append_and_attend`."""

    def __call__(
        self, *tensors: Tensor | None, max_seqlen_q: int = 0, **options: Any
    ) -> tuple[Tensor, Tensor]:
        longest = said_of_longest(max_seqlen_q, 0, False)
        return launch_cache.call(f"{OP}, {longest}", _planner(longest), tensors, options)

    def again(self, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The results of a call like one of the last; NotImplemented for others."""
        longest = said_of_longest(options.pop("max_seqlen_q", 0), 0, False)
        return launch_cache.again(f"{OP}, {longest}", tensors, options)


# with the arguments of `ops.append_and_attend`
append_and_attend = AppendAndAttend()


@functools.cache
def _planner(longest: int) -> Any:
    return functools.partial(_plan, longest)


def _plan(
    longest: int, *tensors: Tensor | None, rotary_interleaved: bool = True, **options: Any
) -> Plan:
    found: dict[str, Any] = dict.fromkeys(TENSORS) | dict(zip(TENSORS, tensors, strict=False))
    given = [name for name in TENSORS if found[name] is not None]
    parts = parts_of(*map(found.__getitem__, SHAPED))
    if found["cu_seqlens_q"] is None:
        longest = said_of_longest(parts.q.shape[0] // max(parts.batch, 1), 0, False)
    # what is not given: how many numbers, and their step
    made: dict[str, tuple[int, int]] = {}
    if found["block_table"] is None:
        check_rows(parts)
        made["block_table"] = parts.batch, 1
    constants = Constants(functools.partial(ranges, made, parts.q.device), parts.q.device)
    found |= zip(made, constants()[0], strict=True)
    has_constants = bool(made)
    check(parts, *map(found.__getitem__, CHECKED), **options)

    target, has_rotary = target_of(parts.q.device), found["rotary_cos"] is not None
    launches, new = _launches_of(parts, found, rotary_interleaved, options, target)
    names = [*given, *made, *new, None]
    stored = parts.k_cache.dtype.itemsize == 1
    unused = () if stored else ("k_descale", "v_descale")
    wanted = (x if x in names and x not in unused else None for x in Pointers._fields)
    pick = operator.itemgetter(*map(names.index, wanted))
    rows = "turned" if has_rotary else "q"
    bounds = "bounds" if found["cu_seqlens_q"] is None else "cu_seqlens_q"
    attention = rows, "k_cache", "v_cache", bounds, *ATTENTION
    pick_attention = operator.itemgetter(*(names.index(x) for x in attention if x in names))
    q = torch.empty_like(parts.q, memory_format=torch.contiguous_format) if has_rotary else parts.q
    attend = flash_varlen.plan(
        longest, 0, q, parts.k_cache, parts.v_cache, parts.cu_seqlens_q, None, parts.seqused_k,
        found["block_table"], None, None, found["sinks"], None, found["k_descale"],
        found["v_descale"], **options,
    )  # fmt: skip
    allocations = list(new.values())

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        constant, at_constant = constants() if has_constants else ((), ())
        own = [allocate() for allocate in allocations]
        every = (*tensors, *constant, *own, None)
        at = (*addresses, *at_constant, *[x.data_ptr() for x in own], None)
        for launch in launches:
            if launch.is_ready:
                launch.start(pick(at))
            else:
                views = [x if x is None else as_stored(x, target)[0] for x in pick(every)]
                launch(Pointers(*views))
        return attend(pick_attention(every), pick_attention(at))

    return run


def _launches_of(
    parts: Parts,
    found: dict[str, Any],
    is_interleaved: bool,
    options: dict[str, Any],
    target: Target,
) -> tuple[list[Launch], dict[str, Allocation]]:
    """The launch that writes new tokens, with many of them one before it that notes which of them
    write, and what both need besides the operator's tensors.
    """
    num_tokens, batch = parts.key.shape[0], parts.batch
    num_queries, num_heads, dim = parts.q.shape
    cos, sin, device = found["rotary_cos"], found["rotary_sin"], parts.q.device
    new = {"seqused_k": Allocation((batch,), torch.int32, device)}
    if found["cu_seqlens_q"] is None:
        new["bounds"] = Allocation((batch + 1,), torch.int32, device)
    is_dependent = dependent_launch(target.overlaps_launches)
    stored = parts.k_cache.dtype.itemsize == 1
    scales = (found["k_descale"], found["v_descale"]) if stored else (None, None)
    (_, columns), rows = choose_rows(parts.key, parts.value, parts.k_cache, num_tokens, target)
    blocks = num_blocks = cdiv(max(num_tokens, batch), rows.BLOCK_T)
    rotary = Rotary(0)
    if cos is not None:
        new["turned"] = Allocation.like(parts.q)
        is_still = not options.get("causal") and max(
            options.get("window_size_left", -1), options.get("window_size_right", -1)
        ) < 0  # fmt: skip
        table_format = stored_format(cos.dtype, target)
        rotary = Rotary(cos.shape[1], is_interleaved, is_still, table_format, num_heads)
        blocks += cdiv(num_queries, rows.BLOCK_T)
        columns = max(columns, cdiv(num_heads * dim, rows.BLOCK_E))
    strides = Strides(
        k=row_strides(parts.key, parts.k_cache, scales[0]),
        v=row_strides(parts.value, parts.v_cache, scales[1]),
        q=HeadStrides(*parts.q.stride()[:2]),
        cache_seqlens=found["cache_seqlens"].stride(0),
        page=found["block_table"].stride(1),
        cu_seqlens_k_new=_stride(found["cu_seqlens_k_new"]),
        cu_seqlens_q=_stride(found["cu_seqlens_q"]),
        cos=_stride(cos),
        sin=_stride(sin),
    )
    sizes = {
        "page_size": parts.k_cache.shape[2],
        "batch": batch,
        "num_tokens": num_tokens,
        "num_slots": parts.k_cache.shape[0] * parts.k_cache.shape[2],
        "stride_row": found["block_table"].stride(0),
        "max_pages": found["block_table"].shape[1],
    }
    launches = []
    if num_tokens > FEW_TOKENS:
        new["claims"] = Allocation((sizes["num_slots"],), torch.int32, device)
        grid = (cdiv(num_tokens, CLAIMED),)
        launches.append(
            Launch(_claim_kernel, grid, strides=strides, **sizes, BLOCK=CLAIMED, **is_dependent)
        )
    append = Launch(
        _append_kernel,
        (blocks, columns),
        strides=strides,
        num_heads=parts.key.shape[1],
        **sizes,
        num_queries=num_queries,
        num_positions=0 if cos is None else cos.shape[0],
        num_blocks=num_blocks,
        OPTIONS=rows,
        ROTARY=rotary,
        **is_dependent,
    )
    return [*launches, append], new


def _stride(x: Tensor | None) -> int:
    return 0 if x is None else x.stride(0)
