"""The producers of the Hopper kernel, a warp each: one draws tiles of queries and loads their keys,
one loads their values. Where pages are small, two more load half of the keys and of the values."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.block_runs import (
    find_list,
    load_entries,
    rows_between,
    runs_of,
)
from torch_paged_attn.backends.triton.hopper.tile_scheduler import ENTRY
from torch_paged_attn.backends.triton.hopper.tma import (
    in_atoms,
    load_page,
    load_rows,
    rows_of_box,
    start_of_page,
)

# words that tell the others of a tile; a count of 0 sends them home. Its keys are numbered, or its
# entries in a list, which begins at FIRST_ENTRY
WORDS = gl.constexpr(16)
COUNT, FIRST_KEY, STOP, KEY_LEN = (gl.constexpr(i) for i in range(4))
Q_START, STOP_TOKEN, FIRST_TOKEN, HEAD = (gl.constexpr(i) for i in range(4, 8))
PAST, FIRST_ENTRY, LISTED, BATCH = (gl.constexpr(i) for i in range(8, 12))
K_START = gl.constexpr(12)

ORDER_ENTRY = gl.constexpr(ENTRY)

# its name until Triton 3.6, and later
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def _put(notes, slot, word: gl.constexpr, value):
    one: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    notes.index(slot * WORDS + word).store(gl.full([1], 0, gl.int32, one) + value)


@gluon.jit
def get(notes, slot, word: gl.constexpr):
    """A word about the tile whose queries lie in a slot."""
    one: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.sum(notes.index(slot * WORDS + word).load(one), 0)


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
    RUN: gl.constexpr, ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr, FIRST: gl.constexpr,
    BOXES: gl.constexpr,
):  # fmt: skip
    """The page of each of BOXES boxes of ROWS rows of the runs from these keys on, -1 where there
    is none to read."""
    pages = ()
    for i in gl.static_range(FIRST, FIRST + BOXES):
        j = starts[i * ROWS // RUN] + i * ROWS % RUN
        # entries past the keys, or before a window, may hold anything: they are not read
        seen = (j < stops[i * ROWS // RUN]) & (j + ROWS > first_key)
        page = gl.load(table_ptr + j // PAGE_SIZE, mask=seen, other=-1)
        # the compiler of kernels knows no unpacking
        pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def _load_pages(
    desc, ring, n, table_ptr, at, first_key, key_len, head, page_rows, num_pages,
    BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, IS_SEEN: gl.constexpr, FIRST: gl.constexpr,
    BOXES: gl.constexpr,
):  # fmt: skip
    """Fill n with keys from `at` on in whole boxes; unless IS_SEEN, some of them nobody may see.
    One box follows the other closely: between two of them the products would wait."""
    ROWS: gl.constexpr = rows_of_box(desc.block_shape)
    pages = ()
    if IS_SEEN:
        entry = table_ptr + at // PAGE_SIZE
        for i in gl.static_range(FIRST, FIRST + BOXES):
            pages = pages + (gl.load(entry + i),)  # type: ignore[assignment]  # noqa: RUF005
    else:
        pages = _find_pages(
            table_ptr, (at,), (key_len,), first_key, BLOCK_N, ROWS, PAGE_SIZE, FIRST, BOXES
        )  # fmt: skip
    in_page = 0
    if PAGE_SIZE > ROWS:
        in_page = at % PAGE_SIZE
    starts = ()
    for i in gl.static_range(BOXES):
        # a bad id that nobody checked reads the last page: wrong, but inside the cache
        page = gl.minimum(pages[i].to(gl.uint32), (num_pages - 1).to(gl.uint32)).to(gl.int32)
        start = start_of_page(desc, page, page_rows, in_page)
        starts = starts + (start,)  # type: ignore[assignment]  # noqa: RUF005
    barrier = ring.filled(n)
    ring.wait_empty(n)
    mbarrier.expect(barrier, desc.block_type.nbytes * BOXES)
    for i in gl.static_range(BOXES):
        load_page(desc, FIRST + i, starts[i], head, barrier, ring.tile(n))


@gluon.jit
def _load_runs(
    desc, ring, n, runs, table_ptr, k_start, key_len, first_key, present, position, head, page_rows,
    num_pages,
    BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr,
    IS_CAUSAL: gl.constexpr, FIRST: gl.constexpr, BOXES: gl.constexpr,
):  # fmt: skip
    """Fill n: one run of rows from a key on, or a run for each of several entries of a list. Of
    pages, a run is as many boxes as they are cut into."""
    ROWS: gl.constexpr = desc.block_shape[2]
    RUN: gl.constexpr = BLOCK_N // len(runs)
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
        pages = _find_pages(
            table_ptr, starts, stops, first_key, RUN, ROWS, PAGE_SIZE, FIRST, BOXES
        )  # fmt: skip
        ring.wait_empty(n)
        mbarrier.expect(barrier, desc.block_type.nbytes * BOXES)
        for i in gl.static_range(FIRST, FIRST + BOXES):
            j = starts[i * ROWS // RUN] + i * ROWS % RUN
            page = pages[i - FIRST]
            is_page = (page >= 0) & (page < num_pages)
            left = stops[i * ROWS // RUN] - j // PAGE_SIZE * PAGE_SIZE
            size = gl.where(is_page, gl.minimum(left, PAGE_SIZE), 0)
            start = gl.where(is_page, page, 0) * page_rows
            box = ring.tile(n).slice(i * ROWS, ROWS, dim=2)
            load_rows(desc, start, size, j % PAGE_SIZE, head, barrier, box)


@gluon.jit
def _load_keys(
    desc, ring, n, at, list_ptr, listed, table, k_start, key_len, first_key, present, position,
    head, page_rows, num_pages,
    BLOCK_N: gl.constexpr, PAGE_SIZE: gl.constexpr, KEYS: gl.constexpr, Q_BLOCK: gl.constexpr,
    POSITIONS: gl.constexpr, IS_CAUSAL: gl.constexpr, PART: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Fill one of the parts of n: the tile from key `at` on, or of the entries of a list from `at`
    on."""
    BOXES: gl.constexpr = BLOCK_N // rows_of_box(desc.block_shape) // PARTS
    FIRST: gl.constexpr = PART * BOXES
    runs = (at,)
    if Q_BLOCK > 0:
        runs = load_entries(list_ptr, at, listed, BLOCK_N // KEYS)
    if PAGE_SIZE > 0 and Q_BLOCK == 0 and (at >= first_key) & (at + BLOCK_N <= key_len):
        _load_pages(
            desc, ring, n, table, at, first_key, key_len, head, page_rows, num_pages, BLOCK_N,
            PAGE_SIZE, True, FIRST, BOXES,
        )  # fmt: skip
    elif in_atoms(desc.block_shape):
        _load_pages(
            desc, ring, n, table, at, first_key, key_len, head, page_rows, num_pages, BLOCK_N,
            PAGE_SIZE, False, FIRST, BOXES,
        )  # fmt: skip
    else:
        _load_runs(
            desc, ring, n, runs, table, k_start, key_len, first_key, present, position, head,
            page_rows, num_pages, BLOCK_N, PAGE_SIZE, Q_BLOCK, POSITIONS, IS_CAUSAL, FIRST, BOXES,
        )  # fmt: skip


@gluon.jit
def lead(
    q_desc, k_desc, queries, keys, announced, notes, order_ptr, table_ptr, entries_ptr, spans_ptr,
    stride_table, page_rows, num_pages, num_heads, left, right, wave, layout_heads, groups,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, PACK: gl.constexpr,
    GROUP_SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr, KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr,
    LAYOUT_GROUP: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Draw units of work until there are none, tell of each, and load its queries and (the first
    part of) its keys; they come from right to left, so that tiles that need a mask come first."""
    TOKENS: gl.constexpr = BLOCK_M // PACK
    STEP: gl.constexpr = BLOCK_N // KEYS if Q_BLOCK > 0 else BLOCK_N
    programs = gl.num_programs(0)
    tiles = gl.load(order_ptr + 1)
    total = tiles * (num_heads // PACK)
    drawn = 0
    n = 0
    number = gl.program_id(0)
    while number < total:
        head, b, first_token, q_start, query_len, k_start, key_len, stop_token = _draw(
            order_ptr, number, tiles, wave
        )
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
        if Q_BLOCK > 0:
            first_entry, listed = find_list(
                entries_ptr, spans_ptr, b, head * PACK // LAYOUT_GROUP, position, stop,
                layout_heads, groups, CONSUMERS * TOKENS, KEYS, POSITIONS, HAS_RIGHT,
            )  # fmt: skip
            present = rows_between(position, past + stop_token, Q_BLOCK, POSITIONS)
            count = (listed + STEP - 1) // STEP
        else:
            count = (stop + BLOCK_N - 1) // BLOCK_N - first_tile
        # a tile that sees no key visits one, of masked keys, and writes its empty rows
        count = gl.maximum(count, 1)
        at = (first_tile + count) * STEP

        # once the consumers are done with what lay there, so are the other producers
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
        _put(notes, slot, K_START, k_start)
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
        mbarrier.arrive(announced.index(slot), count=1)
        drawn += 1

        list_ptr = entries_ptr
        if Q_BLOCK > 0:
            list_ptr = entries_ptr + first_entry
        table = table_ptr
        if PAGE_SIZE > 0:
            table = table_ptr + b.to(gl.int64) * stride_table
        for _ in range(count):
            at -= STEP
            _load_keys(
                k_desc, keys, n, at, list_ptr, listed, table, k_start, key_len, first_key, present,
                position, head * PACK // GROUP_SIZE, page_rows, num_pages, BLOCK_N, PAGE_SIZE, KEYS,
                Q_BLOCK, POSITIONS, HAS_RIGHT, 0, PARTS,
            )  # fmt: skip
            n += 1
        # drawn while the consumers are busy, so that the next queries are there in time
        number = gl.atomic_add(order_ptr, 1) + programs

    queries.wait_empty(drawn)
    slot = drawn % queries.STAGES
    _put(notes, slot, COUNT, 0)
    thread_barrier()
    mbarrier.arrive(announced.index(slot), count=1)
    mbarrier.arrive(queries.filled(drawn), count=1)


@gluon.jit
def follow(
    desc, queries, ring, announced, notes, table_ptr, entries_ptr, stride_table, page_rows,
    num_pages,
    BLOCK_N: gl.constexpr, GROUP_SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr,
    HAS_RIGHT: gl.constexpr, KEYS: gl.constexpr, Q_BLOCK: gl.constexpr, POSITIONS: gl.constexpr,
    PART: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    """Load a part of the keys or values of every tile that is announced; nothing, if there is no
    such part."""
    STEP: gl.constexpr = BLOCK_N // KEYS if Q_BLOCK > 0 else BLOCK_N
    if PART < PARTS:
        n = 0
        drawn = 0
        mbarrier.wait(announced.index(0), 0)
        count = get(notes, 0, COUNT)
        while count > 0:
            slot = drawn % queries.STAGES
            first_key = get(notes, slot, FIRST_KEY)
            at = get(notes, slot, STOP)
            key_len = get(notes, slot, KEY_LEN)
            head = get(notes, slot, HEAD) // GROUP_SIZE
            k_start = 0
            table = table_ptr
            if PAGE_SIZE == 0:
                k_start = get(notes, slot, K_START)
            else:
                table = table_ptr + get(notes, slot, BATCH).to(gl.int64) * stride_table
            listed = 0
            present = 0
            position = 0
            list_ptr = entries_ptr
            if Q_BLOCK > 0:
                listed = get(notes, slot, LISTED)
                list_ptr = entries_ptr + get(notes, slot, FIRST_ENTRY)
                past = get(notes, slot, PAST)
                position = past + get(notes, slot, FIRST_TOKEN)
                stop = past + get(notes, slot, STOP_TOKEN)
                present = rows_between(position, stop, Q_BLOCK, POSITIONS)
            for _ in range(count):
                at -= STEP
                _load_keys(
                    desc, ring, n, at, list_ptr, listed, table, k_start, key_len, first_key,
                    present, position, head, page_rows, num_pages, BLOCK_N, PAGE_SIZE, KEYS,
                    Q_BLOCK, POSITIONS, HAS_RIGHT, PART, PARTS,
                )  # fmt: skip
                n += 1
            drawn += 1
            mbarrier.wait(announced.index(drawn % queries.STAGES), (drawn // queries.STAGES) & 1)
            count = get(notes, drawn % queries.STAGES, COUNT)
