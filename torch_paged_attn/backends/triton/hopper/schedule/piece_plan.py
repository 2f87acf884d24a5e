"""What is decided on the device, from all lengths, before tiles are listed: into pieces of how many
keys tiles are cut, so that few or uneven ones fill the chip.

The estimate is in the time that a tile of queries takes for a tile of keys: what ends first of
equal pieces in one wave after the other, or of pieces dealt out, the longest first, as programs get
free.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.seqlen_info import (
    keys_of,
    query_span,
    without_left_out,
)
from torch_paged_attn.backends.triton.hopper.schedule.stretches import stretch_of

# how many numbers of pieces are tried for the longest tile
TRIED = tl.constexpr(32)
# sequences that are looked at at a time, by themselves
SCANNED = tl.constexpr(128)

# in tiles of keys: what a tile costs beside its own keys, and reading a tile of keys from memory
# where all programs do
TILE_COST = tl.constexpr(2.0)
READ_COST = tl.constexpr(1.4)

# tiles of keys of the longest tile that may be cut: quotients are found in float32
MOST_LENGTH = tl.constexpr(2**13)

# of the longest tile's keys, how many tiles have in the mean where they are about as long
EVEN = tl.constexpr(0.9)

# of stretches: how many shares of a program are tried, for how many sequences at a time, and how
# much longer than a share whole tiles may take
SHARES, WEIGHED_ALONE, MOST_UNEVEN = tl.constexpr(8), tl.constexpr(32), tl.constexpr(1.15)

# keys that nothing cuts
WHOLE = tl.constexpr(2**30)


class Chip(NamedTuple):
    """What the estimate goes by, besides lengths."""

    programs: int  # that run at once
    units_per_tile: int  # heads, or groups of heads, that each have all tiles
    num_kv_heads: int
    window_left: int  # 2**30 where it hides nothing
    # tiles of keys, in the time that leaving a piece takes, by which a piece ends later
    piece_cost: float
    wait_cost: float
    tail: float  # of the longest piece, how much of it the last programs work on alone
    # as above, in the time that merging a piece takes, and the same where all programs merge
    merge_cost: float
    shared_cost: float


@triton.jit
def _visited(query_len, key_len, window_left, OPTIONS: tl.constexpr):
    """Tiles of keys that the last tile of a sequence's queries visits, or a bit more."""
    reach = tl.minimum(key_len, window_left + OPTIONS.TOKENS + OPTIONS.BLOCK_N)
    return tl.where(query_len > 0, tl.cdiv(reach, OPTIONS.BLOCK_N), 0)


@triton.jit
def pieces_of(query_len, key_len, run, chip, OPTIONS: tl.constexpr):
    """In how many pieces each tile of a sequence is cut, if a piece has at most `run` tiles of
    keys; or in as many as there are stretches, if a tile visits more than `run`."""
    if OPTIONS.STRETCH > 0:
        first_seen = tl.maximum(key_len - query_len - chip.window_left, 0)
        stretches = stretch_of(tl.maximum(key_len - 1, 0), OPTIONS.STRETCH)
        stretches += 1 - stretch_of(first_seen, OPTIONS.STRETCH)
        is_cut = _visited(query_len, key_len, chip.window_left, OPTIONS) > run
        return tl.where(is_cut, tl.maximum(stretches, 1), 1)
    return tl.maximum(tl.cdiv(_visited(query_len, key_len, chip.window_left, OPTIONS), run), 1)


@triton.jit
def pack_piece(first_part, piece, pieces):
    """What an entry says of its piece, in a word."""
    return (first_part << 16) | (piece << 8) | pieces


@triton.jit
def _lengths_of(b, lengths, batch, total_q, max_keys, OPTIONS: tl.constexpr):
    """Queries, none past the last sequence, and keys."""
    first_row, last_row = query_span(b, lengths[0], batch, total_q)
    query_len = tl.minimum(last_row, total_q) - tl.maximum(first_row, 0)
    query_len = without_left_out(b, query_len, lengths[2], batch, OPTIONS.SKIPS)
    _, key_len = keys_of(b, lengths, batch, max_keys, OPTIONS.IS_PAGED)
    return tl.where(b < batch, tl.maximum(query_len, 0), 0), key_len


