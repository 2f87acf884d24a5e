"""The tiles of queries of a ragged batch in order of work, the longest first.

A persistent kernel that deals tiles out in this order ends evenly (Graham's longest processing
time rule), whatever lengths are mixed. Nothing is sorted: a tile's place is the number of tiles
with more work, and that of equal ones before it, both counted from the lengths in closed form.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.common.key_tiles import ENTRY
from torch_paged_attn.backends.triton.common.seqlen_info import (
    keys_of,
    num_tiles,
    position_of_first,
    query_span,
    without_left_out,
)
from torch_paged_attn.backends.triton.hopper.schedule.piece_plan import (
    Chip,
    pack_piece,
    pieces_of,
    plan_pieces,
)
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch, gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation


class Lengths(NamedTuple):
    """What says how long the sequences are; None where a call has no such tensor."""

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor | None
    seqused_k: Tensor | None
    k_start: Tensor | None = None
    q_position: Tensor | None = None


class TileOptions(NamedTuple):
    IS_PAGED: bool
    IS_CAUSAL: bool
    IS_ALIGNED: bool  # tiles begin at positions that are multiples of TOKENS, a power of two
    TOKENS: int  # of a tile; 0: a number of the launch, as BLOCK_N is then
    BLOCK_N: int  # of the tiles that it visits, in which its work is counted
    MOST_PARTS: int = 0  # pieces of tiles that there is room for, of all heads; 0: none is cut
    COUNTERS: int = 0  # words before the entries, which begin as zeros
    PLACED: int = 16  # tiles that a program places
    # sequences that are looked at at a time: while tiles are placed, while it is found where they
    # are, and while pieces are planned
    LOOKED_AT: int = 32
    STARTS: int = 32
    WEIGHED: int = 16
    STRETCH: int = 0  # keys of the shortest piece, if pieces are stretches: see `stretches.py`
    SKIPS: bool = False  # sequences with a negative number of keys have no tiles


# what is looked at at a time where no tile is cut
UNCUT: dict[str, Any] = {"PLACED": 8, "LOOKED_AT": 128, "STARTS": 256}


@triton.jit
def _missing_tokens(context_len, TOKENS: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """How many tokens the first tile lacks."""
    return context_len & (TOKENS - 1) if IS_ALIGNED else tl.zeros_like(context_len)


@triton.jit
def _tiles_from(
    cost, query_len, key_len, context_len, missing, tokens, block_n, OPTIONS: tl.constexpr
):
    """How many tiles of a sequence visit at least `cost` tiles of keys: its last ones."""
    tiles = tl.where(query_len > 0, tl.cdiv(query_len + missing, tokens), 0)
    before = (cost - 1) * block_n  # a tile must see a key past these
    first = tl.zeros_like(tiles)
    if OPTIONS.IS_CAUSAL:
        context_len -= missing
        first = tl.minimum(tl.maximum(before - context_len, 0) // tokens, tiles)
    return tl.where(cost <= 0, tiles, tl.where(key_len > before, tiles - first, 0))


@triton.jit
def _spans_of(other, lengths, batch, total_q, max_keys, OPTIONS: tl.constexpr):
    """Of sequences: number of queries, number of keys, position of the first query, and how many
    tokens the first tile lacks."""
    first_row, last_row = query_span(other, lengths[0], batch, total_q)
    length = tl.minimum(last_row, total_q) - tl.maximum(first_row, 0)
    length = tl.where(other <= batch, tl.maximum(length, 0), 0)
    length = without_left_out(other, length, lengths[2], batch, OPTIONS.SKIPS)
    _, keys = keys_of(other, lengths, batch, max_keys, OPTIONS.IS_PAGED)
    context_len = position_of_first(other, length, keys, lengths[4], batch)
    missing = _missing_tokens(context_len, OPTIONS.TOKENS, OPTIONS.IS_ALIGNED)
    return length, keys, context_len, missing


@triton.jit(do_not_specialize=("batch", "total_q", "max_keys", "tokens", "block_n", "most_parts"))
def _tile_order_kernel(
    tile_list_ptr,
    lengths,
    batch,
    total_q,
    max_keys,
    tokens,
    block_n,
    most_parts,
    chip,
    OPTIONS: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Tiles are numbered with gaps, as in `seqlen_info.py`; a program places PLACED of them."""
    gdc_wait(IS_DEPENDENT)
    if IS_DEPENDENT:
        # the attention kernel makes itself ready meanwhile, and waits
        tl.extra.cuda.gdc_launch_dependents()
    if OPTIONS.TOKENS > 0:
        tokens, block_n = OPTIONS.TOKENS, OPTIONS.BLOCK_N
    IS_PAGED: tl.constexpr = OPTIONS.IS_PAGED
    IS_ALIGNED: tl.constexpr = OPTIONS.IS_ALIGNED
    IS_CUT: tl.constexpr = OPTIONS.MOST_PARTS > 0
    GAP: tl.constexpr = 2 if IS_ALIGNED else 1
    PLACED: tl.constexpr = OPTIONS.PLACED
    LOOKED_AT: tl.constexpr = OPTIONS.LOOKED_AT
    STARTS: tl.constexpr = OPTIONS.STARTS
    cu_seqlens_q_ptr = lengths[0]
    run = 0  # tiles of keys of the longest piece
    if IS_CUT:
        run = plan_pieces(lengths, batch, total_q, max_keys, most_parts, chip, OPTIONS)
    number = tl.program_id(0) * PLACED + tl.arange(0, PLACED)
    # by element, and only after a loop those of all: each sum of a program is a barrier
    before = tl.zeros([PLACED, STARTS], tl.int32)
    for b0 in tl.range(0, batch + 1, STARTS):
        other = b0 + tl.arange(0, STARTS)
        bound = tl.load(cu_seqlens_q_ptr + other, mask=other <= batch, other=0)
        started = (other <= batch)[None, :] & (
            (bound // tokens + GAP * other)[None, :] <= number[:, None]
        )
        before += started.to(tl.int32)
    b = tl.maximum(tl.sum(before, 1) - 1, 0)
    q_start, q_stop = query_span(b, cu_seqlens_q_ptr, batch, total_q)
    # rows nobody checked must not lead outside the tensors
    q_start, q_stop = tl.maximum(q_start, 0), tl.minimum(q_stop, total_q)
    query_len = tl.maximum(q_stop - q_start, 0)
    query_len = without_left_out(b, query_len, lengths[2], batch, OPTIONS.SKIPS)
    k_start, key_len = keys_of(b, lengths, batch, max_keys, IS_PAGED)
    context_len = position_of_first(b, query_len, key_len, lengths[4], batch)
    missing = _missing_tokens(context_len, OPTIONS.TOKENS, IS_ALIGNED)
    tile = number - q_start // tokens - GAP * b
    first_token = tl.maximum(tile * tokens - missing, 0)
    stop_token = tl.minimum((tile + 1) * tokens - missing, query_len)
    exists = (tile >= 0) & (first_token < stop_token)
    stop = key_len
    if OPTIONS.IS_CAUSAL:
        stop = tl.minimum(stop, context_len - missing + (tile + 1) * tokens)
    cost = tl.cdiv(tl.maximum(stop, 0), block_n)
    pieces = tl.full([PLACED], 1, tl.int32)
    if IS_CUT:
        pieces = pieces_of(query_len, key_len, run, chip, OPTIONS)
        cost = tl.cdiv(cost, pieces)

    sizes = tokens, block_n
    # entries before a tile's first one; tiles and parts of those that are cut, of a head
    place = tl.zeros([PLACED, LOOKED_AT], tl.int32)
    part = place
    entries = tl.zeros([LOOKED_AT], tl.int32)
    for b0 in tl.range(0, batch + 1, LOOKED_AT):
        other = b0 + tl.arange(0, LOOKED_AT)
        length, keys, context, lacking = _spans_of(
            other, lengths, batch, total_q, max_keys, OPTIONS
        )
        each = tl.where(length > 0, tl.cdiv(length + lacking, tokens), 0)
        spans = length[None, :], keys[None, :], context[None, :], lacking[None, :]
        if IS_CUT:
            cut = pieces_of(length, keys, run, chip, OPTIONS)
            entries += each * cut
            # a tile of so many pieces is as long as a piece, times that
            more = _tiles_from(cost[:, None] * cut[None, :] + 1, *spans, *sizes, OPTIONS)
            least = _tiles_from((cost[:, None] - 1) * cut[None, :] + 1, *spans, *sizes, OPTIONS)
            weight = cut[None, :]
            parts = tl.where(cut > 1, each * cut, 0)
            part += tl.where(other[None, :] < b[:, None], parts[None, :], 0)
        else:
            entries += each
            more = _tiles_from(cost[:, None] + 1, *spans, *sizes, OPTIONS)
            least = _tiles_from(cost[:, None], *spans, *sizes, OPTIONS)
            weight = 1
        equal_before = tl.where(other[None, :] < b[:, None], least - more, 0)
        first_equal = each[None, :] - least
        own = tl.where(other[None, :] == b[:, None], tile[:, None] - first_equal, 0)
        place += (more + equal_before + own) * weight
    place, part, entries = tl.sum(place, 1), tl.sum(part, 1), tl.sum(entries, 0)

    entry = tile_list_ptr + (ENTRY + OPTIONS.COUNTERS) + place * ENTRY
    for i in tl.range(0, tl.max(tl.where(exists, pieces, 0), 0) if IS_CUT else 1):
        is_piece = exists & (i < pieces) if IS_CUT else exists
        tl.store(entry, b, mask=is_piece)
        tl.store(entry + 1, first_token, mask=is_piece)
        tl.store(entry + 2, q_start, mask=is_piece)
        # with `q_position`, how many rows its keys reach past the first query
        tl.store(entry + 3, key_len - context_len, mask=is_piece)
        tl.store(entry + 4, k_start, mask=is_piece)
        tl.store(entry + 5, key_len, mask=is_piece)
        tl.store(entry + 6, stop_token, mask=is_piece)
        if IS_CUT:
            # of stretches, the last are the longest
            piece = pieces - 1 - i if OPTIONS.STRETCH > 0 else i
            tl.store(entry + 7, pack_piece(part + tile * pieces, piece, pieces), mask=is_piece)
        entry += ENTRY
    if tl.program_id(0) == 0:
        tl.store(tile_list_ptr, 0)
        tl.store(tile_list_ptr + 1, entries)
        if IS_CUT:
            word = tl.arange(0, triton.next_power_of_2(OPTIONS.COUNTERS))
            tl.store(tile_list_ptr + ENTRY + word, 0, mask=word < OPTIONS.COUNTERS)


def most_tiles(total_q: int, batch: int, tokens: int, is_aligned: bool) -> int:
    """How many tiles there can be, whatever the lengths are."""
    return num_tiles(total_q, batch, tokens, 2 if is_aligned else 1)


def list_shape(batch: int, total_q: int, max_keys: int, options: TileOptions) -> tuple[int, int]:
    """The shape of a list of tiles, int32."""
    tiles = most_tiles(total_q, batch, options.TOKENS, options.IS_ALIGNED)
    return 1 + tiles + options.MOST_PARTS + options.COUNTERS // ENTRY.value, ENTRY.value


def _compiled_for(options: TileOptions) -> TileOptions:
    """The options that a kernel is compiled for. Where it only counts tiles, the two sizes of a
    tile are numbers of the launch: lists of a forward and a backward are made by one kernel.
    """
    counts_only = not (options.MOST_PARTS or options.IS_ALIGNED)
    return options._replace(TOKENS=0, BLOCK_N=0) if counts_only else options


def plan_tile_list(
    batch: int,
    total_q: int,
    max_keys: int,
    options: TileOptions,
    device: torch.device,
    chip: Chip | None = None,
    most_parts: int | None = None,
    like: list[Launch] | None = None,
) -> Callable[..., Tensor]:
    """What lists the tiles of `batch` sequences of up to `max_keys` keys, on the device: it takes
    `Lengths`, and their addresses if they are known. `chip` is for tiles that may be cut, in
    `most_parts` pieces of all heads, or as many as there is room for if that is not given. `like`
    keeps the first launch for lists that differ in these sizes alone.

    A list is a header (units of work claimed: 0, number of entries), counters, and for each tile or
    piece of one: its sequence, its first token, the sequence's first row and length, its first key
    and number of keys, the token after the tile's last, and which piece it is.
    """
    tiles = most_tiles(total_q, batch, options.TOKENS, options.IS_ALIGNED)
    shape = list_shape(batch, total_q, max_keys, options)
    new_list = Allocation(shape, torch.int32, device)
    grid = (-(-tiles // options.PLACED),)
    sizes: dict[str, Any] = dict(batch=batch, total_q=total_q, max_keys=max_keys)
    sizes["most_parts"] = most_parts or options.MOST_PARTS if chip is not None else None
    if like:
        launch = like[0].resized(grid, **sizes)
    else:
        launch = Launch(
            _tile_order_kernel,
            grid,
            **sizes,
            tokens=options.TOKENS,
            block_n=options.BLOCK_N,
            chip=chip,
            OPTIONS=_compiled_for(options),
            num_warps=4,
            enable_fp_fusion=options.STRETCH == 0,
            **dependent_launch(target_of(device).overlaps_launches),
        )
    if like is not None and not like:
        like.append(launch)

    def list_tiles(lengths: Lengths, addresses: tuple[Any, ...] | None = None) -> Tensor:
        tile_list = new_list()
        if launch.is_ready and addresses is not None:
            launch.start(tile_list.data_ptr(), addresses)
        else:
            launch(tile_list, lengths)
        return tile_list

    return list_tiles
