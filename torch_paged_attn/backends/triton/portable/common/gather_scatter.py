"""Loads and stores of rows of queries, keys, values and results; and the pages of keys.

A row is read in one or two chunks, each a power of two elements: a head_dim of 80 as 64 + 16, one
of 576 as 512 + 64. So no tensor has to be padded, and products are not much wider than head_dim.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.dequant import decode, encode

# in place of a page size that is not compiled in: pages of at least BLOCK_N keys, and smaller ones
LONG_PAGES, SHORT_PAGES = tl.constexpr(-1), tl.constexpr(-2)


def chunks(dim: int, smallest: int) -> tuple[int, int]:
    """`dim` as one or two powers of two that cover it: (80 -> 64, 16), (128 -> 128, 0)."""
    whole = max(smallest, triton.next_power_of_2(dim))
    low = whole // 2
    if dim <= low or low < smallest:
        return whole, 0
    high = max(smallest, triton.next_power_of_2(dim - low))
    return (low, high) if low + high < whole else (whole, 0)


@triton.jit
def load_rows(
    ptr,
    offsets,
    keep,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    STOP: tl.constexpr,
    MASKED: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    STEP: tl.constexpr = 1,
):
    """WIDTH elements START, START + STEP, ... of the rows at these offsets. Elements from STOP on
    are 0, and with MASKED so are rows for which `keep` is False.
    """
    dims = START + STEP * tl.arange(0, WIDTH)
    pointers = ptr + offsets[:, None] + dims[None, :]
    if START + STEP * (WIDTH - 1) >= STOP:
        inside = (dims < STOP)[None, :]
        if MASKED:
            inside = inside & keep[:, None]
        x = tl.load(pointers, mask=inside, other=0.0)
    elif MASKED:
        x = tl.load(pointers, mask=keep[:, None], other=0.0)
    else:
        x = tl.load(pointers)
    return decode(x, FORMAT, DTYPE)


@triton.jit
def load_chunks(
    ptr,
    offsets,
    keep,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STOP: tl.constexpr,
    MASKED: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Rows of STOP elements in two chunks; with MASKED, rows for which `keep` is False are 0. If
    HIGH is 0, the second chunk is the number 0.
    """
    low = load_rows(ptr, offsets, keep, 0, LOW, STOP, MASKED, FORMAT, DTYPE)
    high = 0.0
    if HIGH > 0:
        high = load_rows(ptr, offsets, keep, LOW, HIGH, STOP, MASKED, FORMAT, DTYPE)
    return low, high


@triton.jit
def store_chunks(
    pointers,
    x,
    keep,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    STOP: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """Write rows of STOP elements that are in two chunks."""
    store_rows(pointers, x[0], keep, 0, LOW, STOP, None, FORMAT)
    if HIGH > 0:
        store_rows(pointers, x[1], keep, LOW, HIGH, STOP, None, FORMAT)


@triton.jit
def zero_chunks(ROWS: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr):
    """float32 zeros for rows in two chunks. The second is unused if HIGH is 0."""
    low = tl.zeros([ROWS, LOW], tl.float32)
    return low, tl.zeros([ROWS, HIGH if HIGH > 0 else 1], tl.float32)


@triton.jit
def zero_chunks_unless(keep, x, HIGH: tl.constexpr):
    """`zero_unless` for rows in two chunks."""
    low = zero_unless(keep, x[0])
    high = x[1]
    if HIGH > 0:
        high = zero_unless(keep, x[1])
    return low, high


@triton.jit
def zero_unless(keep, x):
    """x with 0 in rows for which `keep` is False. The rows are loaded nevertheless, because a
    masked load would have to wait for the mask.
    """
    return tl.where(keep[:, None], x, tl.zeros_like(x))


@triton.jit
def store_rows(
    pointers,
    x,
    keep,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    STOP: tl.constexpr,
    scale_ptr,
    FORMAT: tl.constexpr,
):
    """Write elements START to START + WIDTH of the rows at these pointers, divided by a scale if
    `scale_ptr` is not None.
    """
    dims = START + tl.arange(0, WIDTH)
    if scale_ptr is not None:
        x = x / tl.load(scale_ptr)
    stored = encode(x, pointers.dtype.element_ty, FORMAT)
    tl.store(pointers[:, None] + dims[None, :], stored, mask=keep[:, None] & (dims < STOP)[None, :])


@triton.jit
def find_pages(
    table_ptr,
    n0,
    start,
    stop,
    num_pages,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_INSIDE: tl.constexpr,
    IS_ALIGNED: tl.constexpr = True,
    page_size=None,
):
    """The page, and the slot within the page, of BLOCK_N keys from n0 on; int64. Packed keys are
    one long page. IS_ALIGNED: n0 is a multiple of BLOCK_N. IS_INSIDE: all keys are in [start,
    stop). `page_size` is for LONG_PAGES and SHORT_PAGES.

    A key outside [start, stop) is replaced by the nearest one inside. So block_table entries and
    keys that no query may see are not read, and loads need no mask. An invalid page id is replaced
    by the last page, so that no memory outside the cache is read.
    """
    j = n0 + tl.arange(0, BLOCK_N)
    if not IS_INSIDE:
        j = tl.maximum(tl.minimum(j, stop - 1), start)
    if PAGE_SIZE == 0:
        page = tl.zeros([], tl.int64)
        slot = j
    elif PAGE_SIZE == LONG_PAGES:
        # the tile is in one page or in two, so that one division finds them
        last = n0 + BLOCK_N - 1
        if not IS_INSIDE:
            n0 = tl.maximum(tl.minimum(n0, stop - 1), start)
            last = tl.maximum(tl.minimum(last, stop - 1), start)
        entry = n0 // page_size
        second = (entry + 1) * page_size
        page = page_at(table_ptr + entry, num_pages)
        next_page = page_at(table_ptr + entry + 1, num_pages, last >= second)
        is_next = j >= second
        page = tl.where(is_next, next_page, page).to(tl.int64)
        slot = j - tl.where(is_next, second, second - page_size)
    elif PAGE_SIZE == SHORT_PAGES:
        entry = j // page_size
        page = page_at(table_ptr + entry, num_pages).to(tl.int64)
        slot = j - entry * page_size
    else:
        if PAGE_SIZE % BLOCK_N == 0 and IS_ALIGNED:  # the whole tile is in one page
            if not IS_INSIDE:
                n0 = tl.maximum(tl.minimum(n0, stop - 1), start)
            entry = n0 // PAGE_SIZE
            slot = j - entry * PAGE_SIZE
        else:
            entry = j // PAGE_SIZE
            slot = j % PAGE_SIZE
        page = page_at(table_ptr + entry, num_pages).to(tl.int64)
    return page, slot.to(tl.int64)


@triton.jit
def page_at(entry_ptr, num_pages, exists=None):
    """The pages in these entries of a block table; those that do not exist are not read."""
    page = tl.load(entry_ptr, mask=exists, other=0 if exists is not None else None)
    return tl.minimum(page.to(tl.uint32), tl.cast(num_pages - 1, tl.uint32))
