"""Copies, constants and counters within the chip."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_emulator.dtypes import is_float, uint8, uint16, uint32
from nki_emulator.enums import Engine
from nki_emulator.isa.operands import (
    check_engine,
    check_not_both_in_psum,
    check_same_size,
    check_tiles,
    count,
)
from nki_emulator.machine import Violation, machine, require
from nki_emulator.memory import SBUF
from nki_emulator.tensor import NkiTensor

PREDICATES = (uint8, uint16, uint32)
COPIES = (Engine.vector, Engine.scalar, Engine.gpsimd)


def tensor_copy(
    dst: NkiTensor, src: NkiTensor, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """`dst = src`, bit for bit where the types are equal."""
    count(engine, Engine.vector, "tensor_copy")
    check_tiles("tensor_copy", dst, src)
    check_same_size("tensor_copy", dst, src)
    check_engine("tensor_copy", engine, COPIES, dst, src)
    require(
        engine is not Engine.scalar or machine().generation >= 3,
        "tensor_copy: ScalarE copies from the third generation on",
    )
    dst.write(src.read().reshape(dst.shape))


def memset(
    dst: NkiTensor, value: Any, engine: Engine = Engine.unknown, name: str | None = None
) -> None:
    """Fill with a constant of the tile's kind: a float for floats, an int for integers."""
    count(engine, Engine.vector, "memset")
    check_tiles("memset", dst)
    check_engine("memset", engine, (Engine.vector, Engine.gpsimd), dst)
    kind = float if is_float(dst.dtype) else int
    if not isinstance(value, kind):
        raise Violation(f"memset of {dst.dtype} with a {type(value).__name__}")
    dst.write(np.full(dst.shape, value, np.float32 if kind is float else np.int64))


def tensor_copy_predicated(
    dst: NkiTensor,
    src: Any,
    predicate: NkiTensor,
    reverse_pred: bool = False,
    name: str | None = None,
) -> None:
    """`dst = src` where the predicate is not 0 (is 0, if reversed); the rest stays as it was."""
    machine().count("vector", "tensor_copy_predicated")
    check_tiles("tensor_copy_predicated", dst, predicate)
    check_same_size("tensor_copy_predicated", dst, predicate)
    if predicate.dtype not in PREDICATES:
        raise Violation(
            f"tensor_copy_predicated: a predicate of {predicate.dtype}; allowed: uint8, uint16,"
            " uint32"
        )
    require(
        not (reverse_pred and isinstance(src, NkiTensor)),
        "tensor_copy_predicated: reverse_pred with a tensor; allowed with a scalar",
    )
    chosen = (predicate.read().reshape(dst.shape) != 0) != reverse_pred
    if isinstance(src, NkiTensor):
        check_tiles("tensor_copy_predicated", src)
        check_same_size("tensor_copy_predicated", dst, src)
        check_not_both_in_psum("tensor_copy_predicated", src, predicate)
        if src.dtype != dst.dtype:
            raise Violation(f"tensor_copy_predicated: {src.dtype} into {dst.dtype}")
        values = src.read().reshape(dst.shape)
    else:
        kind = float if is_float(dst.dtype) else int
        if not isinstance(src, kind):
            raise Violation(f"tensor_copy_predicated: {type(src).__name__} into {dst.dtype}")
        values = np.full(dst.shape, src, np.float32 if kind is float else np.int64)
    dst.write(values, chosen)


def iota(
    dst: NkiTensor,
    pattern: Sequence[Sequence[int]],
    offset: int = 0,
    channel_multiplier: int = 0,
    name: str | None = None,
) -> None:
    """`offset + partition * channel_multiplier + sum(index * step)` over `[[step, count], ...]`."""
    machine().count("gpsimd", "iota")
    check_tiles("iota", dst)
    require(dst.buffer is SBUF, "iota writes SBUF")
    require(len(pattern) <= 4, f"iota: a pattern of {len(pattern)} dimensions; at most 4")
    values = np.asarray(offset, np.int64)
    for step, size in pattern:
        values = np.add.outer(values, np.arange(size) * step)
    partitions = np.arange(dst.shape[0]).reshape(-1, 1) * channel_multiplier
    require(values.size * dst.shape[0] == dst.size, f"iota: {values.shape} into {dst.shape}")
    dst.write((values.reshape(1, -1) + partitions).reshape(dst.shape))
