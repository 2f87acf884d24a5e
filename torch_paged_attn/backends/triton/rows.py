"""Reading rows of queries, keys and values: any head_dim in two powers of two, pages or packed.

A head_dim of 80 is read as 64 + 16 and one of 576 as 512 + 64: nobody pads, and no product works on
more than it must.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.formats import decode, encode


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
    rows,
    keep,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    STOP: tl.constexpr,
    MASKED: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Elements START to START + WIDTH of the rows at these offsets; 0 past STOP and if not kept."""
    dims = START + tl.arange(0, WIDTH)
    pointers = ptr + rows[:, None] + dims[None, :]
    if START + WIDTH > STOP:
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
def store_rows(
    rows,
    x,
    keep,
    START: tl.constexpr,
    WIDTH: tl.constexpr,
    STOP: tl.constexpr,
    scale_ptr,
    FORMAT: tl.constexpr,
):
    """Write elements START to START + WIDTH of the rows at these pointers, over a scale if any."""
    dims = START + tl.arange(0, WIDTH)
    if scale_ptr is not None:
        x = x / tl.load(scale_ptr)
    stored = encode(x, rows.dtype.element_ty, FORMAT)
    tl.store(rows[:, None] + dims[None, :], stored, mask=keep[:, None] & (dims < STOP)[None, :])


@triton.jit
def find_pages(
    table_ptr,
    n0,
    start,
    stop,
    num_pages,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Page and slot within it, int64, of BLOCK_N keys from n0 on. Packed keys are one long page.

    Only entries of keys in [start, stop) are read. A bad id that nobody checked reads page 0:
    wrong, but inside the cache.
    """
    offset = tl.arange(0, BLOCK_N)
    if PAGE_SIZE == 0:
        page = tl.zeros([], tl.int64)
        slot = tl.cast(n0, tl.int64) + offset
    else:
        if PAGE_SIZE % BLOCK_N == 0:  # the whole tile lies in one page
            entry = n0 // PAGE_SIZE
            slot = (n0 % PAGE_SIZE + offset).to(tl.int64)
            readable = (n0 + BLOCK_N > start) & (n0 < stop)
        else:
            j = n0 + offset
            entry = j // PAGE_SIZE
            slot = (j % PAGE_SIZE).to(tl.int64)
            readable = (j >= start) & (j < stop)
        if MASKED:
            page = tl.load(table_ptr + entry, mask=readable, other=0)
        else:
            page = tl.load(table_ptr + entry)
        page = tl.where((page >= 0) & (page < num_pages), page, 0).to(tl.int64)
    return page, slot
