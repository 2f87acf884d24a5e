"""What several instructions check in the same way."""

from typing import Any

import numpy as np

from nki_emulator.dtypes import as_float32, float32
from nki_emulator.enums import Engine
from nki_emulator.machine import Violation, machine
from nki_emulator.memory import PSUM
from nki_emulator.tensor import NkiTensor

UNKNOWN, GPSIMD = Engine.unknown, Engine.gpsimd

# elements that an instruction may touch in each partition. For PSUM the architecture guide says
# 4096, the page on tiles 512, a bank: the smaller one counts, but for the fourth generation, whose
# products have up to 4096 columns
FREE_ELEMENTS, FREE_ELEMENTS_OF_PSUM, FREE_ELEMENTS_OF_A_BANK = 65536, 4096, 512

# dimensions of an operand. NKI's page on access patterns says that most instructions know three
# besides the partition; of these three instructions a page says four
DIMENSIONS = 4
DIMENSIONS_OF = {"iota": 5, "memset": 5, "reciprocal": 5}
# within a partition, in elements: an int16
LARGEST_STRIDE = 2**15 - 1

# where a tile may start, by how many partitions it has at most
FIRST_PARTITIONS = ((32, (0, 32, 64, 96)), (64, (0, 64)), (128, (0,)))


def check_tiles(instruction: str, *tiles: NkiTensor) -> None:
    """Operands of the compute engines: tiles on chip, addressed directly."""
    rank = DIMENSIONS_OF.get(instruction, DIMENSIONS)
    for tile in tiles:
        if not (isinstance(tile, NkiTensor) and tile.on_chip):
            raise Violation(f"{instruction}: an operand is not a tile in SBUF or PSUM")
        if tile.is_indirect:
            raise Violation(f"{instruction}: indirect operands need a DMA")
        partitions = tile.shape[0]
        free, most = tile.size // partitions, FREE_ELEMENTS
        if tile.buffer is PSUM:
            most = FREE_ELEMENTS_OF_A_BANK if machine().generation < 4 else FREE_ELEMENTS_OF_PSUM
        if free > most:
            raise Violation(f"{instruction}: {free} elements a partition; at most {most}")
        if tile.ndim > rank:
            raise Violation(f"{instruction}: rank {tile.ndim}; at most {rank}")
        for n, stride in zip(tile.shape[1:], tile.strides[1:], strict=True):
            if n != 1 and abs(stride) > LARGEST_STRIDE:
                raise Violation(
                    f"{instruction}: a stride of {stride} elements; at most {LARGEST_STRIDE}"
                )
        first = tile.offset // tile.storage.free_size
        if first == 0:
            continue
        allowed = next(starts for most, starts in FIRST_PARTITIONS if partitions <= most)
        if first not in allowed:
            raise Violation(
                f"{instruction}: {partitions} partitions from {first} on; allowed: from {allowed}"
            )


def check_same_size(instruction: str, dst: NkiTensor, *sources: NkiTensor) -> None:
    """Every source has as many partitions, and as many elements in each, as `dst`."""
    for source in sources:
        if source.shape[0] != dst.shape[0] or source.size != dst.size:
            raise Violation(f"{instruction}: {source.shape} into {dst.shape}")


def check_not_both_in_psum(instruction: str, a: NkiTensor, b: NkiTensor) -> None:
    """The vector engine has one port to PSUM."""
    if a.buffer is b.buffer is PSUM:
        raise Violation(f"{instruction}: both inputs lie in PSUM")


def check_engine(
    instruction: str, engine: Engine, allowed: tuple[Engine, ...], *tiles: NkiTensor
) -> None:
    """`engine` knows the instruction and reaches the tiles."""
    if engine is not UNKNOWN and engine not in allowed:
        raise Violation(f"{instruction}: not on the {engine.name} engine")
    if engine is GPSIMD and any(tile.buffer is PSUM for tile in tiles):
        raise Violation(f"{instruction}: GpSimd does not reach PSUM")


def number(instruction: str, operand: Any, data: NkiTensor, any_float: bool = False) -> Any:
    """A constant, or one float32 for each partition, ready to broadcast against `data`."""
    if not isinstance(operand, NkiTensor):
        if not isinstance(operand, int | float):
            raise Violation(f"{instruction}: operand is {type(operand).__name__}")
        return np.float32(operand)
    check_tiles(instruction, operand)
    if not operand.shape[0] == data.shape[0] == operand.size:
        raise Violation(
            f"{instruction}: an operand of shape {operand.shape}; allowed: ({data.shape[0]}, 1)"
        )
    if operand.dtype != float32 and not any_float:
        raise Violation(f"{instruction}: an operand of {operand.dtype}; allowed: float32")
    return as_float32(operand.read()).reshape((-1,) + (1,) * (data.ndim - 1))


def count(engine: Engine, default: Engine, instruction: str) -> None:
    """Count on the engine that was asked for, else on the usual one."""
    machine().count((default if engine is UNKNOWN else engine).name, instruction)
