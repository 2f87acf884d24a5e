"""The producer of the Hopper kernel: a warp that draws tiles of queries and loads their keys."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.ragged_rows import load_rows

# words that tell the consumers of a tile; a count of 0 sends them home
WORDS = gl.constexpr(8)
COUNT, FIRST_KEY, STOP_KEY, KEY_LEN = (gl.constexpr(i) for i in range(4))
Q_START, QUERY_LEN, FIRST_TOKEN, HEAD = (gl.constexpr(i) for i in range(4, 8))


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
    entry = order_ptr + (1 + unit % tiles) * WORDS
    b, first_token, q_start = gl.load(entry), gl.load(entry + 1), gl.load(entry + 2)
    return head, b, first_token, q_start, gl.load(entry + 3), gl.load(entry + 4), gl.load(entry + 5)


@gluon.jit
def _find_pages(
    table_ptr, n0, key_len, first_key,
    BOXES: gl.constexpr, ROWS: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """The page of each box of rows from key n0 on, -1 where there is none to read."""
    pages = ()
    for i in gl.static_range(BOXES):
        j = n0 + i * ROWS
        # entries past the keys, or before a window, may hold anything: they are not read
        seen = (j < key_len) & (j + ROWS > first_key)
        page = gl.load(table_ptr + j // PAGE_SIZE, mask=seen, other=-1)
        # the compiler of kernels knows no unpacking
        pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
    return pages


@gluon.jit
def _load_keys(
    desc, ring, n, table_ptr, n0, k_start, key_len, first_key, head, page_rows, num_pages,
    PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Fill n: BLOCK_N rows from key n0 on; of pages, as many boxes as they are cut into."""
    ROWS: gl.constexpr = desc.block_shape[2]
    BOXES: gl.constexpr = ring.tiles.shape[3] // ROWS
    barrier = ring.filled(n)
    if PAGE_SIZE == 0:
        ring.wait_empty(n)
        mbarrier.expect(barrier, desc.block_type.nbytes)
        load_rows(desc, k_start, key_len, n0, head, barrier, ring.tile(n))
    else:
        # all of them on their way before anything waits
        pages = _find_pages(table_ptr, n0, key_len, first_key, BOXES, ROWS, PAGE_SIZE)
        ring.wait_empty(n)
        mbarrier.expect(barrier, desc.block_type.nbytes * BOXES)
        for i in gl.static_range(BOXES):
            j = n0 + i * ROWS
            page = pages[i]
            is_page = (page >= 0) & (page < num_pages)
            size = gl.where(is_page, gl.minimum(key_len - j // PAGE_SIZE * PAGE_SIZE, PAGE_SIZE), 0)
            start = gl.where(is_page, page, 0) * page_rows
            box = ring.tile(n).slice(i * ROWS, ROWS, dim=2)
            load_rows(desc, start, size, j % PAGE_SIZE, head, barrier, box)


@gluon.jit
def produce(
    q_desc, k_desc, v_desc, queries, keys, values, notes, order_ptr, table_ptr, stride_table,
    k_page_rows, v_page_rows, num_pages, num_heads, left, right, wave,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CONSUMERS: gl.constexpr, PACK: gl.constexpr,
    GROUP_SIZE: gl.constexpr, PAGE_SIZE: gl.constexpr, HAS_LEFT: gl.constexpr,
    HAS_RIGHT: gl.constexpr,
):  # fmt: skip
    """Draw units of work until there are none; the keys of each come from right to left, so that
    tiles that need a mask come first."""
    TOKENS: gl.constexpr = BLOCK_M // PACK
    programs = gl.num_programs(0)
    tiles = gl.load(order_ptr + 1)
    total = tiles * (num_heads // PACK)
    drawn = 0
    n = 0
    number = gl.program_id(0)
    head, b, first_token, q_start, query_len, k_start, key_len = _draw(
        order_ptr, number, tiles, wave
    )
    while number < total:
        past = key_len - query_len
        first_key = 0
        stop = key_len
        if HAS_LEFT:
            first_key = gl.maximum(past + first_token - left, 0)
        if HAS_RIGHT:
            last_token = gl.minimum(first_token + CONSUMERS * TOKENS, query_len) - 1
            stop = gl.minimum(stop, past + last_token + right + 1)
        first_tile = first_key // BLOCK_N
        # a tile that sees no key visits one, of masked keys, and writes its empty rows
        count = gl.maximum((stop + BLOCK_N - 1) // BLOCK_N - first_tile, 1)
        stop_key = (first_tile + count) * BLOCK_N

        queries.wait_empty(drawn)
        slot = drawn % queries.STAGES
        _put(notes, slot, COUNT, count)
        _put(notes, slot, FIRST_KEY, first_key)
        _put(notes, slot, STOP_KEY, stop_key)
        _put(notes, slot, KEY_LEN, key_len)
        _put(notes, slot, Q_START, q_start)
        _put(notes, slot, QUERY_LEN, query_len)
        _put(notes, slot, FIRST_TOKEN, first_token)
        _put(notes, slot, HEAD, head * PACK)
        gl.thread_barrier()  # the thread that arrives has not written all of these
        barrier = queries.filled(drawn)
        mbarrier.expect(barrier, q_desc.block_type.nbytes * CONSUMERS)
        for i in gl.static_range(CONSUMERS):
            box = queries.tiles.index(slot * CONSUMERS + i)
            row = first_token + i * TOKENS
            load_rows(q_desc, q_start, query_len, row, head * PACK, barrier, box)

        kv_head = head * PACK // GROUP_SIZE
        table = table_ptr
        if PAGE_SIZE > 0:
            table = table_ptr + b.to(gl.int64) * stride_table
        n0 = stop_key - BLOCK_N
        _load_keys(
            k_desc, keys, n, table, n0, k_start, key_len, first_key, kv_head, k_page_rows,
            num_pages, PAGE_SIZE,
        )  # fmt: skip
        # keys run one tile ahead of values, as the products do
        for _ in range(1, count):
            _load_keys(
                k_desc, keys, n + 1, table, n0 - BLOCK_N, k_start, key_len, first_key, kv_head,
                k_page_rows, num_pages, PAGE_SIZE,
            )  # fmt: skip
            _load_keys(
                v_desc, values, n, table, n0, k_start, key_len, first_key, kv_head, v_page_rows,
                num_pages, PAGE_SIZE,
            )  # fmt: skip
            n0 -= BLOCK_N
            n += 1
        # drawn while the consumers are busy, so that the next queries are there in time
        number = gl.atomic_add(order_ptr, 1) + programs
        next_head, next_b, next_token, next_q_start, next_query_len, next_k_start, next_key_len = (
            _draw(order_ptr, number, tiles, wave)
        )
        _load_keys(
            v_desc, values, n, table, n0, k_start, key_len, first_key, kv_head, v_page_rows,
            num_pages, PAGE_SIZE,
        )  # fmt: skip
        n += 1
        drawn += 1
        head, b, first_token, q_start = next_head, next_b, next_token, next_q_start
        query_len, k_start, key_len = next_query_len, next_k_start, next_key_len

    queries.wait_empty(drawn)
    _put(notes, drawn % queries.STAGES, COUNT, 0)
    gl.thread_barrier()
    mbarrier.arrive(queries.filled(drawn), count=1)
