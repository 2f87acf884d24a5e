"""Which keys a row sees, and which a tile of rows must visit."""

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
    """Half-open range of the keys that some row between two positions sees."""
    start = tl.zeros_like(key_len)
    stop = key_len
    if HAS_LEFT:
        start = tl.maximum(start, first_position - left)
    if HAS_RIGHT:
        stop = tl.minimum(stop, last_position + right + 1)
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
    start = tl.zeros_like(key_len)
    stop = key_len
    if HAS_LEFT:
        start = tl.maximum(start, last_position - left)
    if HAS_RIGHT:
        stop = tl.minimum(stop, first_position + right + 1)
    return start, tl.maximum(stop, 0)


@triton.jit
def visible(position, j, in_range, left, right, HAS_LEFT: tl.constexpr, HAS_RIGHT: tl.constexpr):
    """True where the row at `position` sees key j of those in range. Rows and keys come in shapes
    that broadcast: (rows, 1) and (1, keys), or where keys are rows (1, rows) and (keys, 1).
    """
    seen = in_range & (position == position)
    if HAS_RIGHT:
        seen = seen & (j <= position + right)
    if HAS_LEFT:
        seen = seen & (j >= position - left)
    return seen


@triton.jit
def load_tail(tail_rows, exists, j, keys, strides):
    """True where the tail mask allows key j, or is not about it: it has a column for each of a
    sequence's newest keys, one for a query. Rows and keys come in shapes that broadcast.
    """
    column = j - keys.tail_start
    has_column = exists & (column >= 0) & (j < keys.key_len) & (column < strides.tail_width)
    at = column.to(tl.int64) * strides.tail_key
    return (column < 0) | (tl.load(tail_rows + at, mask=has_column, other=0) != 0)
