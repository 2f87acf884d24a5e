"""Boxes of rows for the tensor memory accelerator, cut off at the end of a sequence by hardware.

A tensor map has one bound for each of its axes, but a packed batch has a bound for every sequence.
So a map here has two more axes, with the rows' stride and with its negative (modulo 2**64).
Coordinates on three axes give a row's address, and one of them reaches its axis' bound at the row
where the sequence ends: rows from `size` on are loaded as zeros and are not stored. This is the
arithmetic of Triton's `ragged_tma`, for rows of several heads.
"""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from triton._C import libtriton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language import _core
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from torch_paged_attn.backends.triton.runtime.launcher import fill_less
from torch_paged_attn.backends.triton.runtime.target import is_even, next_power_of_2
from torch_paged_attn.lru import LRU

# the sizes that a tensor map is told: of the rows' axis, and of the two axes without a bound;
# coordinates are 32 bits
ROW_BOUND = gl.constexpr(2**30)
NO_BOUND = 2**31 - 2**16

# a swizzle atom, the square in which the accelerator permutes 16-byte pieces: 8 rows of 128 bytes
ATOM_ROWS = gl.constexpr(8)
ATOM_WIDTH = gl.constexpr(64)

# tensor maps that are kept for tensors of one description
MOST_MAPS = 1024


@dataclasses.dataclass(frozen=True)
class _Address:
    """The part of a tensor that a tensor map needs; it keeps no memory alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer


class Boxes:
    """Boxes of tensors of one description; `at` makes the tensor map for a tensor. `box`: the shape
    that is loaded at a time. `place`: its shape in shared memory as Triton has it, of powers of
    two, of which a box may fill a part.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        shape: tuple[int, ...],
        strides: tuple[int, ...],
        box: tuple[int, ...],
        swizzle: int = 128,
        place: tuple[int, ...] | None = None,
    ) -> None:
        self._dtype, self._shape, self._strides, self._box = dtype, shape, strides, box
        self._place = place or box
        self._layout = gl.NVMMASharedLayout(
            swizzle_byte_width=swizzle, element_bitwidth=8 * dtype.itemsize, rank=len(box)
        )
        self._maps = LRU(MOST_MAPS)

    def at(self, address: int) -> TensorDescriptor:
        """The tensor map for a tensor at an address."""
        found = self._maps.get(address)
        if found is None:
            groups = [*self._shape], [*self._strides], [*self._place]
            found = TensorDescriptor(_Address(address, self._dtype), *groups, self._layout)
            if self._place != self._box:
                fill_less(found, self._box)
            self._maps.put(address, found)
        return found


# calls of other sizes share boxes: these do not depend on the number of tokens or pages
_boxes = functools.lru_cache(maxsize=256)(Boxes)


def ragged_rows(x: Tensor, rows: int, heads: int, width: int) -> Boxes:
    """Boxes of (1, 1, rows, heads, width) of tensors like x, (rows, heads, dim), of any strides. If
    `heads` is no power of two, a box fills part of its place, row after row."""
    row, head, _ = x.stride()
    shape = NO_BOUND, NO_BOUND, ROW_BOUND.value, x.shape[1], x.shape[2]
    strides = 2**34 - row, row, row, head, 1
    swizzle = min(128, width * x.itemsize)
    place = None if is_even(heads) else (1, 1, next_power_of_2(rows * heads), 1, width)
    return _boxes(x.dtype, shape, strides, (1, 1, rows, heads, width), swizzle, place)


