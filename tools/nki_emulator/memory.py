"""Where tensors live: regions of memory, and storages with what is known of every element."""

import enum
import math
from collections.abc import Sequence

import numpy as np

from nki_emulator.dtypes import is_float
from nki_emulator.machine import (
    PARTITIONS,
    PSUM_BANK_BYTES,
    Violation,
    machine,
)


class MemoryRegion(enum.Enum):
    """The buffers a tensor may be allocated in."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"


SBUF, PSUM = MemoryRegion.sbuf, MemoryRegion.psum
SHARED_HBM = MemoryRegion.shared_hbm


class Storage:
    """Elements of one allocation, laid end to end, partition after partition on chip.

    `written` is None once every element is known to hold a value. `started` says which elements
    of PSUM a matrix product has begun to accumulate. `writes` remembers which elements of shared
    HBM each program wrote, so that two programs of one logical core cannot race unnoticed.
    """

    taken = 0  # bytes of each partition

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        region: MemoryRegion,
        data: np.ndarray | None = None,
    ) -> None:
        self.shape, self.dtype, self.region = shape, dtype, region
        self.strides = contiguous_strides(shape)
        self.on_chip = region is SBUF or region is PSUM  # whether dimension 0 is the partition
        size = math.prod(shape)
        self.free_size = math.prod(shape[1:])
        self.written: np.ndarray | None = None
        if data is None:
            # nothing may read these before they are written: NaN betrays a check that failed
            self.data = np.empty(size, dtype)
            self.data.fill(np.nan if is_float(dtype) else 85)
            self.written = np.zeros(size, bool)
        else:
            self.data = data
        self.started = np.zeros(size, bool) if region is PSUM else None
        self.writes: dict[int, np.ndarray] = {}
        if self.on_chip:
            self._take(shape)

    def _take(self, shape: tuple[int, ...]) -> None:
        """Take room on chip until the storage is garbage: whole banks of PSUM, 32 bytes of SBUF."""
        if len(shape) < 2:
            raise Violation(f"a tile on chip has at least 2 dimensions, not {shape}")
        if shape[0] > PARTITIONS:
            raise Violation(f"{shape[0]} partitions; a tile has at most {PARTITIONS}")
        unit = PSUM_BANK_BYTES if self.region is PSUM else 32
        taken = -(-self.free_size * self.dtype.itemsize // unit) * unit
        self.machine = machine()
        self.machine.allocate(self.region.value, taken)
        self.taken = taken

    def __del__(self) -> None:
        """Give back the room."""
        if self.taken:
            self.machine.release(self.region.value, self.taken)

    def writes_of(self, program: int) -> np.ndarray:
        """Which elements `program` has written, a bitmap to add to."""
        if program not in self.writes:
            self.writes[program] = np.zeros(self.data.size, bool)
        return self.writes[program]


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    strides, together = [], 1
    for n in reversed(shape):
        strides.append(together)
        together *= n
    return tuple(reversed(strides))
