"""Causal mask, window and tail mask: which keys a row sees, and which a tile has to visit."""

import triton
import triton.language as tl


@triton.jit
def key_range(
    first_position,
    last_position,
    key_len,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Half-open range of the keys that at least one row between two positions sees."""
    start, stop = _between(first_position, last_position, key_len, left, right, HAS_LEFT, HAS_RIGHT)
    return start, tl.maximum(start, stop)


@triton.jit
def full_range(
    first_position,
    last_position,
    key_len,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """Half-open range of the keys that every row between two positions sees; it may be empty."""
    start, stop = _between(last_position, first_position, key_len, left, right, HAS_LEFT, HAS_RIGHT)
    return start, tl.maximum(stop, 0)


@triton.jit
def _between(
    left_of,
    right_of,
    key_len,
    left,
    right,
    HAS_LEFT: tl.constexpr,
    HAS_RIGHT: tl.constexpr,
):
    """The first key in the window of the row at `left_of`, and the end of the window of the row at
    `right_of`.
    """
    start = tl.zeros_like(key_len)
    stop = key_len
    if HAS_LEFT:
        start = tl.maximum(start, left_of - left)
    if HAS_RIGHT:
        stop = tl.minimum(stop, right_of + right + 1)
    return start, stop


@triton.jit
def whole_tiles(
    i_start, i_stop, full_start, full_stop, BLOCK: tl.constexpr, FIRST_PHASE: tl.constexpr,
    LAST_PHASE: tl.constexpr = 2,
):  # fmt: skip
    """Of tiles `i_start` to `i_stop` - 1 the half-open range of those of phase 1."""
    i_full = i_start
    if FIRST_PHASE == 0:
        i_full = tl.minimum(tl.maximum(tl.cdiv(full_start, BLOCK), i_start), i_stop)
    i_tail = i_full
    if LAST_PHASE == 1:
        i_tail = i_stop
    elif FIRST_PHASE < 2:
        i_tail = tl.minimum(tl.maximum(full_stop // BLOCK, i_full), i_stop)
    return i_full, i_tail


@triton.jit
def tiles_of_phase(PHASE: tl.constexpr, i_start, i_full, i_tail, i_stop):
    """Half-open range of the tiles of a phase: 1 are tiles that every row sees whole, 0 those
    before and 2 those after them.
    """
    if PHASE == 0:
        i_first = i_start
        i_last = i_full
    elif PHASE == 1:
        i_first = i_full
        i_last = i_tail
    else:
        i_first = i_tail
        i_last = i_stop
    return i_first, i_last


@triton.jit
def visible(position, j, in_range, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """True where key j is in range and visible from `position`. Rows and keys have shapes that
    broadcast: (rows, 1) and (1, keys), or (1, rows) and (keys, 1).
    """
    seen = in_range & (position == position)
    if HAS_RIGHT:
        seen = seen & (j <= position + right)
    if HAS_LEFT:
        seen = seen & (j >= position - left)
    return seen


@triton.jit
def load_tail(tail_rows, exists, j, keys, strides):
    """True where the tail mask does not hide key j. It has columns only for the newest keys of a
    sequence, as many as queries. Rows and keys have shapes that broadcast.
    """
    # `column < 0` would have LLVM pair columns of two layouts (`runtime/vector_flags.py`)
    is_older = j < keys.tail_start
    column = j - keys.tail_start
    has_column = exists & (j >= keys.tail_start) & (j < keys.key_len)
    has_column = has_column & (column < strides.tail_width)
    at = column.to(tl.int64) * strides.tail_key
    return is_older | (tl.load(tail_rows + at, mask=has_column, other=0) != 0)
