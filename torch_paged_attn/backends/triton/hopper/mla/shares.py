"""The keys of latent attention dealt out to programs.

A unit of work is UNIT_KEYS keys of a tile of queries: one or two blocks. The units of all tiles,
one tile after the other, are dealt out evenly to groups of programs. The programs of a group have
the same units, each for another tile of heads, so that they read the same keys at the same time.
`combine.py` finds the shares by the same rule.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from torch_paged_attn.backends.triton.common.seqlen_info import key_span, query_span
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier

# sequences whose lengths are loaded together
LOOKED_AT = gl.constexpr(128)


@triton.jit
def lengths_of(b, pointers, sizes, OPTIONS: tl.constexpr):
    """Of sequences b: first query, number of queries, first packed key, and number of keys. The
    rows past the last sequence are one more, without keys."""
    q_start, q_stop = query_span(b, pointers.cu_seqlens_q, sizes.batch, sizes.total_q)
    # rows nobody checked must not lead outside the tensors
    q_start, q_stop = tl.maximum(q_start, 0), tl.minimum(q_stop, sizes.total_q)
    k_start, key_len = key_span(
        b, pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.seqused_k, sizes.batch,
        sizes.max_keys, OPTIONS.PAGE_SIZE > 0,
    )  # fmt: skip
    query_len = tl.where(b <= sizes.batch, tl.maximum(q_stop - q_start, 0), 0)
    return q_start, query_len, k_start, key_len


@gluon.jit
def _units_of(key_len, OPTIONS: gl.constexpr):
    """Units of a tile of a sequence with so many keys; one, of masked keys, if there are none."""
    return gl.maximum((key_len + OPTIONS.UNIT_KEYS - 1) // OPTIONS.UNIT_KEYS, 1)


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _units_from(b0, params, OPTIONS: gl.constexpr):
    """Units of all tiles of each of the LOOKED_AT sequences from b0 on, and their numbers."""
    layout: gl.constexpr = gl.BlockedLayout([LOOKED_AT // 32], [32], [gl.num_warps()], [0])
    b = b0 + gl.arange(0, LOOKED_AT, layout)
    _, query_len, _, key_len = lengths_of(b, params.pointers, params.sizes, OPTIONS)
    return (query_len + OPTIONS.TOKENS - 1) // OPTIONS.TOKENS * _units_of(key_len, OPTIONS), b


@gluon.jit
def _first_unit_of(group, groups, total):
    """The first unit of a group's share, of `total` units dealt out to `groups`."""
    return (total.to(gl.int64) * group // groups).to(gl.int32)


@gluon.jit
def _share_of_program(params, OPTIONS: gl.constexpr):
    """The first unit of this program's share, and the one after its last; the first unit's
    sequence, and its number among that sequence's; and the program's group."""
    batch = params.sizes.batch
    total = 0
    for b0 in range(0, batch + 1, LOOKED_AT):
        units, _ = _units_from(b0, params, OPTIONS)
        total += gl.sum(units, 0)
    groups = gl.minimum(gl.num_programs(0) // OPTIONS.HEAD_TILES, total)
    group = gl.program_id(0) // OPTIONS.HEAD_TILES
    unit = 0
    stop = 0
    if group < groups:
        unit = _first_unit_of(group, groups, total)
        stop = _first_unit_of(group + 1, groups, total)
    sequence = 0
    passed = 0
    before = 0
    for b0 in range(0, batch + 1, LOOKED_AT):
        units, b = _units_from(b0, params, OPTIONS)
        until = before + gl.associative_scan(units, 0, _add)
        is_past = (until <= unit) & (b <= batch)
        sequence += gl.sum(is_past.to(gl.int32), 0)
        passed = gl.maximum(passed, gl.max(gl.where(is_past, until, 0), 0))
        before += gl.sum(units, 0)
    return unit, stop, sequence, unit - passed, group


class Share(NamedTuple):
    """The units that a program has yet to do, as values of the kernel."""

    unit: Any  # the next one, numbered through all sequences
    stop: Any  # the one after the share's last
    b: Any  # the sequence of the next unit
    offset: Any  # the next unit's number among those of its sequence
    group: Any
    head_tile: Any


class LatentTile(NamedTuple):
    """The tile of a share's next unit, as values of the kernel."""

    tiles: Any  # of its sequence
    units_of_tile: Any
    first: Any  # the share's first unit of the tile, among those of the tile
    units: Any  # of the tile, in the share
    q_start: Any
    first_token: Any
    stop_token: Any
    head: Any
    k_start: Any
    key_len: Any
    table: Any  # pointer to the sequence's row of the block table; 0 for packed keys


@gluon.jit
def first_share(params, OPTIONS: gl.constexpr):
    """This program's share."""
    unit, stop, b, offset, group = _share_of_program(params, OPTIONS)
    return Share(unit, stop, b, offset, group, gl.program_id(0) % OPTIONS.HEAD_TILES)


@gluon.jit
def tile_of(share, params, OPTIONS: gl.constexpr):
    """The tile of a share's next unit, and its context_len; `units` is 0 if the sequence has no
    queries."""
    TOKENS: gl.constexpr = OPTIONS.TOKENS
    q_start, query_len, k_start, key_len = lengths_of(
        share.b, params.pointers, params.sizes, OPTIONS
    )
    units_of_tile = _units_of(key_len, OPTIONS)
    tiles = (query_len + TOKENS - 1) // TOKENS
    first = share.offset % units_of_tile
    units = gl.minimum(units_of_tile - first, share.stop - share.unit)
    units = gl.where(tiles > 0, units, 0)
    first_token = share.offset // units_of_tile * TOKENS
    stop_token = gl.minimum(first_token + TOKENS, query_len)
    head = share.head_tile * OPTIONS.PACKED_HEADS
    table = 0
    if OPTIONS.PAGE_SIZE > 0:
        table = params.pointers.block_table + share.b.to(gl.int64) * params.sizes.stride_table
    return LatentTile(
        tiles, units_of_tile, first, units, q_start, first_token, stop_token, head, k_start,
        key_len, table,
    ), key_len - query_len  # fmt: skip


@gluon.jit
def write_tile_info(n, tile, context_len, share, work_info, OPTIONS: gl.constexpr):
    """Write the words about tile number n for the consumers. FIRST_PART: the number of the part
    that they leave; -1 if the share has the whole tile."""
    part = 2 * share.group + (tile.first == 0).to(gl.int32)
    part = part * OPTIONS.HEAD_TILES + share.head_tile
    part = gl.where(tile.units == tile.units_of_tile, -1, part)
    work_info.put(n, WORD.NUM_KV_TILES, tile.units)
    work_info.put(n, WORD.FIRST_KEY, tile.first * OPTIONS.UNIT_KEYS)
    work_info.put(n, WORD.KEY_LEN, tile.key_len)
    work_info.put(n, WORD.CONTEXT_LEN, context_len)
    work_info.put(n, WORD.Q_START, tile.q_start)
    work_info.put(n, WORD.FIRST_TOKEN, tile.first_token)
    work_info.put(n, WORD.STOP_TOKEN, tile.stop_token)
    work_info.put(n, WORD.HEAD, tile.head)
    work_info.put(n, WORD.BATCH, share.b)
    work_info.put(n, WORD.FIRST_PART, part)
    thread_barrier()  # the thread that arrives has not written all of these


@gluon.jit
def rest_of(share, tile):
    """What is left of a share after a tile's units."""
    offset = share.offset + tile.units
    is_last = offset >= tile.tiles * tile.units_of_tile
    b = gl.where(is_last, share.b + 1, share.b)
    offset = gl.where(is_last, 0, offset)
    return Share(share.unit + tile.units, share.stop, b, offset, share.group, share.head_tile)
