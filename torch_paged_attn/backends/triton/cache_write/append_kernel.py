"""The kernel that writes new tokens into a cache and rotates keys and queries, for
`append_and_attend.py`.

A program copies some elements of the keys and values of a few tokens, as in `reshape_and_cache.py`,
but computes their slots itself. Of few tokens it computes all slots, because a later token with the
same slot has to win; of many, a launch before it writes the number of each token at its slot, as in
`written_slots.py`. Further programs rotate queries.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.append_slots import place_of, slots_of_new, store_lengths
from torch_paged_attn.backends.triton.cache_write.written_slots import is_written_later
from torch_paged_attn.backends.triton.common.dequant import decode, encode
from torch_paged_attn.backends.triton.reshape_and_cache import load_rows, store_rows
from torch_paged_attn.backends.triton.runtime.launch import gdc_wait


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


class Numbers(NamedTuple):
    """The kernel's numbers, as its functions get them; it says for which of them it is compiled."""

    num_heads: Any  # of keys
    page_size: Any
    batch: Any
    num_tokens: Any
    num_slots: Any
    stride_row: Any  # block_table.stride(0)
    max_pages: Any
    num_queries: Any
    num_positions: Any  # of the tables of a rotary embedding


class Rotary(NamedTuple):
    """Compile-time constants of a rotary embedding."""

    HALF: int  # rotary_dim / 2; 0: there is none
    IS_INTERLEAVED: bool = False  # pairs are neighbours (GPT-J), else the halves (GPT-NeoX)
    IS_STILL: bool = False  # all queries of a sequence are at the position of its first new token
    FORMAT: str = ""  # of cos and sin
    NUM_HEADS: int = 0  # of q


@triton.jit
def _turn(
    x, rows, token, position, pointers, strides, num_positions, DIM: tl.constexpr,
    OPTIONS: tl.constexpr, ROTARY: tl.constexpr,
):  # fmt: skip
    """Rows from `load_rows`, rotated to these positions, as rounded as they would be in memory.
    `rows`: the pointer, number, strides and number of heads of them all.
    """
    ptr, num_tokens, row_strides, num_heads = rows
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
    block, pointers, strides, sizes, OPTIONS: tl.constexpr, ROTARY: tl.constexpr
):  # fmt: skip
    """Write BLOCK_E elements of BLOCK_T queries, rotated."""
    num_queries = sizes.num_queries
    FORMAT: tl.constexpr = OPTIONS.SOURCE_FORMAT
    DIM: tl.constexpr = OPTIONS.DIM
    token = block * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)
    b, offset, exists = place_of(
        token, pointers.cu_seqlens_q, strides.cu_seqlens_q, sizes.batch, num_queries
    )
    before = tl.load(pointers.cache_seqlens + b * strides.cache_seqlens, mask=exists, other=-1)
    position = before.to(tl.int64)
    if not ROTARY.IS_STILL:
        position += offset
    x = load_rows(pointers.q, token, num_queries, strides.q, ROTARY.NUM_HEADS, DIM, OPTIONS)
    rows = pointers.q, num_queries, strides.q, ROTARY.NUM_HEADS
    x = _turn(
        x, rows, token, position, pointers, strides, sizes.num_positions, DIM, OPTIONS, ROTARY
    )
    e = tl.program_id(1) * OPTIONS.BLOCK_E + tl.arange(0, OPTIONS.BLOCK_E)
    mask = (token < num_queries)[:, None] & (e < ROTARY.NUM_HEADS * DIM)[None, :]
    start = pointers.turned + (token.to(tl.int64) * (ROTARY.NUM_HEADS * DIM))[:, None]
    turned = encode(x, pointers.turned.dtype.element_ty, FORMAT)
    tl.store(start + e[None, :], turned, mask=mask)


@triton.jit(
    do_not_specialize=("page_size", "batch", "num_tokens", "num_slots", "stride_row", "max_pages")
)
def claim_kernel(
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
def _slots(pointers, strides, sizes, token):
    """`slots_of_new` of these tokens; -1 for slots past the end of the cache too."""
    position, slot = slots_of_new(
        pointers, strides, sizes.stride_row, sizes.page_size, sizes.max_pages, sizes.batch, token,
        sizes.num_tokens,
    )  # fmt: skip
    return position, tl.where(slot < sizes.num_slots, slot, -1)


@triton.jit
def _append(block, pointers, strides, sizes, OPTIONS: tl.constexpr, ROTARY: tl.constexpr):
    """Write BLOCK_E elements of the keys and of the values of BLOCK_T tokens."""
    num_tokens, num_heads, page_size = sizes.num_tokens, sizes.num_heads, sizes.page_size
    DIM: tl.constexpr = OPTIONS.DIM
    DIM_V: tl.constexpr = OPTIONS.DIM_V
    token = block * OPTIONS.BLOCK_T + tl.arange(0, OPTIONS.BLOCK_T)
    position, slot = _slots(pointers, strides, sizes, token)
    key = load_rows(pointers.key, token, num_tokens, strides.k, num_heads, DIM, OPTIONS)
    value = load_rows(pointers.value, token, num_tokens, strides.v, num_heads, DIM_V, OPTIONS)
    if ROTARY.HALF > 0:
        rows = pointers.key, num_tokens, strides.k, num_heads
        key = _turn(
            key, rows, token, position, pointers, strides, sizes.num_positions, DIM, OPTIONS, ROTARY
        )
    writes = slot >= 0
    if pointers.claims is not None:
        writes = writes & (tl.load(pointers.claims + slot, mask=writes, other=-1) == token)
    elif OPTIONS.WIDTH > 1:
        other = tl.arange(0, OPTIONS.WIDTH)
        _, other_slot = _slots(pointers, strides, sizes, other)
        writes = writes & ~is_written_later(token, slot, other, other_slot)
    place = slot // page_size, slot % page_size, writes
    store_rows(key, pointers.k_cache, pointers.k_descale, place, strides.k, num_heads, DIM, OPTIONS)
    store_rows(
        value, pointers.v_cache, pointers.v_descale, place, strides.v, num_heads, DIM_V, OPTIONS
    )
    if tl.program_id(1) == 0:
        batch = sizes.batch
        store_lengths(pointers, strides, token, batch, num_tokens)
        if pointers.bounds is not None:
            each = sizes.num_queries // batch
            tl.store(pointers.bounds + token, token * each, mask=token < batch)
            tl.store(pointers.bounds + token + 1, token * each + each, mask=token == batch - 1)


@triton.jit(
    do_not_specialize=(
        "page_size", "batch", "num_tokens", "num_slots", "stride_row", "max_pages", "num_queries",
        "num_positions", "num_blocks",
    )
)  # fmt: skip
def append_kernel(
    pointers, strides,
    num_heads, page_size, batch, num_tokens, num_slots, stride_row, max_pages, num_queries,
    num_positions, num_blocks,
    OPTIONS: tl.constexpr, ROTARY: tl.constexpr, IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The first `num_blocks` programs write new tokens, and all others rotate queries."""
    gdc_wait(IS_DEPENDENT)
    sizes = Numbers(
        num_heads, page_size, batch, num_tokens, num_slots, stride_row, max_pages, num_queries,
        num_positions,
    )  # fmt: skip
    block = tl.program_id(0)
    if block < num_blocks:
        _append(block, pointers, strides, sizes, OPTIONS, ROTARY)
    elif ROTARY.HALF > 0:
        _turn_queries(block - num_blocks, pointers, strides, sizes, OPTIONS, ROTARY)
