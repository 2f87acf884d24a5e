"""Sums of rows as wide as a head in shared memory, of which only COLUMNS columns are computed.

The number of columns of a product is a power of two. So 192 of 256 columns are computed by two
products, of 128 and of 64 columns, and the sums are a tuple of both.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait


@gluon.constexpr_function
def _first(width, columns, part):
    """The first column of a part, and behind the last one the number of columns."""
    return (0, width if columns == width else width // 2, columns)[part]


@gluon.constexpr_function
def _size(width, columns, part):
    return _first(width, columns, part + 1) - _first(width, columns, part)


@gluon.constexpr_function
def _layout(width, columns, part):
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, _size(width, columns, part), 16])


@gluon.jit
def new_sums(ROWS: gl.constexpr, OPTIONS: gl.constexpr):
    """Sums of ROWS rows before the first product: zeros."""
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    COLUMNS: gl.constexpr = OPTIONS.COLUMNS
    first = gl.zeros([ROWS, _size(WIDTH, COLUMNS, 0)], gl.float32, _layout(WIDTH, COLUMNS, 0))
    if WIDTH == COLUMNS:
        return (first,)
    else:
        return first, gl.zeros(
            [ROWS, _size(WIDTH, COLUMNS, 1)], gl.float32, _layout(WIDTH, COLUMNS, 1)
        )


@gluon.jit
def as_operand(rows, OPTIONS: gl.constexpr):
    """Rows in registers, as `ask_for_sums` takes them."""
    return gl.convert_layout(
        rows, gl.DotOperandLayout(0, _layout(OPTIONS.WIDTH, OPTIONS.COLUMNS, 0), 2)
    )


@gluon.jit
def ask_for_sums(rows, columns, sums, OPTIONS: gl.constexpr):
    """Ask for the product of `rows`, as `as_operand` returns them, and `columns`, (depth, WIDTH) in
    shared memory, added to sums."""
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    COLUMNS: gl.constexpr = OPTIONS.COLUMNS
    if WIDTH == COLUMNS:
        return (warpgroup_mma(rows, columns, sums[0], is_async=True),)
    else:
        low = columns.slice(0, _size(WIDTH, COLUMNS, 0), dim=1)
        high = columns.slice(_first(WIDTH, COLUMNS, 1), _size(WIDTH, COLUMNS, 1), dim=1)
        # the same registers, as the other product's layout names them
        same = gl.convert_layout(rows, gl.DotOperandLayout(0, _layout(WIDTH, COLUMNS, 1), 2), True)
        first = warpgroup_mma(rows, low, sums[0], is_async=True)
        return first, warpgroup_mma(same, high, sums[1], is_async=True)


@gluon.jit
def wait_for_sums(pending, rows):
    """Wait for all products. Returns the sums, and the rows, whose registers are in use until the
    wait ends."""
    if len(pending) == 1:
        first, rows = warpgroup_mma_wait(0, deps=[pending[0], rows])
        return (first,), rows
    else:
        first, second, rows = warpgroup_mma_wait(0, deps=[pending[0], pending[1], rows])
        return (first, second), rows


@gluon.jit
def wait_for_scores_and_sums(scores, pending, rows):
    """Wait for scores that were asked for before, and for the sums, but not for one product that
    was asked for later. Returns scores, sums and rows."""
    if len(pending) == 1:
        scores, first, rows = warpgroup_mma_wait(1, deps=[scores, pending[0], rows])
        return scores, (first,), rows
    else:
        scores, first, second, rows = warpgroup_mma_wait(
            1, deps=[scores, pending[0], pending[1], rows]
        )
        return scores, (first, second), rows


@gluon.jit
def store_parts(sums, to, scale, OPTIONS: gl.constexpr):
    """Store sums times scale to shared memory, (rows, WIDTH)."""
    for i in gl.static_range(len(sums)):
        to.slice(
            _first(OPTIONS.WIDTH, OPTIONS.COLUMNS, i),
            _size(OPTIONS.WIDTH, OPTIONS.COLUMNS, i),
            dim=1,
        ).store((sums[i] * scale).to(to.dtype))


@gluon.jit
def store_sums(sums, to, seen, scale, OPTIONS: gl.constexpr):
    """Store sums times scale to shared memory, (rows, WIDTH), and 0 in rows that are not `seen`."""
    for i in gl.static_range(len(sums)):
        of_part = gl.expand_dims(gl.convert_layout(seen, gl.SliceLayout(1, sums[i].type.layout)), 1)
        part = gl.where(of_part, sums[i] * scale, 0.0)
        to.slice(
            _first(OPTIONS.WIDTH, OPTIONS.COLUMNS, i),
            _size(OPTIONS.WIDTH, OPTIONS.COLUMNS, i),
            dim=1,
        ).store(part.to(to.dtype))
