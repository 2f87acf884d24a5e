"""The producer of the kernel for latent attention, a warp: it finds its program's share of the keys
and has the tensor memory accelerator load queries and keys.

A unit of work is UNIT_KEYS keys of a tile of queries: one or two blocks. The units of all tiles,
one tile after the other, are dealt out evenly to groups of programs. The programs of a group have
the same units, each for another tile of heads, so that they read the same keys at the same time.
`combine.py` finds the shares by the same rule.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.common.seqlen_info import key_span, query_span
from torch_paged_attn.backends.triton.hopper.common.tma import load_rows
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.forward.producer import (
    let_next_kernel_start,
    wait_for_kernel_before,
)
from torch_paged_attn.backends.triton.hopper.mla.pipeline import HALF, KEYS

# sequences whose lengths are loaded together
LOOKED_AT = gl.constexpr(128)


@gluon.jit
def _lengths_of(b, params, OPTIONS: gl.constexpr):
    """Of sequences b: first query, number of queries, first packed key, and number of keys. The
    rows past the last sequence are one more, without keys."""
    pointers, sizes = params.pointers, params.sizes
    q_start, q_stop = query_span(b, pointers.cu_seqlens_q, sizes.batch, sizes.total_q)
    # rows nobody checked must not lead outside the tensors
    q_start, q_stop = gl.maximum(q_start, 0), gl.minimum(q_stop, sizes.total_q)
    k_start, key_len = key_span(
        b, pointers.cu_seqlens_q, pointers.cu_seqlens_k, pointers.seqused_k, sizes.batch,
        sizes.max_keys, OPTIONS.PAGE_SIZE > 0,
    )  # fmt: skip
    query_len = gl.where(b <= sizes.batch, gl.maximum(q_stop - q_start, 0), 0)
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
    _, query_len, _, key_len = _lengths_of(b, params, OPTIONS)
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


@gluon.jit
def find_boxes(start, table, k_start, key_len, params, OPTIONS: gl.constexpr):
    """Where a block's keys lie, from key `start` of a sequence on: a tuple with, for each box of
    rows, the first row of its page or packed sequence, how many rows of that hold keys, and the row
    among them at which the box begins."""
    BOX: gl.constexpr = OPTIONS.BOX_ROWS
    PAGE_SIZE: gl.constexpr = OPTIONS.PAGE_SIZE
    BOXES: gl.constexpr = KEYS // BOX
    pages = ()
    boxes = ()
    # the compiler of kernels knows no `(*boxes, box)`
    if PAGE_SIZE == 0:
        boxes = ((k_start, key_len, start),)  # type: ignore[assignment]
    else:
        # all loads are on their way before one is waited for
        for i in gl.static_range(BOXES):
            j = start + i * BOX
            # entries past the keys may hold anything: they are not read
            page = gl.load(table + j // PAGE_SIZE, mask=j < key_len, other=-1)
            pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
        for i in gl.static_range(BOXES):
            j = start + i * BOX
            # a bad id that nobody checked reads nothing
            is_page = (pages[i] >= 0) & (pages[i] < params.sizes.num_pages)
            left = key_len - j // PAGE_SIZE * PAGE_SIZE
            size = gl.where(is_page, gl.minimum(left, PAGE_SIZE), 0)
            first = gl.where(is_page, pages[i], 0) * params.scalars.page_rows
            boxes = boxes + ((first, size, j % PAGE_SIZE),)  # type: ignore[assignment]  # noqa: RUF005
    return boxes


@gluon.constexpr_function
def _has_rope(quarter, box, boxes):
    """Whether the columns that are no values are loaded with column box number `box` of `boxes`."""
    return quarter % 2 == 1 and box == boxes - 1


@gluon.jit
def _load_quarter(n, boxes, params, keys, OPTIONS: gl.constexpr, QUARTER: gl.constexpr):
    """Load a quarter of pair n (see `pipeline.py`), of keys in `boxes`: see `find_boxes`."""
    COLUMN_BOXES: gl.constexpr = OPTIONS.COLUMN_BOXES
    WIDTH: gl.constexpr = HALF // COLUMN_BOXES
    COLUMN: gl.constexpr = HALF if QUARTER == 1 or QUARTER == 2 else 0
    keys.acquire(n, QUARTER)
    for i in gl.static_range(COLUMN_BOXES):
        barrier = keys.full_barrier(QUARTER, i)
        _load_columns(
            barrier, boxes, params, keys, OPTIONS, QUARTER, i * WIDTH, COLUMN,
            _has_rope(QUARTER, i, COLUMN_BOXES),
        )  # fmt: skip


@gluon.jit
def _load_columns(
    barrier, boxes, params, keys, OPTIONS: gl.constexpr, QUARTER: gl.constexpr, PLACE: gl.constexpr,
    COLUMN: gl.constexpr, HAS_ROPE: gl.constexpr,
):  # fmt: skip
    """Load a column box of a quarter, which begins at column PLACE of the quarter; the quarter
    begins at column COLUMN of the keys. With HAS_ROPE, load the columns that are no values, too."""
    BOX: gl.constexpr = OPTIONS.BOX_ROWS
    WIDTH: gl.constexpr = HALF // OPTIONS.COLUMN_BOXES
    NBYTES: gl.constexpr = params.k_desc.block_type.nbytes
    MORE: gl.constexpr = params.k_rope_desc.block_type.nbytes if HAS_ROPE else 0
    mbarrier.expect(barrier, (NBYTES + MORE) * len(boxes))
    for i in gl.static_range(len(boxes)):
        first, size, row = boxes[i]
        box = keys.halves.index(QUARTER).slice(i * BOX, BOX, dim=2).slice(PLACE, WIDTH, dim=4)
        load_rows(params.k_desc, first, size, row, 0, barrier, box, COLUMN + PLACE)
        if HAS_ROPE:
            rope = keys.ropes.index(QUARTER // 2).slice(i * BOX, BOX, dim=2)
            load_rows(params.k_rope_desc, first, size, row, 0, barrier, rope, 2 * HALF)


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
    q_start, query_len, k_start, key_len = _lengths_of(share.b, params, OPTIONS)
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


@gluon.jit
def produce_latent(params, pipelines, OPTIONS: gl.constexpr):
    """Load queries and keys of the tiles of a program's share, one after the other."""
    queries, keys, work_info = pipelines.q, pipelines.k, pipelines.work_info
    q_desc, q_rope_desc = params.q_desc, params.q_rope_desc
    wait_for_kernel_before()
    # so that `combine.py` need only wait for the programs to end
    let_next_kernel_start()
    share = first_share(params, OPTIONS)
    n = 0
    tile = 0
    while share.unit < share.stop:
        found, context_len = tile_of(share, params, OPTIONS)
        if found.units > 0:
            queries.acquire(tile)
            write_tile_info(tile, found, context_len, share, work_info, OPTIONS)
            barrier = queries.full.index(0)
            mbarrier.expect(barrier, 2 * q_desc.block_type.nbytes + q_rope_desc.block_type.nbytes)
            rows = found.q_start, found.stop_token, found.first_token, found.head
            for i in gl.static_range(2):
                box = queries.halves.index(i)
                load_rows(q_desc, rows[0], rows[1], rows[2], rows[3], barrier, box, i * HALF)
            box = queries.rope.index(0)
            load_rows(q_rope_desc, rows[0], rows[1], rows[2], rows[3], barrier, box, 2 * HALF)
            start = found.first * (2 * KEYS)
            for _ in range(found.units):
                boxes = find_boxes(
                    start, found.table, found.k_start, found.key_len, params, OPTIONS
                )
                _load_quarter(n, boxes, params, keys, OPTIONS, 0)
                _load_quarter(n, boxes, params, keys, OPTIONS, 1)
                start += KEYS
                boxes = find_boxes(
                    start, found.table, found.k_start, found.key_len, params, OPTIONS
                )
                _load_quarter(n, boxes, params, keys, OPTIONS, 2)
                _load_quarter(n, boxes, params, keys, OPTIONS, 3)
                start += KEYS
                n += 1
            tile += 1
        share = rest_of(share, found)
    queries.acquire(tile)
    work_info.put(tile, WORD.NUM_KV_TILES, 0)
    thread_barrier()
    mbarrier.arrive(queries.full.index(0), count=1)
