"""Where tensors live: regions of memory, and storages with what is known of every element."""

import copy
import enum
import math
import weakref

import numpy as np

from nki_emulator.dtypes import is_float
from nki_emulator.machine import (
    PARTITIONS,
    PSUM_BANK_BYTES,
    machine,
    require,
)


class MemoryRegion(enum.Enum):
    """The buffers a tensor may be allocated in."""

    sbuf = "sbuf"
    psum = "psum"
    private_hbm = "private_hbm"
    shared_hbm = "shared_hbm"

    @property
    def on_chip(self) -> bool:
        """Whether dimension 0 is the partition."""
        return self in (MemoryRegion.sbuf, MemoryRegion.psum)


class Storage:
    """Elements of one allocation, laid end to end, partition after partition on chip.

    `written` is None where every element is known to hold a value. `started` says which elements
    of PSUM a matrix product has begun to accumulate. `writes` remembers which elements of shared
    HBM each program wrote, so that two programs of one logical core cannot race unnoticed.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        dtype: np.dtype,
        region: MemoryRegion,
        data: np.ndarray | None = None,
    ) -> None:
        self.shape, self.dtype, self.region = shape, dtype, region
        size = math.prod(shape)
        self.free_size = math.prod(shape[1:])
        self.written: np.ndarray | None = None
        if data is None:
            # nothing may read these before they are written: NaN betrays a check that failed
            self.data = np.full(size, np.nan if is_float(dtype) else 85, dtype)
            self.written = np.zeros(size, bool)
        else:
            self.data = data
        self.started = np.zeros(size, bool) if region is MemoryRegion.psum else None
        self.writes: dict[int, np.ndarray] = {}
        self.owner: Storage | None = None  # a view keeps what it looks at
        if region.on_chip:
            self._take(shape)

    def _take(self, shape: tuple[int, ...]) -> None:
        """Take room on chip until the storage is garbage: whole banks of PSUM, 32 bytes of SBUF."""
        require(len(shape) >= 2, f"a tile on chip has at least 2 dimensions, not {shape}")
        require(shape[0] <= PARTITIONS, f"{shape[0]} partitions; a tile has at most {PARTITIONS}")
        unit = PSUM_BANK_BYTES if self.region is MemoryRegion.psum else 32
        taken = -(-self.free_size * self.dtype.itemsize // unit) * unit
        current, memory = machine(), self.region.value
        current.allocate(memory, taken)
        weakref.finalize(self, current.release, memory, taken)

    def viewed(self, dtype: np.dtype) -> "Storage":
        """The same bytes as elements of another type of the same size."""
        twin = copy.copy(self)
        twin.dtype, twin.data = dtype, self.data.view(dtype)
        twin.owner = self
        return twin

    def writes_of(self, program: int) -> np.ndarray:
        """Which elements `program` has written, a bitmap to add to."""
        if program not in self.writes:
            self.writes[program] = np.zeros(self.data.size, bool)
        return self.writes[program]