@triton.jit
def _number(i):
    """Number i of those of pieces that are tried for the longest tile: 1, 2, ... 16, 20, ... 80."""
    return tl.where(i < 16, 1 + i, 16 + 4 * (i - 15))


@triton.jit
def _time(entries, parts, work, reads, longest, most_parts, chip):
    """Of launches whose longest tile is cut in so many pieces as are tried; `entries` and `parts`,
    those of tiles that are cut, `work` and `reads`, tiles of keys, are of one head. There may be
    `most_parts` of all heads.
    """
    pieces = _number(tl.arange(0, TRIED))
    is_cut = pieces > 1
    run = tl.cdiv(longest, pieces) + TILE_COST + tl.where(is_cut, chip.wait_cost, 0.0)
    units = entries * chip.units_per_tile
    waves = tl.cdiv(units, chip.programs).to(tl.float32)
    cost = work + TILE_COST * entries + tl.where(is_cut, chip.piece_cost * parts, 0.0)
    share = cost * chip.units_per_tile / chip.programs
    share = tl.maximum(share, READ_COST * reads * chip.num_kv_heads / chip.programs)
    # where all tiles are about as long, programs get free at once: no short one fills what is left
    tiles = tl.sum(tl.where(is_cut, 0, entries), 0)
    is_even = work >= EVEN * tiles.to(tl.float32) * longest
    dealt = tl.where(is_even, float("inf"), tl.maximum(share + chip.tail * run, run))
    time = tl.minimum(waves * run, dealt)
    # those who left parts merge them if all units are worked on at once (`producer.py`)
    of_merging = tl.where(units <= chip.programs, chip.shared_cost, chip.merge_cost)
    time += tl.where(is_cut, of_merging * pieces, 0.0)
    is_possible = (
        (pieces <= longest) & (longest <= MOST_LENGTH) & (parts * chip.units_per_tile <= most_parts)
    )
    return tl.where(is_possible | (pieces == 1), time, float("inf"))


@triton.jit
def _quotients(visited, longest):
    """cdiv(visited, run), at least 1, for runs of the longest tile in each number of pieces."""
    run = tl.maximum(tl.cdiv(longest, _number(tl.arange(0, TRIED))), 1)
    # what is missing to 1 is less than one over a run, and more than what is rounded off
    above = visited[:, None].to(tl.float32) * (1.0 / run)[None, :] + (1.0 - 2.0**-14)
    return tl.maximum(above.to(tl.int32), 1)


@triton.jit
def plan_pieces(lengths, batch, total_q, max_keys, most_parts, chip, OPTIONS: tl.constexpr):
    """Tiles of keys of the longest piece, of which there may be `most_parts`, of all heads."""
    if OPTIONS.STRETCH > 0:
        return _longest_whole(lengths, batch, total_q, max_keys, most_parts, chip, OPTIONS)
    return _plan_even(lengths, batch, total_q, max_keys, most_parts, chip, OPTIONS)


