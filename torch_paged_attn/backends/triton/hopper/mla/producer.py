"""The producer of the kernel for latent attention, a warp: it goes through its program's share of
the keys (`shares.py`), and has the tensor memory accelerator load keys, and queries beside keys of
16 bits. Beside keys of 8 bits, consumers read the queries themselves.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.common.tma import load_rows
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.forward.producer import (
    let_next_kernel_start,
    wait_for_kernel_before,
)
from torch_paged_attn.backends.triton.hopper.mla.pipeline import HALF, KEYS
from torch_paged_attn.backends.triton.hopper.mla.shares import (
    first_share,
    rest_of,
    tile_of,
    write_tile_info,
)
from torch_paged_attn.backends.triton.hopper.mla.stages_8bit import BOX, LATENT


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


@gluon.jit
def _load_queries(tile, params, queries):
    """Load the queries of a tile."""
    q_desc, q_rope_desc = params.q_desc, params.q_rope_desc
    barrier = queries.full.index(0)
    mbarrier.expect(barrier, 2 * q_desc.block_type.nbytes + q_rope_desc.block_type.nbytes)
    rows = tile.q_start, tile.stop_token, tile.first_token, tile.head
    for i in gl.static_range(2):
        box = queries.halves.index(i)
        load_rows(q_desc, rows[0], rows[1], rows[2], rows[3], barrier, box, i * HALF)
    box = queries.rope.index(0)
    load_rows(q_rope_desc, rows[0], rows[1], rows[2], rows[3], barrier, box, 2 * HALF)


@gluon.jit
def _load_pairs(n, tile, params, keys, OPTIONS: gl.constexpr):
    """Load the keys of a tile of 16 bits, pairs of blocks from number n on. Returns the number of
    the next pair."""
    start = tile.first * (2 * KEYS)
    for _ in range(tile.units):
        boxes = find_boxes(start, tile.table, tile.k_start, tile.key_len, params, OPTIONS)
        _load_quarter(n, boxes, params, keys, OPTIONS, 0)
        _load_quarter(n, boxes, params, keys, OPTIONS, 1)
        start += KEYS
        boxes = find_boxes(start, tile.table, tile.k_start, tile.key_len, params, OPTIONS)
        _load_quarter(n, boxes, params, keys, OPTIONS, 2)
        _load_quarter(n, boxes, params, keys, OPTIONS, 3)
        start += KEYS
        n += 1
    return n


@gluon.jit
def _load_block(n, boxes, params, keys, OPTIONS: gl.constexpr):
    """Load a block of keys of 8 bits as fill n; `boxes` are as `find_boxes` returns them."""
    ROWS: gl.constexpr = OPTIONS.BOX_ROWS
    OF_LATENT: gl.constexpr = params.k_desc.block_type.nbytes * (LATENT // BOX)
    OF_ROPE: gl.constexpr = params.k_rope_desc.block_type.nbytes
    keys.acquire(n)
    barrier = keys.full_barrier(n)
    stage = n % keys.STAGES
    latent, rope = keys.latent.index(stage), keys.rope.index(stage)
    mbarrier.expect(barrier, (OF_LATENT + OF_ROPE) * len(boxes))
    for i in gl.static_range(len(boxes)):
        first, size, row = boxes[i]
        rows = latent.slice(i * ROWS, ROWS, dim=2)
        for j in gl.static_range(LATENT // BOX):
            box = rows.slice(j * BOX, BOX, dim=4)
            load_rows(params.k_desc, first, size, row, 0, barrier, box, j * BOX)
        box = rope.slice(i * ROWS, ROWS, dim=2)
        load_rows(params.k_rope_desc, first, size, row, 0, barrier, box, LATENT)


@gluon.jit
def _load_blocks(n, tile, params, keys, OPTIONS: gl.constexpr):
    """Load the keys of a tile of 8 bits, blocks from number n on. Returns the number of the next
    block."""
    start = tile.first * OPTIONS.UNIT_KEYS
    for _ in range(tile.units * (OPTIONS.UNIT_KEYS // KEYS)):
        boxes = find_boxes(start, tile.table, tile.k_start, tile.key_len, params, OPTIONS)
        _load_block(n, boxes, params, keys, OPTIONS)
        start += KEYS
        n += 1
    return n


@gluon.jit
def _acquire(tile, pipelines, OPTIONS: gl.constexpr):
    """Wait until the words about a tile, and its queries, may be written."""
    if OPTIONS.FORMAT == "":
        pipelines.q.acquire(tile)
    else:
        mbarrier.wait(pipelines.read.index(0), (tile & 1) ^ 1)


@gluon.jit
def produce_latent(params, pipelines, OPTIONS: gl.constexpr):
    """Write the words about each tile of a program's share, one after the other, and load what its
    consumers need."""
    HAS_QUERIES: gl.constexpr = OPTIONS.FORMAT == ""
    work_info = pipelines.work_info
    wait_for_kernel_before()
    # so that `combine.py` need only wait for the programs to end
    let_next_kernel_start()
    share = first_share(params, OPTIONS)
    n = 0
    tile = 0
    while share.unit < share.stop:
        found, context_len = tile_of(share, params, OPTIONS)
        if found.units > 0:
            _acquire(tile, pipelines, OPTIONS)
            write_tile_info(tile, found, context_len, share, work_info, OPTIONS)
            if HAS_QUERIES:
                _load_queries(found, params, pipelines.q)
                n = _load_pairs(n, found, params, pipelines.k, OPTIONS)
            else:
                work_info.publish(tile)
                n = _load_blocks(n, found, params, pipelines.k, OPTIONS)
            tile += 1
        share = rest_of(share, found)
    _acquire(tile, pipelines, OPTIONS)
    work_info.put(tile, WORD.NUM_KV_TILES, 0)
    thread_barrier()
    work_info.publish(tile)
