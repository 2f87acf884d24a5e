"""`nki.language`: allocation, slices, loops, and the names of types and operations."""

import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nki_emulator.alu import (
    add,
    bitwise_and,
    bitwise_or,
    bitwise_xor,
    copy,
    equal,
    exp,
    greater,
    greater_equal,
    left_shift,
    less,
    less_equal,
    log,
    logical_and,
    logical_or,
    maximum,
    minimum,
    multiply,
    not_equal,
    right_shift,
    square,
    subtract,
    tanh,
)
from nki_emulator.dtypes import (
    bfloat16,
    float8_e4m3,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    int8,
    int32,
    is_float,
    uint8,
    uint16,
    uint32,
)
from nki_emulator.machine import (
    PARTITIONS,
    PSUM_BANK_BYTES,
    Violation,
    machine,
    require,
)
from nki_emulator.memory import MemoryRegion
from nki_emulator.registers import VirtualRegister
from nki_emulator.tensor import NkiTensor, allocate, ds

__all__ = [
    "NKIObject",
    "add",
    "bfloat16",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "copy",
    "ds",
    "equal",
    "exp",
    "float8_e4m3",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "fori_loop",
    "greater",
    "greater_equal",
    "hbm",
    "int8",
    "int32",
    "left_shift",
    "less",
    "less_equal",
    "log",
    "logical_and",
    "logical_or",
    "maximum",
    "minimum",
    "multiply",
    "ndarray",
    "not_equal",
    "num_programs",
    "private_hbm",
    "program_id",
    "psum",
    "right_shift",
    "sbuf",
    "shared_hbm",
    "shared_identity_matrix",
    "square",
    "subtract",
    "tanh",
    "tile_size",
    "uint8",
    "uint16",
    "uint32",
]


class NKIObject:
    """What a class derives from whose instances kernels take, make and pass on."""


sbuf = MemoryRegion.sbuf
psum = MemoryRegion.psum
hbm = private_hbm = MemoryRegion.private_hbm
shared_hbm = MemoryRegion.shared_hbm

tile_size = types.SimpleNamespace(
    pmax=PARTITIONS,
    gemm_stationary_fmax=128,
    gemm_moving_fmax=512,
    psum_bank_fmax=PSUM_BANK_BYTES // 4,
    psum_bank_fmax_bytes=PSUM_BANK_BYTES,
)


def ndarray(
    shape: Sequence[int], dtype: Any, buffer: Any = sbuf, name: str = "", address: Any = None
) -> NkiTensor:
    """A tensor that holds nothing yet. Programs of one logical core share `shared_hbm`."""
    if not isinstance(buffer, MemoryRegion):
        raise Violation(f"buffer is {buffer!r}; allowed: nl.sbuf, nl.psum, …")
    for n in shape:
        if not isinstance(n, int) or n <= 0:
            raise Violation(f"a tensor of shape {tuple(shape)}")
    current = machine()
    if buffer is not shared_hbm or current.num_programs == 1:
        return allocate(shape, dtype, buffer)
    place, current.num_shared = current.num_shared, current.num_shared + 1
    if place == len(current.shared):
        current.shared.append(allocate(shape, dtype, buffer))
    tensor: NkiTensor = current.shared[place]
    require(
        tensor.shape == tuple(shape) and tensor.dtype == np.dtype(dtype),
        f"programs differ in shared_hbm allocation {place}: {tensor.shape}, {tuple(shape)}",
    )
    return tensor


def shared_identity_matrix(n: int, dtype: Any = uint8, dst: NkiTensor | None = None) -> NkiTensor:
    """The (n, n) identity in SBUF."""
    tile = ndarray((n, n), dtype) if dst is None else dst
    one = np.eye(n, dtype=np.float32 if is_float(tile.dtype) else tile.dtype)
    tile.write(one)
    return tile


def program_id(axis: int = 0) -> int:
    """Which physical core of the logical one runs this."""
    require(axis == 0, "a grid has one axis")
    return machine().program_id


def num_programs(axes: int = 0) -> int:
    """How many physical cores the logical one has."""
    require(axes == 0, "a grid has one axis")
    return machine().num_programs


def fori_loop(lower: Any, upper: Any, body_fun: Callable, step: int = 1) -> None:
    """`body_fun(i)` for a register i that it may only read; its tiles do not outlive it."""
    require(isinstance(step, int) and step > 0, f"step {step}; allowed: a positive constant")
    first, stop = (b.known() if isinstance(b, VirtualRegister) else b for b in (lower, upper))
    current = machine()
    before = dict(current.live)
    trips = range(first, stop, step)
    current.trips.setdefault(current.program_id, []).append(len(trips))
    for i in trips:
        require(body_fun(VirtualRegister(i, read_only=True)) is None, "a loop's body returns None")
        require(current.live == before, "a tile allocated in a loop's body outlives it")
