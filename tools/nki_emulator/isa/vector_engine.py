"""The vector engine: elementwise operations and reductions, computed in float32."""

from typing import Any

import numpy as np

from nki_emulator.alu import (
    Alu,
    equal,
    greater,
    greater_equal,
    less,
    less_equal,
    maximum,
)
from nki_emulator.dtypes import as_float32, float8_e4m3fn, float32, int32, is_float, uint32
from nki_emulator.enums import Engine, ReduceCommand
from nki_emulator.isa.operands import (
    check_engine,
    check_not_both_in_psum,
    check_same_size,
    check_tiles,
    count,
    number,
)
from nki_emulator.machine import Violation, machine, require
from nki_emulator.memory import SBUF
from nki_emulator.tensor import NkiTensor

WHOLE_NUMBERS = (int32, uint32)
ENGINES = (Engine.vector, Engine.gpsimd)
# float32 counts exactly to here
EXACT = 2**24
FP32_MIN = float(np.finfo(np.float32).min)


def _apply(op: Alu, a: Any, b: Any, reverse: bool = False) -> np.ndarray:
    """`a op b`, or `b op a`."""
    with np.errstate(all="ignore"):
        return op.compute(b, a) if reverse else op.compute(a, b)


def _unsigned(size: int) -> np.dtype:
    """The type of unsigned integers of `size` bytes."""
    return np.dtype(f"u{size}")


def _bitwise(op: Alu, a: np.ndarray, b: Any, dtype: np.dtype) -> np.ndarray:
    """Bit patterns: shifts are logical, and what leaves the width is lost."""
    wide = _unsigned(
        max(a.itemsize, b.itemsize if isinstance(b, np.ndarray) else 4, dtype.itemsize)
    )
    if isinstance(b, np.ndarray):
        b = b.view(_unsigned(b.itemsize)).astype(wide, copy=False)
    else:
        b = wide.type(b & 0xFFFFFFFF)
    bits = op.compute(a.view(_unsigned(a.itemsize)).astype(wide, copy=False), b)
    return bits.astype(_unsigned(dtype.itemsize), copy=False).view(dtype)


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
    exact = not op.is_bitwise and all(t.dtype in WHOLE_NUMBERS and t.buffer is SBUF for t in tiles)
    count(engine, Engine.gpsimd if exact else Engine.vector, "tensor_tensor")
    a, b = (t.read().reshape(dst.shape) for t in (data1, data2))
    if op.is_bitwise:
        if any(is_float(t.dtype) for t in tiles):
            raise Violation(f"tensor_tensor: {op.name} of floats")
        dst.write(_bitwise(op, a, b, dst.dtype))
    elif exact:
        whole = _apply(op, a.astype(np.int64), b.astype(np.int64))
        limits = np.iinfo(dst.dtype)
        if whole.min() < limits.min or whole.max() > limits.max:
            raise Violation(
                f"tensor_tensor: {op.name} overflows {dst.dtype}, which is documented nowhere"
            )
        dst.write(whole.astype(dst.dtype))
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
    machine().count("vector", "tensor_scalar")
    check_tiles("tensor_scalar", dst, data)
    check_same_size("tensor_scalar", dst, data)
    # GpSimd computes square roots alone here; ScalarE's few operations are not emulated
    check_engine("tensor_scalar", engine, (Engine.vector,), dst, data)
    steps = [(op0, operand0, reverse0)]
    if op1 is not None:
        require(op0.is_bitwise == op1.is_bitwise, "tensor_scalar: bitwise with arithmetic")
        steps.append((op1, operand1, reverse1))
    values = data.read()
    if op0.is_bitwise:
        if is_float(data.dtype) or is_float(dst.dtype):
            raise Violation(f"tensor_scalar: {op0.name} of floats")
        for op, operand, reverse in steps:
            if not isinstance(operand, int) or reverse:
                raise Violation(f"tensor_scalar: {op.name} with {operand!r} on the right")
            values = _bitwise(op, values, operand, data.dtype)
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
    if axes != tuple(range(data.ndim - len(axes), data.ndim)) or 0 in axes:
        raise Violation(
            f"tensor_reduce over {axes} of {data.ndim} dimensions; allowed: the last free ones"
        )
    if not op.reduces:
        raise Violation(f"tensor_reduce: {op.name} does not reduce")
    values = op.compute.reduce(as_float32(data.read()), axis=axes)
    if dst.shape[0] != data.shape[0] or dst.size != values.size:
        raise Violation(f"tensor_reduce: {values.shape} into {dst.shape}")
    dst.write((-values if negate else values).reshape(dst.shape))


