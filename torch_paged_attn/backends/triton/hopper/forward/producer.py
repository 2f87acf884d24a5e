"""The producers of the Hopper kernel, a warp each.

One claims tiles of queries, tells the others of them, and loads queries and keys; one loads values.
Where a tile of keys is many pages, two more load half of the keys and of the values.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.common.tma import bytes_of_rows, load_rows
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.forward.load_kv import KeyRange, KvLoader
from torch_paged_attn.backends.triton.hopper.schedule.block_runs import find_list, row_mask_of
from torch_paged_attn.backends.triton.hopper.schedule.pieces import (
    keys_of_piece,
    pack_pieces,
    tiles_of_stretch,
    unpack_piece,
    visited_of_piece,
)
from torch_paged_attn.backends.triton.hopper.schedule.query_tiles import visit_tiles


@gluon.jit
def wait_for_kernel_before():
    """Wait for the kernel that lists the tiles to end. Only the producer of queries has to: other
    warps wait for the tiles that it publishes."""
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; mov.b32 $0, 0;", "=r,r", [gl.program_id(0)], gl.int32, False, 1
    )


@gluon.jit
def let_next_kernel_start():
    """Let programs of the next kernel start where there is room. What ran before this kernel has
    ended."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r,r", [gl.program_id(0)], gl.int32,
        False, 1,
    )  # fmt: skip


@gluon.jit
def _only_page(b, params):
    """The page that holds all keys of sequence b; a bad id that nobody checked is the last page's,
    and padding rows have none."""
    sizes = params.sizes
    entry = params.pointers.block_table + b.to(gl.int64) * sizes.stride_table
    page = gl.load(entry, mask=b < sizes.batch, other=0)
    return gl.minimum(page.to(gl.uint32), (sizes.num_pages - 1).to(gl.uint32)).to(gl.int32)


