"""The systolic array: products into PSUM, and transposition."""

from typing import Any

import numpy as np

from nki_emulator.dtypes import (
    as_float32,
    bfloat16,
    float8_e4m3,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
)
from nki_emulator.enums import Engine, MatmulPerfMode
from nki_emulator.isa.operands import check_tiles, count
from nki_emulator.machine import (
    PARTITIONS,
    PSUM_BANK_BYTES,
    Violation,
    machine,
    require,
)
from nki_emulator.memory import PSUM, SBUF
from nki_emulator.tensor import NkiTensor

OPERANDS = {
    2: (float32, bfloat16, float16, float8_e4m3, float8_e5m2),
    3: (float32, bfloat16, float16, float8_e4m3, float8_e5m2),
    4: (float32, bfloat16, float16, float8_e4m3, float8_e5m2, float8_e4m3fn),
}
VECTOR_TRANSPOSE = 32


def nc_matmul(
    dst: NkiTensor,
    stationary: NkiTensor,
    moving: NkiTensor,
    is_stationary_onezero: bool = False,
    is_moving_onezero: bool = False,
    is_transpose: bool = False,
    accumulate: bool | None = None,
    tile_position: Any = (),
    tile_size: Any = (),
    perf_mode: MatmulPerfMode = MatmulPerfMode.none,
    name: str | None = None,
) -> None:
    """`dst (M, N) = stationary (K, M) transposed @ moving (K, N)`, K on the partitions."""
    current = machine()
    current.count("tensor", "nc_matmul")
    check_tiles("nc_matmul", dst, stationary, moving)
    require(dst.buffer is PSUM, "nc_matmul writes PSUM")
    require(stationary.buffer is moving.buffer is SBUF, "nc_matmul reads SBUF")
    require(not (is_transpose or tile_position or tile_size), "nc_matmul: not emulated")
    require(perf_mode is MatmulPerfMode.none, "nc_matmul: perf_mode is not emulated")
    depth, rows = stationary.shape[0], stationary.size // stationary.shape[0]
    columns = moving.size // moving.shape[0]
    current.tensor_columns += columns
    wide = dst.dtype == bfloat16
    most = 512 if current.generation < 4 else 8192 if wide else 4096
    if moving.shape[0] != depth:
        raise Violation(f"nc_matmul: {depth} and {moving.shape[0]} partitions")
    if rows > PARTITIONS:
        raise Violation(f"nc_matmul: {rows} stationary columns; at most {PARTITIONS}")
    if columns > most:
        raise Violation(f"nc_matmul: {columns} moving columns; at most {most}")
    if dst.shape[0] != rows or dst.size != rows * columns:
        raise Violation(f"nc_matmul: ({rows}, {columns}) into {dst.shape}")
    for operand in (stationary, moving):
        if operand.dtype not in OPERANDS[current.generation]:
            raise Violation(
                f"nc_matmul: operand of {operand.dtype} on generation {current.generation}"
            )
    require(
        {stationary.dtype, moving.dtype} != {float8_e4m3, float8_e4m3fn},
        "nc_matmul: float8_e4m3 with float8_e4m3fn",
    )
    if (stationary.dtype == float32) != (moving.dtype == float32):
        raise Violation(
            f"nc_matmul: {stationary.dtype} with {moving.dtype}; float32 goes with float32 only"
        )
    if dst.dtype != float32 and not (wide and current.generation >= 4):
        raise Violation(f"nc_matmul: a {dst.dtype} result on generation {current.generation}")
    if current.generation < 4:
        _check_one_bank("nc_matmul", dst)
    x = as_float32(stationary.read()).reshape(depth, rows)
    y = as_float32(moving.read()).reshape(depth, columns)
    with np.errstate(all="ignore"):
        product = (x.T @ y).reshape(dst.shape)
    assert dst.storage.started is not None
    if accumulate is None or accumulate:
        started = int(np.count_nonzero(dst.marks(dst.storage.started, dst.start())))
        accumulate = bool(accumulate) or started > 0
        require(
            not accumulate or started == dst.size,
            "nc_matmul: accumulates on PSUM that no product has started",
        )
    if accumulate:
        product = product + as_float32(dst.read())
    dst.write(product, product=True)


def _check_one_bank(instruction: str, dst: NkiTensor) -> None:
    """A result lies within one bank of PSUM."""
    first = dst.offset % dst.storage.free_size
    last = first + sum((n - 1) * s for n, s in zip(dst.shape[1:], dst.strides[1:], strict=True))
    item = dst.dtype.itemsize
    if first * item // PSUM_BANK_BYTES != ((last + 1) * item - 1) // PSUM_BANK_BYTES:
        raise Violation(f"{instruction}: the result crosses a PSUM bank")


def nc_transpose(
    dst: NkiTensor, data: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """`dst (F, P) = data (P, F)` transposed; free dimensions count as one."""
    if engine is Engine.unknown:
        engine = Engine.tensor if dst.buffer is PSUM else Engine.vector
    count(engine, Engine.tensor, "nc_transpose")
    check_tiles("nc_transpose", dst, data)
    rows, columns = data.shape[0], data.size // data.shape[0]
    if engine is Engine.tensor:
        machine().tensor_columns += rows  # a product with the identity
        require(
            data.buffer is SBUF and dst.buffer is PSUM,
            "nc_transpose on TensorE goes from SBUF to PSUM",
        )
        if columns > PARTITIONS:
            raise Violation(f"nc_transpose on TensorE: {columns} columns; at most 128")
        require(
            machine().generation >= 3 or dst.dtype == float32,
            "nc_transpose on TensorE of the second generation writes float32",
        )
        if data.dtype not in OPERANDS[machine().generation]:
            raise Violation(f"nc_transpose of {data.dtype}")
        if machine().generation < 4:
            _check_one_bank("nc_transpose", dst)
    else:
        if engine is not Engine.vector:
            raise Violation(f"nc_transpose: not on the {engine.name} engine")
        require(max(rows, columns) <= VECTOR_TRANSPOSE, "nc_transpose on VectorE: at most 32 x 32")
    if dst.dtype != data.dtype:
        raise Violation(f"nc_transpose: {data.dtype} into {dst.dtype}")
    if dst.shape[0] != columns or dst.size != data.size:
        raise Violation(f"nc_transpose: {data.shape} into {dst.shape}")
    dst.write(data.read().reshape(rows, columns).T.reshape(dst.shape))
