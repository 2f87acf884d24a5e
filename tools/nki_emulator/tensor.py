"""Tensors: strided views of a storage, whose start or rows may be known only at run time."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_emulator.dtypes import INTEGERS, cast, float8_e4m3fn, int32, uint32
from nki_emulator.machine import Violation, machine, require
from nki_emulator.memory import SBUF, SHARED_HBM, MemoryRegion, Storage, contiguous_strides
from nki_emulator.registers import VirtualRegister

ALL = slice(None)


class ds:
    """`nl.ds(start, size)`: a slice given by its length."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size


def require_known(dtype: Any) -> None:
    """Whether the generation's engines know a type: e4m3 up to 448 came with the fourth."""
    generation = machine().generation
    if generation < 4 and np.dtype(dtype) == float8_e4m3fn:
        raise Violation(f"float8_e4m3fn on generation {generation}; allowed: from the fourth on")


class NkiTensor:
    """A view: element (i, j, ...) is storage element `offset + i * strides[0] + ...`.

    `row_offset` moves the view by a number of rows known at run time (`scalar_offset`);
    `row_index` puts row `row_index[i]` in place of row `i` (`vector_offset`). Both count in
    `row_stride` elements and must lie in `[0, num_rows)`.

    `dtype` is the storage's, or another type of the same size.
    """

    row_offset: Any = None
    row_index: "NkiTensor | None" = None
    row_stride = num_rows = 0

    def __init__(
        self,
        storage: Storage,
        shape: Sequence[int],
        strides: Sequence[int],
        offset: int,
        dtype: np.dtype,
    ) -> None:
        self.storage, self.offset = storage, offset
        self.shape, self.strides = tuple(shape), tuple(strides)
        self.size, self.ndim = math.prod(self.shape), len(self.shape)
        self.dtype, self.buffer, self.on_chip = dtype, storage.region, storage.on_chip

    @property
    def is_indirect(self) -> bool:
        """Whether its start, or its rows, are known at run time only."""
        return self.row_offset is not None or self.row_index is not None

    def __bool__(self) -> bool:
        raise TypeError("a tile has no value while the kernel is traced")

    def __getitem__(self, key: Any) -> "NkiTensor":
        require(not self.is_indirect, "an indirect view cannot be sliced")
        keys = list(key) if isinstance(key, tuple) else [key]
        for axis, k in enumerate(keys):
            if k is Ellipsis:
                keys[axis : axis + 1] = [ALL] * (self.ndim - len(keys) + 1)
                break
        given = len(keys)
        if given > self.ndim:
            raise Violation(f"{given} indices for {self.ndim} dimensions")
        shape, strides, offset = [], [], self.offset
        for axis, (k, n, stride) in enumerate(zip(keys, self.shape, self.strides, strict=False)):
            if isinstance(k, int):
                if not -n <= k < n:
                    raise Violation(f"index {k} is outside dimension {axis} of {n}")
                offset += k % n * stride
                if self.on_chip and axis == 0:
                    shape.append(1)
                    strides.append(stride)
                continue
            if isinstance(k, ds):
                start, stop, step = k.start, k.start + k.size, 1
            else:
                start, stop, step = k.start or 0, n if k.stop is None else k.stop, k.step or 1
            if not 0 <= start < stop <= n:
                raise Violation(f"slice {start}:{stop} of dimension {axis} of {n}")
            if step < 1 or (step > 1 and self.on_chip and axis == 0):
                raise Violation(f"step {step} in axis {axis}")
            offset += start * stride
            shape.append(-(-(stop - start) // step))
            strides.append(stride * step)
        shape += self.shape[given:]
        strides += self.strides[given:]
        while len(shape) < (2 if self.on_chip else 1):
            shape.append(1)
            strides.append(1)
        return NkiTensor(self.storage, shape, strides, offset, self.dtype)

    def reshape(self, shape: Sequence[int]) -> "NkiTensor":
        """The same elements in another shape; on chip the partitions stay as they are."""
        require(not self.is_indirect, "an indirect view cannot be reshaped")
        if math.prod(shape) != self.size:
            raise Violation(f"reshape of {self.shape} to {tuple(shape)}")
        kept = 1 if self.on_chip else 0
        require(not kept or shape[0] == self.shape[0], "reshape keeps the partition dimension")
        if self.strides[kept:] != contiguous_strides(self.shape[kept:]) and any(
            n != 1 for n in self.shape[kept:]
        ):
            raise Violation(
                f"reshape of a view that is not contiguous: {self.shape}, strides {self.strides}"
            )
        strides = (*self.strides[:kept], *contiguous_strides(shape[kept:]))
        return NkiTensor(self.storage, shape, strides, self.offset, self.dtype)

    def view(self, dtype: np.dtype) -> "NkiTensor":
        """The same bytes read as another type; here one of the same size."""
        require(not self.is_indirect, "an indirect view cannot be reinterpreted")
        dtype = np.dtype(dtype)
        require(dtype.itemsize == self.dtype.itemsize, f"view of {self.dtype} as {dtype}")
        require_known(dtype)
        return NkiTensor(self.storage, self.shape, self.strides, self.offset, dtype)

    def ap(
        self,
        pattern: Sequence[Sequence[int]],
        offset: int | None = None,
        scalar_offset: Any = None,
        vector_offset: "NkiTensor | None" = None,
        indirect_dim: int = 0,
        dtype: np.dtype | None = None,
    ) -> "NkiTensor":
        """An access pattern over the storage: `[[stride, count], ...]`, outermost first.

        The documentation says both that the view's offset counts and that it does not: this takes
        whole tensors only.
        """
        if self.offset != 0 or self.shape != self.storage.shape:
            raise Violation(
                f".ap on a part {self.shape} of a tensor {self.storage.shape}: whole tensors only"
            )
        require(dtype is None or dtype == self.dtype, "this emulator does not reinterpret elements")
        require(
            scalar_offset is None or vector_offset is None, "scalar_offset excludes vector_offset"
        )
        if not 1 <= len(pattern) <= 5:
            raise Violation(f"a pattern of {len(pattern)} dimensions; at most 5")
        strides, shape = zip(*pattern, strict=True)
        if self.on_chip:
            require(
                strides[0] == self.storage.free_size, "the first stride on chip is a partition's"
            )
        view = NkiTensor(self.storage, shape, strides, self.offset + (offset or 0), self.dtype)
        view.row_stride, view.num_rows = self.strides[indirect_dim], self.shape[indirect_dim]
        if vector_offset is not None:
            require(not self.on_chip, "vector_offset needs a tensor in HBM")
            require(indirect_dim == 0, "vector_offset needs indirect_dim = 0")
            require(vector_offset.buffer is SBUF, "vector_offset is in SBUF")
            if vector_offset.shape != (shape[0], 1):
                raise Violation(
                    f"vector_offset has shape {vector_offset.shape}, the pattern {shape[0]} rows"
                )
            require(vector_offset.dtype in (int32, uint32), "vector_offset is int32 or uint32")
            require(strides[0] == math.prod(self.shape[1:]), "the first stride is that of one row")
            view.row_index = vector_offset
        elif isinstance(scalar_offset, NkiTensor):
            require(
                scalar_offset.buffer is SBUF
                and scalar_offset.size == 1
                and scalar_offset.dtype in INTEGERS,
                "scalar_offset is a register or one integer in SBUF",
            )
            view.row_offset = scalar_offset
        elif scalar_offset is not None:
            require(isinstance(scalar_offset, VirtualRegister), "scalar_offset is a register")
            view.row_offset = scalar_offset
        return view

    def start_row(self) -> int:
        """What `scalar_offset` holds; 0 without it."""
        moved = self.row_offset
        if moved is None:
            return 0
        return moved.known() if isinstance(moved, VirtualRegister) else int(moved.read().item())

    def starts_outside(self) -> bool:
        """Whether `scalar_offset` points to no row."""
        return self.row_offset is not None and not 0 <= self.start_row() < self.num_rows

    def start(self) -> int:
        """The storage element that the view begins at; it ends within the storage, too."""
        start = self.offset
        if self.row_offset is not None:
            row = self.start_row()
            if not 0 <= row < self.num_rows:
                raise Violation(f"scalar_offset {row} is outside {self.num_rows} rows")
            start += row * self.row_stride
        last = start
        for n, stride in zip(self.shape, self.strides, strict=True):
            last += (n - 1) * stride
        if start < 0 or last >= self.storage.data.size:
            raise Violation(f"elements {start} to {last} of a storage of {self.storage.data.size}")
        return start

    def values(self, start: int) -> np.ndarray:
        """The elements, where `start()` has placed the view."""
        item = self.dtype.itemsize
        strides = [stride * item for stride in self.strides]
        return np.ndarray(self.shape, self.dtype, self.storage.data, start * item, strides)

    def marks(self, bitmap: np.ndarray, start: int) -> np.ndarray:
        """What a bitmap of the storage says of these elements."""
        return np.ndarray(self.shape, bitmap.dtype, bitmap, start, self.strides)

    def read(self) -> np.ndarray:
        """The values, a view; reading memory that was not written is refused."""
        storage, start = self.storage, self.start()
        if storage.written is not None and not self.marks(storage.written, start).all():
            raise Violation(f"read of {self.buffer.value} {self.shape} before it is written")
        return self.values(start)

    def write(self, values: Any, where: np.ndarray | None = None, product: bool = False) -> None:
        """Store `values`, rounded to the dtype; only `where` it is true."""
        if 0 in self.strides:
            require(
                all(s != 0 or n == 1 for n, s in zip(self.shape, self.strides, strict=True)),
                "write through a broadcast view",
            )
        storage, start = self.storage, self.start()
        selected: Any = ... if where is None else where
        new = cast(np.asarray(values), self.dtype)
        self.values(start)[selected] = new if where is None else new[where]
        if storage.written is not None:
            if where is None and self.shape == storage.shape and self.strides == storage.strides:
                storage.written = None
            else:
                self.marks(storage.written, start)[selected] = True
        if storage.started is not None:
            self.marks(storage.started, start)[selected] = product
        if self.buffer is SHARED_HBM and machine().num_programs > 1:
            self.marks(storage.writes_of(machine().program_id), start)[selected] = True


def allocate(
    shape: Sequence[int], dtype: Any, region: MemoryRegion, data: np.ndarray | None = None
) -> NkiTensor:
    """A tensor over a storage of its own."""
    require_known(dtype)
    storage = Storage(tuple(shape), np.dtype(dtype), region, data)
    return NkiTensor(storage, shape, storage.strides, 0, storage.dtype)