@gluon.jit
def _produce_tile(at, tile, n, key_loader, params, pipelines, OPTIONS: gl.constexpr):
    """Publish a tile of queries, the program's number `tile`, and load its queries and the first
    part of its keys, from right to left: tiles of keys that need a mask come first. Returns the
    number of the next tile of keys."""
    ROW_GROUPS: gl.constexpr = OPTIONS.ROW_GROUPS
    head, entry, b, first_token, q_start, query_len, k_start, key_len, stop_token, dealt, last = at
    PACKED_HEADS: gl.constexpr = OPTIONS.PACKED_HEADS
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    pointers, scalars, work_info = params.pointers, params.scalars, pipelines.work_info
    q_desc = params.q_desc
    context_len = key_len - query_len
    position = context_len + first_token
    first_key = 0
    stop = key_len
    if OPTIONS.HAS_LEFT:
        first_key = gl.maximum(position - scalars.window_left, 0)
    if OPTIONS.HAS_RIGHT:
        stop = gl.minimum(stop, context_len + stop_token + scalars.window_right)
    first_kv_tile = first_key // BLOCK_N
    first_entry = 0
    num_entries = 0
    row_mask = 0
    if OPTIONS.HAS_LAYOUT:
        layout_head = (
            b * scalars.stride_layout_batch + head * PACKED_HEADS // OPTIONS.HEADS_PER_LAYOUT
        )
        first_entry, num_entries = find_list(
            pointers, params.sizes, layout_head, position, stop, OPTIONS
        )
        row_mask = row_mask_of(position, context_len + stop_token, OPTIONS)
        num_kv_tiles = (num_entries + OPTIONS.KV_STEP - 1) // OPTIONS.KV_STEP
    else:
        num_kv_tiles = (stop + BLOCK_N - 1) // BLOCK_N - first_kv_tile
    # a tile that sees no key visits one, of masked keys, and writes its empty rows
    num_kv_tiles = gl.maximum(num_kv_tiles, 1)
    if OPTIONS.IS_DEALT:
        first_part, piece = dealt.first_part, dealt.number
        pieces = pack_pieces(dealt.pieces, dealt.waiting, OPTIONS)
        kv_stop = first_kv_tile + num_kv_tiles
        first_kv_tile, num_kv_tiles = visited_of_piece(dealt, first_kv_tile, kv_stop)
    elif OPTIONS.MOST_PARTS > 0:
        if OPTIONS.IS_NUMBERED:
            first_part, piece, pieces = dealt.first_part, dealt.number, dealt.pieces
            waiting = dealt.waiting
        else:
            first_part, piece, pieces = unpack_piece(gl.load(entry + 7))
            waiting = gl.where(last, pieces, 0)
        if OPTIONS.STRETCH > 0:
            first_seen = 0
            if OPTIONS.HAS_LEFT:
                first_seen = gl.maximum(context_len - scalars.window_left, 0)
            first_kv_tile, num_kv_tiles = tiles_of_stretch(
                piece, pieces, first_kv_tile, num_kv_tiles, first_seen, OPTIONS.STRETCH, BLOCK_N
            )
        else:
            first_of_piece, num_kv_tiles = keys_of_piece(piece, pieces, num_kv_tiles)
            first_kv_tile += first_of_piece
        pieces = pack_pieces(pieces, waiting, OPTIONS)
    kv_start = (first_kv_tile + num_kv_tiles) * OPTIONS.KV_STEP

    # once the consumers are done with what lay there, so are the other producers
    pipelines.q.producer_acquire(tile)
    work_info.put(tile, WORD.NUM_KV_TILES, num_kv_tiles)
    work_info.put(tile, WORD.FIRST_KEY, first_key)
    work_info.put(tile, WORD.KV_STOP, kv_start)
    work_info.put(tile, WORD.KEY_LEN, key_len)
    work_info.put(tile, WORD.Q_START, q_start)
    work_info.put(tile, WORD.STOP_TOKEN, stop_token)
    work_info.put(tile, WORD.FIRST_TOKEN, first_token)
    work_info.put(tile, WORD.HEAD, head * PACKED_HEADS)
    work_info.put(tile, WORD.CONTEXT_LEN, context_len)
    work_info.put(tile, WORD.BATCH, b)
    if OPTIONS.IS_ROWS:
        k_start = _only_page(b, params)
    work_info.put(tile, WORD.K_START, k_start)
    if OPTIONS.HAS_LAYOUT:
        work_info.put(tile, WORD.FIRST_ENTRY, first_entry)
        work_info.put(tile, WORD.NUM_ENTRIES, num_entries)
    if OPTIONS.MOST_PARTS > 0:
        work_info.put(tile, WORD.PIECE, piece)
        work_info.put(tile, WORD.PIECES, pieces)
        work_info.put(tile, WORD.FIRST_PART, first_part)
    thread_barrier()  # the thread that arrives has not written all of these
    barrier = pipelines.q.full_barrier(tile)
    mbarrier.expect(
        barrier,
        bytes_of_rows(q_desc.block_type, OPTIONS.TOKENS * PACKED_HEADS) * ROW_GROUPS,
    )
    for i in gl.static_range(ROW_GROUPS):
        box = pipelines.q.tiles.index(tile % pipelines.q.STAGES * ROW_GROUPS + i)
        row = first_token + i * OPTIONS.TOKENS
        load_rows(q_desc, q_start, stop_token, row, head * PACKED_HEADS, barrier, box)
    work_info.publish(tile)

    list_ptr = 0
    if OPTIONS.HAS_LAYOUT:
        list_ptr = pointers.entries + first_entry
    table = 0
    if OPTIONS.PAGE_SIZE != 0:
        table = pointers.block_table + b.to(gl.int64) * params.sizes.stride_table
    kv_head = head * PACKED_HEADS // OPTIONS.GROUP_SIZE
    keys = KeyRange(
        table, k_start, key_len, first_key, kv_head, list_ptr, num_entries, row_mask, position
    )
    return key_loader.load_tiles(n, kv_start, num_kv_tiles, keys)


@gluon.jit
def _page_size(params, OPTIONS: gl.constexpr):
    """The page size if the kernel is not compiled for it; else any number, which is not used."""
    if OPTIONS.PAGE_SIZE < 0:
        return params.scalars.page_size
    else:
        return params.sizes.num_pages


