"""Boxes of rows for the tensor memory accelerator, cut off at the end of a sequence by hardware.

A tensor map bounds its axes, but a packed batch has a bound for every sequence. Two more axes with
the rows' stride and its negative (modulo 2**64) let an address be reached by a coordinate that runs
into the bound where the caller wants it to: rows from `size` on are loaded as zeros and are not
stored. This is the arithmetic of Triton's `ragged_tma`, for rows of several heads.
"""

import dataclasses
import functools

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

# the bound of the rows' axis, and of the two that have none; coordinates are 32 bits
BOUND = 2**30
ENDLESS = 2**31 - 2**16
FAR = gl.constexpr(BOUND)

# what a tensor map asks of addresses and strides, in bytes
ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class _Address:
    """What a tensor map asks of a tensor; it keeps no memory alive."""

    pointer: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.pointer

    def at(self, pointer: int) -> "_Address":
        """The same tensor at another address."""
        return _Address(pointer, self.dtype)


@functools.lru_cache(maxsize=1024)
def _tensor_map(
    pointer: int, dtype: torch.dtype, row: int, head: int, heads: int, dim: int,
    box: tuple[int, int, int],
) -> TensorDescriptor:  # fmt: skip
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
    shape = [ENDLESS, ENDLESS, BOUND, heads, dim]
    strides = [2**34 - row, row, row, head, 1]
    return TensorDescriptor(_Address(pointer, dtype), shape, strides, [1, 1, *box], layout)


def ragged_rows(x: Tensor, rows: int, heads: int, width: int) -> TensorDescriptor:
    """Boxes of (1, 1, rows, heads, width) of x, (rows, heads, dim), of any strides."""
    row, head, _ = x.stride()
    box = (rows, heads, width)
    return _tensor_map(x.data_ptr(), x.dtype, row, head, x.shape[1], x.shape[2], box)


# their names after Triton 3.6, and until then
async_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
async_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


@gluon.jit
def load_rows(desc, start, size, row, head, barrier, smem):
    """Rows [row, ...) of the `size` rows from `start` on; the barrier expects a whole box."""
    async_load(desc, [FAR, start + size, FAR - size + row, head, 0], barrier, smem)


@gluon.jit
def store_rows(desc, start, size, row, head, smem):
    """The rows of a box that lie within the `size` rows from `start` on."""
    async_store(desc, [FAR, start + size, FAR - size + row, head, 0], smem)