def atoms_of_rows(x: Tensor, rows: int, width: int) -> Boxes:
    """Boxes of `rows` rows of one head of tensors like x, (rows, heads, dim), none of which is cut
    off.

    A box has the shape (1, rows / 8, width / 64, 8, 64) and lies in shared memory atom by atom. A
    box of whole rows would be loaded in pieces of 64 columns, which lie far apart where the box is
    a part of a tile.
    """
    row, head, _ = x.stride()
    tall, wide = ATOM_ROWS.value, ATOM_WIDTH.value
    shape = x.shape[1], ROW_BOUND.value, x.shape[2] // wide, tall, wide
    strides = head, tall * row, wide, row, 1
    return _boxes(x.dtype, shape, strides, (1, rows // tall, width // wide, tall, wide))


def plain_rows(dtype: torch.dtype, width: int, rows: int = 1) -> Boxes:
    """Boxes of so many rows of (rows, width) contiguous tensors."""
    return _boxes(dtype, (ROW_BOUND.value, width), (width, 1), (rows, width), swizzle=0)


# their names after Triton 3.6, and until then
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
# the same of loads without a tensor map; 3.9 has the old name, too, which raises
async_load_pointers = (
    getattr(async_copy, "async_load", None) or async_copy.async_copy_global_to_shared
)


# Triton 3.6 has no function that has the accelerator add, but its builder has one
_builder = getattr(getattr(libtriton, "gluon_ir", None), "GluonOpBuilder", None)
_kinds: Any = getattr(libtriton.ir, "DESCRIPTOR_REDUCE_KIND", None)
_builtin: Any = getattr(_core, "builtin", None)
HAS_ADD = bool(_kinds and _builtin and hasattr(_builder, "create_async_tma_reduce"))

if HAS_ADD:

    @_builtin
    def _async_add(desc, coord, smem, _semantic=None):
        """Add a box of shared memory to memory."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(_kinds.ADD, desc.handle, coord, smem.handle)


@gluon.constexpr_function
def is_in_atoms(shape):
    """Whether a box, or a tile of boxes, is one of `atoms_of_rows`."""
    return shape[-2] == ATOM_ROWS.value


@gluon.constexpr_function
def rows_of_box(box):
    """Rows of keys in a box."""
    return box[1] * box[3] if is_in_atoms(box) else box[2]


@gluon.constexpr_function
def boxes(count, box):
    """The shape of several boxes."""
    return [count, *box]


@gluon.constexpr_function
def bytes_of_rows(block_type, rows):
    """Bytes of `rows` rows, token by head, of a box of `ragged_rows`."""
    shape = block_type.shape
    return block_type.nbytes // (shape[2] * shape[3]) * rows


@gluon.constexpr_function
def shape_of_tiles(stages, box, rows):
    """The shape of `stages` tiles of `rows` rows, each made of boxes."""
    tile = [*box]
    if is_in_atoms(box):
        tile[1] = rows // ATOM_ROWS.value
    else:
        tile[2] = rows
    return [stages, *tile]


@gluon.jit
def as_matrix(tile, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """A tile of boxes in shared memory, seen as (ROWS, WIDTH)."""
    if is_in_atoms(tile.shape):
        atoms = tile.reshape([ROWS // ATOM_ROWS, WIDTH // ATOM_WIDTH, ATOM_ROWS, ATOM_WIDTH])
        tile = atoms.permute((0, 2, 1, 3))
    return tile.reshape([ROWS, WIDTH])


@gluon.jit
def load_rows(desc, start, size, row, head, barrier, smem, column=0):
    """Load a box: rows [row, ...) of the `size` rows from `start` on, then zeros, which count among
    the bytes that the barrier expects."""
    at = [ROW_BOUND, start + size, ROW_BOUND - size + row, head, column]
    async_load(desc, at, barrier, smem)


@gluon.jit
def load_fill(desc, pipeline, n, start, size, row, head):
    """Load a box as fill n of a pipeline, once there is room for it; see `load_rows`."""
    pipeline.producer_acquire(n)
    barrier = pipeline.full_barrier(n)
    mbarrier.expect(barrier, desc.block_type.nbytes)
    load_rows(desc, start, size, row, head, barrier, pipeline.tile(n))


@gluon.jit
def store_rows(desc, start, size, row, head, smem, column=0):
    """Store a box as rows [row, ...) of the `size` rows from `start` on; the rest is dropped."""
    async_store(desc, [ROW_BOUND, start + size, ROW_BOUND - size + row, head, column], smem)


@gluon.jit
def add_box(desc, row, smem):
    """Add a box of `plain_rows` to rows [row, ...)."""
    _async_add(desc, [row, 0], smem)


@gluon.jit
def start_of_page(desc, page, page_rows, in_page):
    """The coordinate of a slot of a page, for `load_page`; pages are `page_rows` rows apart."""
    UNIT: gl.constexpr = ATOM_ROWS if is_in_atoms(desc.block_shape) else 1
    return page * (page_rows // UNIT) + in_page // UNIT


@gluon.jit
def load_page(desc, i, start, head, barrier, tile):
    """Load box i of a tile, all of its rows, from a slot of a page on."""
    if is_in_atoms(desc.block_shape):
        ATOMS: gl.constexpr = desc.block_shape[1]
        box = tile.slice(i * ATOMS, ATOMS, dim=1)
        async_load(desc, [head, start, 0, 0, 0], barrier, box)
    else:
        ROWS: gl.constexpr = desc.block_shape[2]
        load_rows(desc, start, ROWS, 0, head, barrier, tile.slice(i * ROWS, ROWS, dim=2))
