"""Which tiles of a bool mask show some query some key, as a map that a kernel makes before
attention, and the ranges of tiles that loops over keys or queries then visit.

The map is uint8 `(heads or 1, tiles of queries, tiles of keys)`, with TILE queries and TILE keys in
a tile, and not 0 where a pair of them is seen. Tiles of queries are numbered as in
`seqlen_info.py`: token t of sequence b is in tile `cu_seqlens_q[b] // TILE + b + t // TILE`. The
tiles at both ends of a loop that the mask hides are left out. They would add nothing, so results
stay the same. Programs that share a tile's keys divide them whatever the map says.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.seqlen_info import find_tile, num_tiles, query_span
from torch_paged_attn.backends.triton.portable.common.named import named
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# tables have tiles of 32 queries or keys and more
TILE = tl.constexpr(32)
# keys of a program that makes the map
WIDTH = tl.constexpr(256)
# the fewest queries of a sequence of mean length, and keys, of masks of which a map is made: below,
# a loop has one or two tiles
FEWEST_QUERIES, FEWEST_KEYS = 128, 256
# more tiles than any mask has
FAR = tl.constexpr(1 << 24)


class MaskPointers(NamedTuple):
    mask: Tensor
    cu_seqlens_q: Tensor
    seen: Tensor


@triton.jit(do_not_specialize=("stride_head", "stride_token", "width", "total_q", "batch"))
def _seen_tiles_kernel(
    pointers, stride_head, stride_token, stride_key, width, total_q, batch,
    IS_DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program reads TILE queries and WIDTH keys of a head. One kernel reads rows of any width,
    byte by byte: wide loads would need another one for widths that are multiples of 16.
    """
    gdc_wait(IS_DEPENDENT)
    number, head = tl.program_id(0), tl.program_id(2).to(tl.int64)
    b, place = find_tile(number, pointers.cu_seqlens_q, batch, TILE, 1)
    start, stop = query_span(b, pointers.cu_seqlens_q, batch, total_q)
    row = start + place * TILE + tl.arange(0, TILE)
    exists = (row >= 0) & (row < tl.minimum(stop, total_q)) & (b < batch)
    first = tl.program_id(1) * WIDTH
    key = first + tl.arange(0, WIDTH)
    rows = pointers.mask + head * stride_head + row.to(tl.int64) * stride_token
    inside = exists[:, None] & (key < width)[None, :]
    mask = tl.load(rows[:, None] + key.to(tl.int64)[None, :] * stride_key, mask=inside, other=0)
    of_keys = tl.max((mask != 0).to(tl.int32), 0)
    of_tiles = tl.max(tl.reshape(of_keys, (WIDTH // TILE, TILE)), 1)
    columns = tl.cdiv(width, TILE)
    column = first // TILE + tl.arange(0, WIDTH // TILE)
    at = (head * tl.num_programs(0) + number) * columns + column
    tl.store(pointers.seen + at, of_tiles.to(tl.uint8), mask=column < columns)


def has_map(call: AttentionCall) -> bool:
    """Whether a map is made of a call's mask."""
    mask = call.attn_bias
    if mask is None or mask.dtype != torch.bool or call.layout is not None:
        return False
    return call.total_q >= FEWEST_QUERIES * call.batch and mask.shape[2] >= FEWEST_KEYS


def plan_map(call: AttentionCall) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that makes the map of an attn_bias and cu_seqlens_q like the call's."""
    mask = call.attn_bias
    assert mask is not None
    head, token, key = mask.stride()
    total_q, batch, width = call.total_q, call.batch, mask.shape[2]
    rows = num_tiles(total_q, batch, TILE.value, 1)
    # heads that share a mask have stride 0, or the mask has one head
    heads = mask.shape[0] if head else 1
    shape = heads, rows, -(-width // TILE.value)
    new_map = Allocation(shape, torch.uint8, mask.device)
    launch = Launch(
        _seen_tiles_kernel,
        (rows, -(-width // WIDTH.value), heads),
        stride_head=head,
        stride_token=token,
        stride_key=key,
        width=width,
        total_q=total_q,
        batch=batch,
        **dependent_launch(target_of(mask.device).overlaps_launches),
    )

    def run(mask: Tensor, cu_seqlens_q: Tensor) -> Tensor:
        seen = new_map()
        launch(MaskPointers(mask.view(torch.uint8), cu_seqlens_q, seen))
        return seen

    return run


@triton.constexpr_function
def _most_tiles(size, tile, is_aligned):
    """A power of two, at least the number of tiles in which `size` neighbours may be. `is_aligned`:
    the first one's number is a multiple of `size`."""
    count = -(-size // tile) if is_aligned and max(size, tile) % min(size, tile) == 0 else 0
    count = count or (size + tile - 2) // tile + 1
    return 1 << (count - 1).bit_length()


@triton.jit
def _range_of(ptr, across, along, step_across, step_along, ACROSS: tl.constexpr):
    """The first of the entries `along` (first, stop) that is seen by some of the ACROSS entries
    `across` (first, stop), and the one after the last; (FAR, 0) if none is.
    """
    STEP: tl.constexpr = 32
    a = across[0] + tl.arange(0, ACROSS)
    is_across = (a >= 0) & (a < across[1])
    starts = ptr + a.to(tl.int64) * step_across
    first = tl.full([STEP], FAR, tl.int32)
    stop = tl.zeros([STEP], tl.int32)
    for i0 in tl.range(along[0], along[1], STEP):
        i = i0 + tl.arange(0, STEP)
        there = is_across[:, None] & (i < along[1])[None, :]
        at = starts[:, None] + i.to(tl.int64)[None, :] * step_along
        is_seen = tl.max(tl.load(at, mask=there, other=0).to(tl.int32), 0) > 0
        first = tl.minimum(first, tl.where(is_seen, i, FAR))
        stop = tl.maximum(stop, tl.where(is_seen, i + 1, 0))
    return tl.min(first, 0), tl.max(stop, 0)


@triton.jit
def _map_of(head, pointers, strides, sizes):
    """A head's map, and its numbers of rows and columns."""
    rows = sizes.total_q // TILE + sizes.batch + 1
    columns = tl.cdiv(strides.bias_width, TILE)
    head = tl.where(strides.bias_head == 0, 0, head).to(tl.int64)
    return named("ptr rows columns")(pointers.seen_tiles + head * rows * columns, rows, columns)


@triton.jit
def _tiles_between(i_start, i_stop, first, stop, BLOCK: tl.constexpr):
    """Of the tiles of BLOCK from `i_start` to `i_stop` - 1 those with a part of the map's tiles
    `first` to `stop` - 1."""
    if BLOCK >= TILE:
        first, stop = first // (BLOCK // TILE), tl.cdiv(stop, BLOCK // TILE)
    else:
        first, stop = first * (TILE // BLOCK), stop * (TILE // BLOCK)
    i_start = tl.minimum(tl.maximum(i_start, first), i_stop)
    return i_start, tl.maximum(tl.minimum(i_stop, stop), i_start)


@triton.jit
def keys_of_tile(
    i_start, i_stop, tile, first_head, pointers, strides, sizes, OPTIONS: tl.constexpr
):
    """Of the tiles of keys from `i_start` to `i_stop` - 1 the half-open range outside of which the
    mask shows none to a tile of queries."""
    TOKENS: tl.constexpr = OPTIONS.TOKENS
    ROWS: tl.constexpr = _most_tiles(TOKENS, TILE, True)
    row = tile.q_start // TILE + tile.b
    first_row = row + tile.first_token // TILE
    stop_row = row + (tile.first_token + TOKENS - 1) // TILE + 1
    # a tile has PACK heads, which may have masks of their own
    heads = 1
    if OPTIONS.PACK > 1:
        in_group = first_head % OPTIONS.GROUP_SIZE
        heads = tl.where(
            strides.bias_head == 0, 1, tl.minimum(OPTIONS.PACK, OPTIONS.GROUP_SIZE - in_group)
        )
    first, stop = tl.full([], FAR, tl.int32), tl.full([], 0, tl.int32)
    for i in tl.range(0, heads):
        seen = _map_of(first_head + i, pointers, strides, sizes)
        across = first_row, tl.minimum(stop_row, seen.rows)
        low, high = _range_of(seen.ptr, across, (0, seen.columns), seen.columns, 1, ROWS)
        first, stop = tl.minimum(first, low), tl.maximum(stop, high)
    return _tiles_between(i_start, i_stop, first, stop, OPTIONS.BLOCK_N)


@triton.jit
def queries_of_tile(
    i_start, i_stop, span, queries, head, pointers, strides, sizes, OPTIONS: tl.constexpr
):
    """Of the tiles of queries from `i_start` to `i_stop` - 1 the half-open range outside of which
    the mask shows none to a tile of keys."""
    COLUMNS: tl.constexpr = _most_tiles(OPTIONS.BLOCK_N, TILE, not OPTIONS.IS_SHARED)
    seen = _map_of(head, pointers, strides, sizes)
    row = queries.q_start // TILE + span.b
    across = span.low // TILE, tl.minimum((span.high - 1) // TILE + 1, seen.columns)
    # unchecked lengths must not lead outside the map
    rows = tl.minimum(tl.cdiv(queries.query_len, TILE), seen.rows - row)
    ptr = seen.ptr + row.to(tl.int64) * seen.columns
    along = tl.maximum(-row, 0), rows
    first, stop = _range_of(ptr, across, along, 1, seen.columns, COLUMNS)
    return _tiles_between(i_start, i_stop, first, stop, OPTIONS.BLOCK_M)
