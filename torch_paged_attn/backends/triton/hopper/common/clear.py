"""Rows of a tile in shared memory that nobody sees become zeros: 0 times NaN would be NaN."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_paged_attn.backends.triton.hopper.common.results import seen_as


@gluon.jit
def clear_before(tile, first):
    """Zero the rows of a tile before row `first`, which nobody sees: 0 times NaN would be NaN."""
    STEP: gl.constexpr = 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(tile.shape[0] // STEP):
        rows = tile.slice(i * STEP, STEP)
        r = i * STEP + gl.arange(0, STEP, gl.SliceLayout(1, layout))
        rows.store(gl.where(gl.expand_dims(r >= first, 1), rows.load(layout), 0.0))
    fence_async_shared()


@gluon.jit
def clear_from(tile, first):
    """Zero a tile of swizzle atoms from a row on, for the same reason. The row is negative where
    the tile lies past all keys."""
    ATOMS: gl.constexpr = tile.shape[1]
    ACROSS: gl.constexpr = tile.shape[2]
    ROWS: gl.constexpr = tile.shape[3]
    WIDTH: gl.constexpr = tile.shape[4]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    apart: gl.constexpr = [ATOMS, 1, 1, ACROSS, ROWS, WIDTH]
    swizzled: gl.constexpr = tile.layout
    r = gl.arange(0, ACROSS * ROWS, gl.SliceLayout(1, layout))
    for i in range(gl.maximum(first, 0) // ROWS, ATOMS):
        rows = seen_as(tile, apart, swizzled).index(i).reshape([ACROSS * ROWS, WIDTH])
        is_seen = gl.expand_dims(i * ROWS + r % ROWS < first, 1)
        rows.store(gl.where(is_seen, rows.load(layout), 0.0))
    fence_async_shared()
