"""The producer of the Hopper kernel: a warp that draws tiles of queries and loads their keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper_lists import (
    find_list,
    load_entries,
    rows_between,
    runs_of,
)
from torch_paged_attn.backends.triton.ragged_rows import load_rows
from torch_paged_attn.backends.triton.tile_order import ENTRY

# words that tell the consumers of a tile; a count of 0 sends them home. Its keys are numbered, or
# its entries in a list, which begins at FIRST_ENTRY
WORDS = gl.constexpr(16)
COUNT, FIRST_KEY, STOP, KEY_LEN = (gl.constexpr(i) for i in range(4))
Q_START, STOP_TOKEN, FIRST_TOKEN, HEAD = (gl.constexpr(i) for i in range(4, 8))
PAST, FIRST_ENTRY, LISTED, BATCH = (gl.constexpr(i) for i in range(8, 12))

ORDER_ENTRY = gl.constexpr(ENTRY)

# its name until Triton 3.6, and later
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def _put(notes, slot, word: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    notes.index(slot * WORDS + word).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def _draw(order_ptr, number, tiles, wave):
    """Head and entry of a unit of work: a tile for each of `wave` heads, which share keys, then
    the next tile; then the next heads."""
    unit = number // wave
    head = unit // tiles * wave + number % wave
    entry = order_ptr + (1 + unit % tiles) * ORDER_ENTRY
    b, first_token, q_start = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    query_len, k_start, key_len = gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)
    return head, b, first_token, q_start, query_len, k_start, key_len, gl.load(entry + 6)


@gluon.jit
def _find_pages(
    table_ptr, starts, stops, first_key,
    RUN: gl.constexpr, ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """The page of each box of ROWS rows of the runs from these keys on, -1 where there is none to
    read."""
    pages = ()
    for i in gl.static_range(len(starts) * RUN // ROWS):
        j = starts[i * ROWS // RUN] + i * ROWS % RUN
        # entries past the keys, or before a window, may hold anything: they are not read
        seen = (j < stops[i * ROWS // RUN]) & (j + ROWS > first_key)
        page = gl.load(table_ptr + j // PAGE_SIZE, mask=seen, other=-1)
        # the compiler of kernels knows no unpacking
        pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def _load_keys(
    desc, ring, n, runs, table_ptr, k_start, key_len, first_key, present, position, head, page_rows,
    num_pages,
    PAGE_SIZE: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr,
    IS_CAUSAL: gl.constexpr,
):  # fmt: skip
    """Fill n: one run of rows from a key on, or a run for each of several entries of a list. Of
    pages, a run is as many boxes as they are cut into."""
    ROWS: gl.constexpr = desc.block_shape[2]
    RUN: gl.constexpr = ring.tiles.shape[3] // len(runs)
    BOXES: gl.constexpr = ring.tiles.shape[3] // ROWS
    starts = runs
    stops = (key_len,)
    if Q_BLOCK > 0:
        starts, stops = runs_of(
            runs, present, position, key_len, RUN, Q_BLOCK, POSITIONS, IS_CAUSAL
        )  # fmt: skip
    barrier = ring.filled(n)
    if PAGE_SIZE == 0:
        ring.wait_empty(n)
        mbarrier.expect(barrier, desc.block_type.nbytes * BOXES)
        for i in gl.static_range(BOXES):
            box = ring.tile(n).slice(i * ROWS, ROWS, dim=2)
            load_rows(desc, k_start, stops[i], starts[i], head, barrier, box)
    else:
        # all of them on their way before anything waits
        pages = _find_pages(table_ptr, starts, stops, first_key, RUN, ROWS, PAGE_SIZE)
        ring.wait_empty(n)
        mbarrier.expect(barrier, desc.block_type.nbytes * BOXES)
        for i in gl.static_range(BOXES):
            j = starts[i * ROWS // RUN] + i * ROWS % RUN
            page = pages[i]
            is_page = (page >= 0) & (page < num_pages)
            left = stops[i * ROWS // RUN] - j // PAGE_SIZE * PAGE_SIZE
            size = gl.where(is_page, gl.minimum(left, PAGE_SIZE), 0)
            start = gl.where(is_page, page, 0) * page_rows
            box = ring.tile(n).slice(i * ROWS, ROWS, dim=2)
            load_rows(desc, start, size, j % PAGE_SIZE, head, barrier, box)


@gluon.jit
def _runs(list_ptr, at, listed, STEP: gl.constexpr, Q_BLOCK: gl.constexpr):
    """What `_load_keys` loads: the tile from key `at` on, or of the entries from `at` on."""
    runs = (at,)
    if Q_BLOCK > 0:
        runs = load_entries(list_ptr, at, listed, STEP)
    return runs


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, queries, keys, values, notes, order_ptr, table_ptr, entries_ptr,
    spans_ptr, stride_table, k_page_rows, v_page_rows, num_pages, num_heads, left, right, wave,
    layout_heads, groups,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, PACK: gl.constexpr,
    GROUP_SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr,
    LAYOUT_GROUP: gl.constexpr,
):  # fmt: skip
    """Draw units of work until there are none; the keys of each come from right to left, so that
    tiles that need a mask come first."""
    TOKENS: gl.constexpr = BLOCK_M // PACK
    STEP: gl.constexpr = BLOCK_N // KEYS if Q_BLOCK > 0 else BLOCK_N
    programs = gl.num_programs(0)
    tiles = gl.load(order_ptr + 1)
    total = tiles * (num_heads // PACK)
    drawn = 0
    n = 0
    number = gl.program_id(0)
    head, b, first_token, q_start, query_len, k_start, key_len, stop_token = _draw(
        order_ptr, number, tiles, wave
    )
    while number < total:
        past = key_len - query_len
        position = past + first_token
        first_key = 0
        stop = key_len
        if HAS_LEFT:
            first_key = gl.maximum(position - left, 0)
        if HAS_RIGHT:
            stop = gl.minimum(stop, past + stop_token + right)
        first_tile = first_key // BLOCK_N
        first_entry = 0
        listed = 0
        present = 0
        list_ptr = entries_ptr
        if Q_BLOCK > 0:
            first_entry, listed = find_list(
                entries_ptr, spans_ptr, b, head * PACK // LAYOUT_GROUP, position, stop,
                layout_heads, groups, CONSUMERS * TOKENS, KEYS, POSITIONS, HAS_RIGHT,
            )  # fmt: skip
            list_ptr = entries_ptr + first_entry
            present = rows_between(position, past + stop_token, Q_BLOCK, POSITIONS)
            count = (listed + STEP - 1) // STEP
        else:
            count = (stop + BLOCK_N - 1) // BLOCK_N - first_tile
        # a tile that sees no key visits one, of masked keys, and writes its empty rows
        count = gl.maximum(count, 1)
        at = (first_tile + count) * STEP

        queries.wait_empty(drawn)
        slot = drawn % queries.STAGES
        _put(notes, slot, COUNT, count)
        _put(notes, slot, FIRST_KEY, first_key)
        _put(notes, slot, STOP, at)
        _put(notes, slot, KEY_LEN, key_len)
        _put(notes, slot, Q_START, q_start)
        _put(notes, slot, STOP_TOKEN, stop_token)
        _put(notes, slot, FIRST_TOKEN, first_token)
        _put(notes, slot, HEAD, head * PACK)
        _put(notes, slot, PAST, past)
        _put(notes, slot, BATCH, b)
        if Q_BLOCK > 0:
            _put(notes, slot, FIRST_ENTRY, first_entry)
            _put(notes, slot, LISTED, listed)
        thread_barrier()  # the thread that arrives has not written all of these
        barrier = queries.filled(drawn)
        mbarrier.expect(barrier, q_desc.block_type.nbytes * CONSUMERS)
        for i in gl.static_range(CONSUMERS):
            box = queries.tiles.index(slot * CONSUMERS + i)
            row = first_token + i * TOKENS
            load_rows(q_desc, q_start, stop_token, row, head * PACK, barrier, box)

        kv_head = head * PACK // GROUP_SIZE
        table = table_ptr
        if PAGE_SIZE > 0:
            table = table_ptr + b.to(gl.int64) * stride_table
        at -= STEP
        runs = _runs(list_ptr, at, listed, STEP, Q_BLOCK)
        _load_keys(
            k_desc, keys, n, runs, table, k_start, key_len, first_key, present, position, kv_head,
            k_page_rows, num_pages, PAGE_SIZE, Q_BLOCK, POSITIONS, HAS_RIGHT,
        )  # fmt: skip
        # keys run one tile ahead of values, as the products do
        for _ in range(1, count):
            at -= STEP
            next_runs = _runs(list_ptr, at, listed, STEP, Q_BLOCK)
            _load_keys(
                k_desc, keys, n + 1, next_runs, table, k_start, key_len, first_key, present,
                position, kv_head, k_page_rows, num_pages, PAGE_SIZE, Q_BLOCK, POSITIONS, HAS_RIGHT,
            )  # fmt: skip
            _load_keys(
                v_desc, values, n, runs, table, k_start, key_len, first_key, present, position,
                kv_head, v_page_rows, num_pages, PAGE_SIZE, Q_BLOCK, POSITIONS, HAS_RIGHT,
            )  # fmt: skip
            runs = next_runs
            n += 1
        # drawn while the consumers are busy, so that the next queries are there in time
        number = gl.atomic_add(order_ptr, 1) + programs
        (next_head, next_b, next_token, next_q_start, next_query_len, next_k_start, next_key_len,
         next_stop_token) = _draw(order_ptr, number, tiles, wave)  # fmt: skip
        _load_keys(
            v_desc, values, n, runs, table, k_start, key_len, first_key, present, position, kv_head,
            v_page_rows, num_pages, PAGE_SIZE, Q_BLOCK, POSITIONS, HAS_RIGHT,
        )  # fmt: skip
        n += 1
        drawn += 1
        head, b, first_token, q_start = next_head, next_b, next_token, next_q_start
        query_len, k_start, key_len = next_query_len, next_k_start, next_key_len
        stop_token = next_stop_token

    queries.wait_empty(drawn)
    _put(notes, drawn % queries.STAGES, COUNT, 0)
    thread_barrier()
    mbarrier.arrive(queries.filled(drawn), count=1)
