"""The vector engine: elementwise operations and reductions, computed in float32."""

from typing import Any

import numpy as np

from torch_paged_attn.testing.nki_emulator.alu import Alu
from torch_paged_attn.testing.nki_emulator.dtypes import as_float32, int32, is_float, uint32
from torch_paged_attn.testing.nki_emulator.enums import Engine
from torch_paged_attn.testing.nki_emulator.isa.operands import (
    check_engine,
    check_not_both_in_psum,
    check_same_size,
    check_tiles,
    count,
    number,
)
from torch_paged_attn.testing.nki_emulator.machine import machine, require
from torch_paged_attn.testing.nki_emulator.memory import MemoryRegion
from torch_paged_attn.testing.nki_emulator.tensor import NkiTensor

WHOLE_NUMBERS = (int32, uint32)
ENGINES = (Engine.vector, Engine.gpsimd)


def _apply(op: Alu, a: Any, b: Any, reverse: bool = False) -> np.ndarray:
    with np.errstate(all="ignore"):
        return op.compute(b, a) if reverse else op.compute(a, b)


def tensor_tensor(
    dst: NkiTensor,
    data1: NkiTensor,
    data2: NkiTensor,
    op: Alu,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """`data1 op data2`. GpSimd computes 32-bit integers exactly, everything else is float32."""
    tiles = (dst, data1, data2)
    check_tiles("tensor_tensor", *tiles)
    check_same_size("tensor_tensor", *tiles)
    check_not_both_in_psum("tensor_tensor", data1, data2)
    check_engine("tensor_tensor", engine, ENGINES, *tiles)
    exact = all(t.dtype in WHOLE_NUMBERS and t.buffer is MemoryRegion.sbuf for t in tiles)
    count(engine, Engine.gpsimd if exact else Engine.vector, "tensor_tensor")
    a, b = (t.read().reshape(dst.shape) for t in (data1, data2))
    if op.is_bitwise:
        require(not any(is_float(t.dtype) for t in tiles), f"tensor_tensor: {op.name} of floats")
    if op.is_bitwise or exact:
        dst.write(_apply(op, a.astype(np.int64), b.astype(np.int64)))
    else:
        dst.write(_apply(op, as_float32(a), as_float32(b)))


def tensor_scalar(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Alu,
    operand0: Any,
    reverse0: bool = False,
    op1: Alu | None = None,
    operand1: Any = None,
    reverse1: bool = False,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """`(data op0 operand0) op1 operand1`, operands constant or one float32 a partition."""
    count(engine, Engine.vector, "tensor_scalar")
    check_tiles("tensor_scalar", dst, data)
    check_same_size("tensor_scalar", dst, data)
    check_engine("tensor_scalar", engine, ENGINES, dst, data)
    steps = [(op0, operand0, reverse0)]
    if op1 is not None:
        require(op0.is_bitwise == op1.is_bitwise, "tensor_scalar: bitwise with arithmetic")
        steps.append((op1, operand1, reverse1))
    values = data.read()
    if op0.is_bitwise:
        require(
            not is_float(data.dtype) and not is_float(dst.dtype),
            f"tensor_scalar: {op0.name} of floats",
        )
        values = values.astype(np.int64)
        for op, operand, reverse in steps:
            require(isinstance(operand, int), f"tensor_scalar: {op.name} with a {type(operand)}")
            values = _apply(op, values, operand, reverse)
    else:
        values = as_float32(values)
        for op, operand, reverse in steps:
            values = _apply(op, values, number("tensor_scalar", operand, data), reverse)
    dst.write(values.reshape(dst.shape))


def scalar_tensor_tensor(
    dst: NkiTensor,
    data: NkiTensor,
    op0: Alu,
    operand0: Any,
    op1: Alu,
    operand1: NkiTensor,
    reverse0: bool = False,
    reverse1: bool = False,
    name: str | None = None,
) -> None:
    """`(data op0 operand0) op1 operand1`: a constant or one number a partition, then a tile."""
    machine().count("vector", "scalar_tensor_tensor")
    check_tiles("scalar_tensor_tensor", dst, data, operand1)
    check_same_size("scalar_tensor_tensor", dst, data, operand1)
    check_not_both_in_psum("scalar_tensor_tensor", data, operand1)
    require(not (op0.is_bitwise or op1.is_bitwise), "scalar_tensor_tensor is arithmetic only")
    first = number("scalar_tensor_tensor", operand0, data, any_float=True)
    values = _apply(op0, as_float32(data.read()), first, reverse0)
    second = as_float32(operand1.read()).reshape(values.shape)
    dst.write(_apply(op1, values, second, reverse1).reshape(dst.shape))


def tensor_reduce(
    dst: NkiTensor,
    op: Alu,
    data: NkiTensor,
    axis: int | tuple[int, ...],
    negate: bool = False,
    keepdims: bool = False,
    name: str | None = None,
) -> None:
    """Reduce the last free dimensions."""
    machine().count("vector", "tensor_reduce")
    check_tiles("tensor_reduce", dst, data)
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    require(
        axes == tuple(range(data.ndim - len(axes), data.ndim)) and 0 not in axes,
        f"tensor_reduce over {axes} of {data.ndim} dimensions; allowed: the last free ones",
    )
    require(op.reduces, f"tensor_reduce: {op.name} does not reduce")
    values = op.compute.reduce(as_float32(data.read()), axis=axes)
    require(
        dst.shape[0] == data.shape[0] and dst.size == values.size,
        f"tensor_reduce: {values.shape} into {dst.shape}",
    )
    dst.write((-values if negate else values).reshape(dst.shape))


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """`1 / data`."""
    machine().count("vector", "reciprocal")
    check_tiles("reciprocal", dst, data)
    check_same_size("reciprocal", dst, data)
    with np.errstate(all="ignore"):
        dst.write((np.float32(1.0) / as_float32(data.read())).reshape(dst.shape))
