"""The scalar engine: functions of one variable, with a sum over the free dimensions on the way."""

from typing import Any

import numpy as np

from nki_emulator.alu import Alu, Function, add
from nki_emulator.dtypes import as_float32
from nki_emulator.enums import ReduceCommand
from nki_emulator.isa.operands import (
    check_same_size,
    check_tiles,
    number,
)
from nki_emulator.machine import PARTITIONS, Violation, machine, require
from nki_emulator.tensor import NkiTensor

RESETS = (ReduceCommand.reset, ReduceCommand.reset_reduce)
REDUCES = (ReduceCommand.reduce, ReduceCommand.reset_reduce)


def activation(
    dst: NkiTensor,
    op: Function,
    data: NkiTensor,
    bias: Any = None,
    scale: Any = 1.0,
    reduce_op: Alu | None = None,
    reduce_res: NkiTensor | None = None,
    reduce_cmd: ReduceCommand = ReduceCommand.idle,
    name: str | None = None,
) -> None:
    """`op(data * scale + bias)`; its sums per partition stay in registers between calls."""
    current = machine()
    current.count("scalar", "activation")
    check_tiles("activation", dst, data)
    check_same_size("activation", dst, data)
    if not isinstance(op, Function):
        raise Violation(f"activation: {op} is not a function of ScalarE")
    require(
        bias is None or isinstance(bias, NkiTensor) or current.generation >= 3,
        "activation: the second generation takes its bias from a tile",
    )
    require(reduce_op is None or reduce_op is add, "activation: reduce_op is nl.add")
    require(reduce_cmd is not ReduceCommand.load_reduce, "activation: load_reduce is not emulated")
    with np.errstate(all="ignore"):
        x = as_float32(data.read()) * number("activation", scale, data)
        if bias is not None:
            x = x + number("activation", bias, data, any_float=True)
        if op.is_limited and not (np.isnan(x) | ((x >= op.smallest) & (x <= op.largest))).all():
            raise Violation(f"activation: {op.name} outside [{op.smallest}, {op.largest}]")
        values = as_float32(op.compute(x))
    dst.write(values.reshape(dst.shape))
    rows = data.shape[0]
    if reduce_cmd in RESETS:
        current.reduce_registers = np.zeros(PARTITIONS, np.float32)
    if reduce_cmd in REDUCES:
        require(reduce_op is add, "activation: a reduction needs reduce_op")
        require(current.reduce_registers is not None, "activation: registers were never reset")
        current.reduce_registers[:rows] += values.reshape(rows, -1).sum(1)
    if reduce_res is not None:
        check_tiles("activation", reduce_res)
        require(reduce_cmd is not ReduceCommand.idle, "activation: reduce_res without a command")
        if reduce_res.shape != (rows, 1):
            raise Violation(f"activation: reduce_res {reduce_res.shape}")
        reduce_res.write(current.reduce_registers[:rows].reshape(rows, 1))