def reciprocal(dst: NkiTensor, data: NkiTensor, name: str | None = None) -> None:
    """`1 / data`."""
    machine().count("vector", "reciprocal")
    check_tiles("reciprocal", dst, data)
    check_same_size("reciprocal", dst, data)
    with np.errstate(all="ignore"):
        dst.write((np.float32(1.0) / as_float32(data.read())).reshape(dst.shape))


def _reduce(
    instruction: str, command: ReduceCommand, result: NkiTensor | None, values: np.ndarray
) -> None:
    """Store what was reduced; of the commands only `reset_reduce` and `idle` are emulated."""
    if command not in (ReduceCommand.reset_reduce, ReduceCommand.idle):
        raise Violation(f"{instruction}: {command.name} is not emulated")
    if result is not None:
        if command is not ReduceCommand.reset_reduce:
            raise Violation(f"{instruction}: reduce_res without it")
        check_tiles(instruction, result)
        if result.shape != (len(values), 1):
            raise Violation(f"{instruction}: reduce_res {result.shape}")
        result.write(values.reshape(-1, 1))


def range_select(
    dst: NkiTensor,
    on_true_tile: NkiTensor,
    comp_op0: Alu,
    comp_op1: Alu,
    bound0: NkiTensor,
    bound1: NkiTensor,
    reduce_cmd: ReduceCommand = ReduceCommand.reset_reduce,
    reduce_res: NkiTensor | None = None,
    reduce_op: Alu = maximum,
    range_start: int = 0,
    on_false_value: float = FP32_MIN,
    name: str | None = None,
) -> None:
    """Keep the elements whose place in the row is in bounds; the others become FP32_MIN."""
    machine().count("vector", "range_select")
    require(machine().generation >= 3, "range_select came with the third generation")
    check_tiles("range_select", dst, on_true_tile)
    check_same_size("range_select", dst, on_true_tile)
    if not is_float(on_true_tile.dtype):
        raise Violation(f"range_select of {on_true_tile.dtype}")
    require(on_false_value == FP32_MIN, "range_select: on_false_value is FP32_MIN")
    require(reduce_op is maximum, "range_select: reduce_op is nl.maximum")
    comparisons = (equal, less, less_equal, greater, greater_equal)
    require(
        any(comp_op0 is c for c in comparisons) and any(comp_op1 is c for c in comparisons),
        "range_select: comp_op0 and comp_op1 are comparisons",
    )
    rows = on_true_tile.shape[0]
    values = as_float32(on_true_tile.read()).reshape(rows, -1)
    if not (isinstance(range_start, int) and 0 <= range_start <= EXACT - values.shape[1]):
        raise Violation(
            f"range_select from {range_start!r} on; allowed: constants, and places below 2**24"
        )
    require(
        reduce_res is None or dst.dtype == float32 or reduce_res.dtype == float32,
        "range_select: the maximum of rounded values is -inf; allowed: reduce_res of float32",
    )
    place = np.arange(range_start, range_start + values.shape[1], dtype=np.float32)[None]
    low, high = (
        number("range_select", bound, on_true_tile).reshape(rows, 1) for bound in (bound0, bound1)
    )
    kept = _apply(comp_op0, place, low).astype(bool) & _apply(comp_op1, place, high).astype(bool)
    selected = np.where(kept, values, np.float32(FP32_MIN))
    dst.write(selected.reshape(dst.shape))
    _reduce("range_select", reduce_cmd, reduce_res, selected.max(1))


def exponential(
    dst: NkiTensor,
    src: NkiTensor,
    max_value: Any = 0.0,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCommand = ReduceCommand.idle,
    reduce_init: Any = 0.0,
    name: str | None = None,
) -> None:
    """`exp(src - max_value)` on VectorE, and its sum over the free dimensions."""
    machine().count("vector", "exponential")
    require(machine().generation >= 4, "exponential came with the fourth generation")
    check_tiles("exponential", dst, src)
    check_same_size("exponential", dst, src)
    if dst.dtype in (uint32, float8_e4m3fn) or src.dtype == float8_e4m3fn:
        raise Violation(f"exponential: {src.dtype} into {dst.dtype}")
    require(
        reduce_init == 0.0 or reduce_cmd is ReduceCommand.load_reduce,
        "exponential: reduce_init without load_reduce",
    )
    with np.errstate(all="ignore"):
        values = np.exp(as_float32(src.read()) - number("exponential", max_value, src))
    dst.write(values.reshape(dst.shape))
    _reduce("exponential", reduce_cmd, reduce_res, values.reshape(len(values), -1).sum(1))
