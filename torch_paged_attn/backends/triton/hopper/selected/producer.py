"""The producer of the kernel for lists of latent keys, four warps: it finds its program's share of
the lists, and copies the rows that they name, 16 bytes at a time.

A unit of work is `unit_pairs` pairs of blocks of a token's list. The units of all tokens, one after
the other, are dealt out to groups of programs as in `mla/shares.py`.

All heads of a token see the same keys. So the producer finds out which keys of a block are seen,
and leaves zeros in place of the others.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.common.tma import async_load_pointers, load_rows
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.forward.producer import (
    let_next_kernel_start,
    wait_for_kernel_before,
)
from torch_paged_attn.backends.triton.hopper.mla.pipeline import HALF, KEYS, ROWS
from torch_paged_attn.backends.triton.hopper.selected.stages_8bit import copy_stored_block

# sequences whose ends are loaded together
LOOKED_AT = gl.constexpr(128)
# columns that are copied at a time, and of a thread: 16 bytes
BOX, PIECE = gl.constexpr(64), gl.constexpr(8)
NO_BOUND = gl.constexpr(2**31 - 1)


class Sequence(NamedTuple):
    """A sequence of queries, as values of the kernel. The rows past the last sequence are one more,
    whose lists are empty."""

    b: Any
    q_stop: Any
    # keys that a token's list may name are first_key to stop_key - 1, less what windows hide
    first_key: Any
    stop_key: Any
    shift: Any  # from the number of a token to its position
    k_start: Any  # the first row of its packed keys
    table: Any  # pointer to its row of the block table


class TokenList(NamedTuple):
    """The list of a token, as values of the kernel."""

    ptr: Any
    count: Any
    first_key: Any
    stop_key: Any
    k_start: Any
    table: Any


@gluon.constexpr_function
def copied_layout():
    """Of a box of (KEYS, BOX): eight lanes copy a row."""
    return gl.BlockedLayout([1, PIECE.value], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _sequence_of(token, b, params):
    """The number of a token's sequence, which is b or a later one."""
    layout: gl.constexpr = gl.BlockedLayout([LOOKED_AT // 32], [32], [gl.num_warps()], [0])
    ends = params.pointers.cu_seqlens_q + 1
    found = LOOKED_AT + 0 * b
    while found == LOOKED_AT:
        at = b + gl.arange(0, LOOKED_AT, layout)
        end = gl.load(ends + at, mask=at < params.sizes.batch, other=NO_BOUND)
        found = gl.sum((end <= token).to(gl.int32), 0)
        b += found
    return b


@gluon.jit
def find_sequence(token, b, params, OPTIONS: gl.constexpr):
    """A token's sequence, which is b or a later one."""
    pointers, sizes = params.pointers, params.sizes
    b = _sequence_of(token, b, params)
    exists = b < sizes.batch
    q_start = gl.load(pointers.cu_seqlens_q + b, mask=exists, other=0).to(gl.int32)
    q_stop = gl.load(pointers.cu_seqlens_q + b + 1, mask=exists, other=NO_BOUND).to(gl.int32)
    first_key = 0 * b
    k_start = 0 * b
    shift = 0 * b
    table = 0
    if OPTIONS.IS_SLOTS:
        stop_key = sizes.num_rows.to(gl.int64) * OPTIONS.PAGE_SIZE
    else:
        bounds = pointers.cu_seqlens_q
        if pointers.cu_seqlens_k is not None:
            bounds = pointers.cu_seqlens_k
        k_start = gl.load(bounds + b, mask=exists, other=0).to(gl.int32)
        if pointers.seqused_k is not None:
            key_len = gl.load(pointers.seqused_k + b, mask=exists, other=0).to(gl.int32)
        else:
            key_len = gl.load(bounds + b + 1, mask=exists, other=0).to(gl.int32) - k_start
        if pointers.k_start is not None:
            k_start = gl.load(pointers.k_start + b, mask=exists, other=0).to(gl.int32)
        shift = key_len - q_stop
        if pointers.q_position is not None:
            position = gl.load(pointers.q_position + b, mask=exists, other=0).to(gl.int32)
            shift = position - q_start
        # values that were not checked must not lead outside the tensors
        if OPTIONS.PAGE_SIZE == 0:
            room = sizes.num_rows.to(gl.int64) - k_start
            first_key = gl.maximum(-k_start, 0)
        else:
            room = sizes.max_pages.to(gl.int64) * OPTIONS.PAGE_SIZE
            row = gl.minimum(b, sizes.batch - 1).to(gl.int64)
            table = pointers.block_table + row * sizes.stride_table
        stop_key = gl.minimum(key_len.to(gl.int64), room)
    stop_key = gl.maximum(gl.minimum(stop_key, NO_BOUND), 0).to(gl.int32)
    return Sequence(b, q_stop, first_key, stop_key, shift, k_start, table)


@gluon.jit
def _list_of(token, sequence, params, OPTIONS: gl.constexpr):
    """The list of a token, of which entries up to `count` are read."""
    pointers, sizes, scalars = params.pointers, params.sizes, params.scalars
    exists = sequence.b < sizes.batch
    count = gl.where(exists, sizes.entries, 0)
    if pointers.num_selected is not None:
        at = pointers.num_selected + token.to(gl.int64) * sizes.stride_count_token
        count = gl.maximum(gl.minimum(count, gl.load(at, mask=exists, other=0)), 0)
    first_key, stop_key = sequence.first_key, sequence.stop_key
    position = sequence.shift.to(gl.int64) + token
    if OPTIONS.HAS_LEFT:
        first = gl.minimum(position - scalars.left, NO_BOUND)
        first_key = gl.maximum(first, first_key.to(gl.int64)).to(gl.int32)
    if OPTIONS.HAS_RIGHT:
        stop = gl.maximum(position + scalars.right + 1, 0)
        stop_key = gl.minimum(stop, stop_key.to(gl.int64)).to(gl.int32)
    ptr = pointers.key_indices + token.to(gl.int64) * sizes.stride_index_token
    return TokenList(ptr, count, first_key, stop_key, sequence.k_start, sequence.table)


@gluon.jit
def _entries_of(entry, listed, params):
    """Keys that a list names from an entry on, one for each row of a block; -1 past the list."""
    by_row: gl.constexpr = gl.SliceLayout(1, copied_layout())
    at = entry + gl.arange(0, KEYS, by_row)
    stride = params.scalars.stride_index
    return gl.load(listed.ptr + at.to(gl.int64) * stride, mask=at < listed.count, other=-1)


class FoundRows(NamedTuple):
    """Where the rows of a block's keys begin, in pieces, as values of the kernel."""

    latent: Any
    rope: Any
    is_seen: Any


@gluon.jit
def rows_of(key, listed, params, OPTIONS: gl.constexpr):
    """Where the rows of keys are, and whether the token sees them."""
    PAGE_SIZE: gl.constexpr = OPTIONS.PAGE_SIZE
    sizes, scalars = params.sizes, params.scalars
    is_seen = (key >= listed.first_key) & (key < listed.stop_key)
    page = 0 * key
    slot = listed.k_start + key
    if PAGE_SIZE > 0:
        page = key // PAGE_SIZE
        slot = key % PAGE_SIZE
        if not OPTIONS.IS_SLOTS:
            page = gl.load(listed.table + page, mask=is_seen, other=0).to(gl.int32)
            # a bad id that nobody checked reads the last page: wrong, but inside the cache
            page = gl.minimum(page.to(gl.uint32), (sizes.num_rows - 1).to(gl.uint32)).to(gl.int32)
    page, slot = page.to(gl.int64), slot.to(gl.int64)
    latent = page * scalars.page_pieces + slot * scalars.slot_pieces
    rope = latent
    if OPTIONS.HAS_ROPE and not OPTIONS.IS_ONE_ROW:
        rope = page * scalars.rope_page_pieces + slot * scalars.rope_slot_pieces
    return FoundRows(latent, rope, is_seen)


@gluon.jit
def _pieces_of(row):
    """Offsets of a box that begins with these pieces."""
    layout: gl.constexpr = copied_layout()
    column = gl.arange(0, BOX, gl.SliceLayout(0, layout))
    return gl.expand_dims(row, 1) * PIECE + gl.expand_dims(column, 0)


@gluon.jit
def _prefetch(rows, params, OPTIONS: gl.constexpr):
    """Have the chip's cache load the values of a block that is copied later. Not for few heads,
    whose products take less time than the copies: requests for the same lines would slow those."""
    if OPTIONS.PACKED_HEADS == ROWS:
        _prefetch_lines(rows, params)


@gluon.jit
def _prefetch_lines(rows, params):
    """Ask for the lines of 128 bytes that hold the values in these rows."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    row = gl.where(rows.is_seen, rows.latent, 0)
    row = gl.expand_dims(gl.convert_layout(row, gl.SliceLayout(1, layout)), 1)
    line = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, layout)), 0)
    at = params.pointers.latents + (row * PIECE + line * BOX)
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [at.to(gl.int64)], gl.int32, False, 1
    )


@gluon.jit
def _copy_quarter(n, rows, params, keys, OPTIONS: gl.constexpr, QUARTER: gl.constexpr):
    """Copy a quarter of pair n (see `mla/pipeline.py`), of keys in these rows."""
    AT_ONCE: gl.constexpr = HALF // BOX // OPTIONS.COLUMN_BOXES
    COLUMN: gl.constexpr = HALF if QUARTER == 1 or QUARTER == 2 else 0
    pointers = params.pointers
    is_seen = gl.expand_dims(rows.is_seen, 1)
    latents = pointers.latents + COLUMN + _pieces_of(rows.latent)
    half = keys.half(n, QUARTER)
    for i in gl.static_range(HALF // BOX):
        box = half.slice(i * BOX, BOX, dim=1)
        async_load_pointers(box, latents + i * BOX, is_seen)
        if i % AT_ONCE == AT_ONCE - 1:
            if QUARTER % 2 == 1 and OPTIONS.HAS_ROPE and i == HALF // BOX - 1:
                rope = keys.rope(n, QUARTER // 2)
                ropes = pointers.ropes + _pieces_of(rows.rope)
                async_load_pointers(rope, ropes, is_seen)
            barrier = keys.full_barrier(QUARTER, i // AT_ONCE)
            async_copy.mbarrier_arrive(barrier, increment_count=False)


@gluon.jit
def copy_block(n, rows, params, pipelines, OPTIONS: gl.constexpr, BLOCK: gl.constexpr):
    """Copy block number BLOCK of pair n, and say which of its keys are seen."""
    if OPTIONS.HAS_SCALES:
        copy_stored_block(n, rows, params, pipelines, BLOCK)
    else:
        _copy_latents(n, rows, params, pipelines, OPTIONS, BLOCK)


@gluon.jit
def _copy_latents(n, rows, params, pipelines, OPTIONS: gl.constexpr, BLOCK: gl.constexpr):
    """The same of latents of 16 bits."""
    keys = pipelines.k
    keys.acquire(n, 2 * BLOCK)
    pipelines.seen.put(rows.is_seen, BLOCK)
    _copy_quarter(n, rows, params, keys, OPTIONS, 2 * BLOCK)
    keys.acquire(n, 2 * BLOCK + 1)
    _copy_quarter(n, rows, params, keys, OPTIONS, 2 * BLOCK + 1)


@gluon.jit
def load_queries(tile, token, head, part, pairs, b, params, pipelines, OPTIONS: gl.constexpr):
    """Write the words about tile number `tile` for the consumers, and load its queries."""
    queries, work_info = pipelines.q, pipelines.work_info
    q_desc, q_rope_desc = params.q_desc, params.q_rope_desc
    queries.acquire(tile)
    work_info.put(tile, WORD.NUM_KV_TILES, pairs)
    work_info.put(tile, WORD.FIRST_KEY, 0)
    work_info.put(tile, WORD.KEY_LEN, 0)
    work_info.put(tile, WORD.CONTEXT_LEN, 0)
    work_info.put(tile, WORD.Q_START, token)
    work_info.put(tile, WORD.FIRST_TOKEN, 0)
    work_info.put(tile, WORD.STOP_TOKEN, 1)
    work_info.put(tile, WORD.HEAD, head)
    work_info.put(tile, WORD.BATCH, b)
    work_info.put(tile, WORD.FIRST_PART, part)
    thread_barrier()  # the thread that arrives has not written all of these
    barrier = queries.full.index(0)
    MORE: gl.constexpr = q_rope_desc.block_type.nbytes if OPTIONS.HAS_ROPE else 0
    mbarrier.expect(barrier, 2 * q_desc.block_type.nbytes + MORE)
    for i in gl.static_range(2):
        load_rows(q_desc, token, 1, 0, head, barrier, queries.halves.index(i), i * HALF)
    if OPTIONS.HAS_ROPE:
        rope = queries.rope.index(0)
        load_rows(q_rope_desc, token, 1, 0, head, barrier, rope, OPTIONS.ROPE_COLUMN)


@gluon.jit
def produce_lists(params, pipelines, OPTIONS: gl.constexpr):
    """Load queries and keys of the units of a program's share, token after token."""
    sizes = params.sizes
    HEAD_TILES: gl.constexpr = OPTIONS.HEAD_TILES
    wait_for_kernel_before()
    # so that the second kernel need only wait for the programs to end
    let_next_kernel_start()
    groups = gl.num_programs(0) // HEAD_TILES
    group = gl.program_id(0) // HEAD_TILES
    head_tile = gl.program_id(0) % HEAD_TILES
    head = head_tile * OPTIONS.PACKED_HEADS
    total = sizes.total_q.to(gl.int64) * sizes.units
    unit = total * group // groups
    left = (total * (group + 1) // groups - unit).to(gl.int32)
    token = (unit // sizes.units).to(gl.int32)
    first = (unit % sizes.units).to(gl.int32)
    sequence = find_sequence(token, 0 * token, params, OPTIONS)
    n = 0
    tile = 0
    while left > 0:
        if token >= sequence.q_stop:
            sequence = find_sequence(token, sequence.b, params, OPTIONS)
        listed = _list_of(token, sequence, params, OPTIONS)
        units = gl.minimum(sizes.units - first, left)
        entry = first * sizes.unit_pairs * (2 * KEYS)
        rest = gl.minimum(listed.count - entry, units * sizes.unit_pairs * (2 * KEYS))
        # one, of keys that are not seen, if there are none
        pairs = gl.maximum((rest + 2 * KEYS - 1) // (2 * KEYS), 1)
        part = (2 * group + (first == 0).to(gl.int32)) * HEAD_TILES + head_tile
        part = gl.where(units == sizes.units, -1, part)
        key = _entries_of(entry, listed, params)
        rows = rows_of(key, listed, params, OPTIONS)
        load_queries(tile, token, head, part, pairs, sequence.b, params, pipelines, OPTIONS)
        for _ in range(pairs):
            key = _entries_of(entry + KEYS, listed, params)
            copy_block(n, rows, params, pipelines, OPTIONS, 0)
            rows = rows_of(key, listed, params, OPTIONS)
            _prefetch(rows, params, OPTIONS)
            entry += 2 * KEYS
            key = _entries_of(entry, listed, params)
            copy_block(n, rows, params, pipelines, OPTIONS, 1)
            rows = rows_of(key, listed, params, OPTIONS)
            _prefetch(rows, params, OPTIONS)
            n += 1
        left -= units
        token += 1
        first = 0 * first
        tile += 1
    end_tiles(tile, pipelines)


@gluon.jit
def end_tiles(tile, pipelines):
    """Tell the consumers that there is no tile number `tile`."""
    pipelines.q.acquire(tile)
    pipelines.work_info.put(tile, WORD.NUM_KV_TILES, 0)
    thread_barrier()
    mbarrier.arrive(pipelines.q.full.index(0), count=1)