@gluon.jit
def loader_of_keys(params, pipelines, OPTIONS: gl.constexpr, PART: gl.constexpr):
    """The loader of part number PART of each tile of keys."""
    scalars = params.scalars
    # a field of an aggregate cannot be None: where no rows are copied, it is any number
    first = scalars.k_page_rows
    found = scalars.k_page_rows
    if OPTIONS.GATHERS:
        first = params.pointers.k
        found = pipelines.found.index(PART)
    slots = (first, scalars.stride_k, scalars.stride_k_head, found)
    stored = pipelines.stored_k if OPTIONS.CONVERTS_K else pipelines.k
    page_rows = params.sizes.k_page_rows if OPTIONS.IS_ROWS else scalars.k_page_rows
    return KvLoader(
        params.k_desc, slots, stored, page_rows, _page_size(params, OPTIONS),
        params.sizes.num_pages, OPTIONS, PART,
    )  # fmt: skip


@gluon.jit
def loader_of_values(params, pipelines, OPTIONS: gl.constexpr, PART: gl.constexpr):
    """The loader of part number PART of each tile of values."""
    scalars = params.scalars
    # a field of an aggregate cannot be None: where no rows are copied, it is any number
    first = scalars.v_page_rows
    found = scalars.v_page_rows
    if OPTIONS.GATHERS:
        first = params.pointers.v
        found = pipelines.found.index(2 + PART)
    slots = (first, scalars.stride_v, scalars.stride_v_head, found)
    stored = pipelines.stored_v if OPTIONS.CONVERTS_V else pipelines.v
    page_rows = params.sizes.v_page_rows if OPTIONS.IS_ROWS else scalars.v_page_rows
    return KvLoader(
        params.v_desc, slots, stored, page_rows, _page_size(params, OPTIONS),
        params.sizes.num_pages, OPTIONS, PART,
    )  # fmt: skip


@gluon.jit
def produce_tiles(params, pipelines, OPTIONS: gl.constexpr):
    """Go through the tiles of queries that this program works on; see `_produce_tile`."""
    key_loader = loader_of_keys(params, pipelines, OPTIONS, 0)
    wait_for_kernel_before()
    tile = visit_tiles(params, _produce_tile, (key_loader, params, pipelines, OPTIONS), OPTIONS)
    pipelines.q.producer_acquire(tile)
    pipelines.work_info.put(tile, WORD.NUM_KV_TILES, 0)
    thread_barrier()
    pipelines.work_info.publish(tile)
    mbarrier.arrive(pipelines.q.full_barrier(tile), count=1)


@gluon.jit
def key_range_of(params, work_info, tile, OPTIONS: gl.constexpr):
    """The keys of a tile that was published."""
    first_key = work_info.get(tile, WORD.FIRST_KEY)
    kv_stop = work_info.get(tile, WORD.KV_STOP)
    key_len = work_info.get(tile, WORD.KEY_LEN)
    kv_head = work_info.get(tile, WORD.HEAD) // OPTIONS.GROUP_SIZE
    k_start = 0
    table = 0
    if OPTIONS.PAGE_SIZE == 0:
        k_start = work_info.get(tile, WORD.K_START)
    else:
        b = work_info.get(tile, WORD.BATCH)
        table = params.pointers.block_table + b.to(gl.int64) * params.sizes.stride_table
    num_entries = 0
    row_mask = 0
    position = 0
    list_ptr = 0
    if OPTIONS.HAS_LAYOUT:
        num_entries = work_info.get(tile, WORD.NUM_ENTRIES)
        list_ptr = params.pointers.entries + work_info.get(tile, WORD.FIRST_ENTRY)
        context_len = work_info.get(tile, WORD.CONTEXT_LEN)
        position = context_len + work_info.get(tile, WORD.FIRST_TOKEN)
        stop = context_len + work_info.get(tile, WORD.STOP_TOKEN)
        row_mask = row_mask_of(position, stop, OPTIONS)
    keys = KeyRange(
        table, k_start, key_len, first_key, kv_head, list_ptr, num_entries, row_mask, position
    )
    return keys, kv_stop


@gluon.jit
def produce_kv(params, pipelines, loader, OPTIONS: gl.constexpr):
    """Load a part of the keys, or of the values, of every tile that is published."""
    work_info = pipelines.work_info
    n = 0
    tile = 0
    work_info.wait(0)
    num_kv_tiles = work_info.get(0, WORD.NUM_KV_TILES)
    while num_kv_tiles > 0:
        keys, kv_stop = key_range_of(params, work_info, tile, OPTIONS)
        n = loader.load_tiles(n, kv_stop, num_kv_tiles, keys)
        tile += 1
        work_info.wait(tile)
        num_kv_tiles = work_info.get(tile, WORD.NUM_KV_TILES)