@triton.jit
def _longest_whole(lengths, batch, total_q, max_keys, most_parts, chip, OPTIONS: tl.constexpr):
    """Where pieces are stretches of keys, which are left without regard to the batch: how many
    tiles of keys a tile that is not cut may visit. Some part of a program's share, or all."""
    work = tl.zeros([SCANNED], tl.float32)
    tiles = tl.zeros([SCANNED], tl.int32)
    longest = tiles
    for b0 in tl.range(0, batch, SCANNED):
        query_len, key_len = _lengths_of(
            b0 + tl.arange(0, SCANNED), lengths, batch, total_q, max_keys, OPTIONS
        )
        last = _visited(query_len, key_len, chip.window_left, OPTIONS)
        first = last
        if OPTIONS.IS_CAUSAL:
            first = tl.maximum(last - query_len // OPTIONS.BLOCK_N, 0)
        each = tl.cdiv(query_len, OPTIONS.TOKENS)
        tiles += each
        work += each.to(tl.float32) * (first + last).to(tl.float32) * 0.5
        longest = tl.maximum(longest, last)
    units = tl.sum(tiles, 0) * chip.units_per_tile
    share = tl.sum(work, 0) * chip.units_per_tile / chip.programs
    longest = tl.max(longest, 0).to(tl.float32)
    waves = tl.cdiv(units, chip.programs).to(tl.float32)
    of_whole = tl.minimum(waves * longest, tl.maximum(share + 0.5 * longest, longest))
    # half a share, a share, two shares ...
    allowed = share * tl.exp2(tl.arange(0, SHARES).to(tl.float32) - 1.0)
    allowed = tl.minimum(allowed, 2.0**24).to(tl.int32)
    parts = tl.zeros([WEIGHED_ALONE, SHARES], tl.int32)
    most = parts
    for b0 in tl.range(0, batch, WEIGHED_ALONE):
        query_len, key_len = _lengths_of(
            b0 + tl.arange(0, WEIGHED_ALONE), lengths, batch, total_q, max_keys, OPTIONS
        )
        each = tl.cdiv(query_len, OPTIONS.TOKENS)[:, None]
        cut = pieces_of(query_len[:, None], key_len[:, None], allowed[None, :], chip, OPTIONS)
        parts += tl.where(cut > 1, each * cut, 0)
        most = tl.maximum(most, cut)
    is_room = tl.sum(parts, 0) * chip.units_per_tile <= most_parts
    found = tl.min(tl.where(is_room & (tl.max(most, 0) < 256), allowed, WHOLE), 0)
    is_even = of_whole <= MOST_UNEVEN * share + 1.0
    return tl.where(is_even, WHOLE, found)


@triton.jit
def _plan_even(lengths, batch, total_q, max_keys, most_parts, chip, OPTIONS: tl.constexpr):
    """The same where pieces are about as long as each other."""
    WEIGHED: tl.constexpr = OPTIONS.WEIGHED
    window_left = chip.window_left
    # by element, and only after a loop those of all: each sum or maximum of a program is a barrier
    longest = tl.zeros([SCANNED], tl.int32)
    for b0 in tl.range(0, batch, SCANNED):
        query_len, key_len = _lengths_of(
            b0 + tl.arange(0, SCANNED), lengths, batch, total_q, max_keys, OPTIONS
        )
        longest = tl.maximum(longest, _visited(query_len, key_len, window_left, OPTIONS))
    longest = tl.max(longest, 0)

    entries = tl.zeros([WEIGHED, TRIED], tl.int32)
    parts = entries
    work = tl.zeros([WEIGHED], tl.float32)
    reads = work
    for b0 in tl.range(0, batch, WEIGHED):
        query_len, key_len = _lengths_of(
            b0 + tl.arange(0, WEIGHED), lengths, batch, total_q, max_keys, OPTIONS
        )
        last = _visited(query_len, key_len, window_left, OPTIONS)
        first = last
        if OPTIONS.IS_CAUSAL:
            first = tl.maximum(last - query_len // OPTIONS.BLOCK_N, 0)
        tiles = tl.cdiv(query_len, OPTIONS.TOKENS)
        work += tiles.to(tl.float32) * (first + last).to(tl.float32) * 0.5
        reads += last.to(tl.float32)
        cut = _quotients(last, longest)
        each = tiles[:, None] * cut
        entries += each
        parts += tl.where(cut > 1, each, 0)
    entries, parts = tl.sum(entries, 0), tl.sum(parts, 0)
    work, reads = tl.sum(work, 0), tl.sum(reads, 0)

    chosen = tl.argmin(_time(entries, parts, work, reads, longest, most_parts, chip), 0)
    length = tl.maximum(tl.cdiv(longest, _number(chosen)), 1)
    return tl.where(chosen == 0, WHOLE, length)
