"""Tensors: strided views of a storage, whose start or rows may be known only at run time."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from nki_emulator.dtypes import INTEGERS, cast, float8_e4m3fn, int32, uint32
from nki_emulator.machine import machine, require
from nki_emulator.memory import MemoryRegion, Storage
from nki_emulator.registers import VirtualRegister


class ds:
    """`nl.ds(start, size)`: a slice given by its length."""

    def __init__(self, start: int, size: int) -> None:
        self.start, self.size = start, size


def require_known(dtype: Any) -> None:
    """Whether the generation's engines know a type: e4m3 up to 448 came with the fourth."""
    require(
        np.dtype(dtype) != float8_e4m3fn or machine().generation >= 4,
        f"float8_e4m3fn on generation {machine().generation}; allowed: from the fourth on",
    )


class NkiTensor:
    """A view: element (i, j, ...) is storage element `offset + i * strides[0] + ...`.

    `row_offset` moves the view by a number of rows known at run time (`scalar_offset`);
    `row_index` puts row `row_index[i]` in place of row `i` (`vector_offset`). Both count in
    `row_stride` elements and must lie in `[0, num_rows)`.
    """

    def __init__(
        self, storage: Storage, shape: Sequence[int], strides: Sequence[int], offset: int = 0
    ) -> None:
        self.storage, self.offset = storage, offset
        self.shape, self.strides = tuple(shape), tuple(strides)
        self.row_offset: Any = None
        self.row_index: NkiTensor | None = None
        self.row_stride = self.num_rows = 0

    @property
    def dtype(self) -> np.dtype:
        """Type of the elements."""
        return self.storage.dtype

    @property
    def buffer(self) -> MemoryRegion:
        """Which memory it lies in."""
        return self.storage.region

    @property
    def ndim(self) -> int:
        """How many dimensions it has."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    @property
    def on_chip(self) -> bool:
        """Whether dimension 0 is the partition: SBUF or PSUM."""
        return self.storage.region.on_chip

    @property
    def is_indirect(self) -> bool:
        """Whether its start, or its rows, are known at run time only."""
        return self.row_offset is not None or self.row_index is not None

    def __bool__(self) -> bool:
        raise TypeError("a tile has no value while the kernel is traced")

    def __getitem__(self, key: Any) -> "NkiTensor":
        require(not self.is_indirect, "an indirect view cannot be sliced")
        keys = list(key) if isinstance(key, tuple) else [key]
        if any(k is Ellipsis for k in keys):
            at = next(i for i, k in enumerate(keys) if k is Ellipsis)
            keys[at : at + 1] = [slice(None)] * (self.ndim - len(keys) + 1)
        keys += [slice(None)] * (self.ndim - len(keys))
        require(len(keys) == self.ndim, f"{len(keys)} indices for {self.ndim} dimensions")
        shape, strides, offset = [], [], self.offset
        for axis, (k, n, stride) in enumerate(zip(keys, self.shape, self.strides, strict=True)):
            is_partition = self.on_chip and axis == 0
            if isinstance(k, int):
                require(-n <= k < n, f"index {k} is outside dimension {axis} of {n}")
                offset += k % n * stride
                if is_partition:
                    shape.append(1)
                    strides.append(stride)
                continue
            start, stop, step = (
                (k.start, k.start + k.size, 1)
                if isinstance(k, ds)
                else (k.start or 0, n if k.stop is None else k.stop, k.step or 1)
            )
            require(0 <= start < stop <= n, f"slice {start}:{stop} of dimension {axis} of {n}")
            require(step == 1 or (step > 1 and not is_partition), f"step {step} in axis {axis}")
            offset += start * stride
            shape.append(-(-(stop - start) // step))
            strides.append(stride * step)
        while len(shape) < (2 if self.on_chip else 1):
            shape.append(1)
            strides.append(1)
        return NkiTensor(self.storage, shape, strides, offset)

    def reshape(self, shape: Sequence[int]) -> "NkiTensor":
        """The same elements in another shape; on chip the partitions stay as they are."""
        require(not self.is_indirect, "an indirect view cannot be reshaped")
        require(math.prod(shape) == self.size, f"reshape of {self.shape} to {tuple(shape)}")
        kept = 1 if self.on_chip else 0
        require(not kept or shape[0] == self.shape[0], "reshape keeps the partition dimension")
        require(
            self.strides[kept:] == contiguous_strides(self.shape[kept:])
            or all(n == 1 for n in self.shape[kept:]),
            f"reshape of a view that is not contiguous: {self.shape}, strides {self.strides}",
        )
        strides = (*self.strides[:kept], *contiguous_strides(shape[kept:]))
        return NkiTensor(self.storage, shape, strides, self.offset)

    def view(self, dtype: np.dtype) -> "NkiTensor":
        """The same bytes read as another type; here one of the same size."""
        require(not self.is_indirect, "an indirect view cannot be reinterpreted")
        dtype = np.dtype(dtype)
        require(dtype.itemsize == self.dtype.itemsize, f"view of {self.dtype} as {dtype}")
        require_known(dtype)
        return NkiTensor(self.storage.viewed(dtype), self.shape, self.strides, self.offset)

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
        require(
            self.offset == 0 and self.shape == self.storage.shape,
            f".ap on a part {self.shape} of a tensor {self.storage.shape}: whole tensors only",
        )
        require(dtype is None or dtype == self.dtype, "this emulator does not reinterpret elements")
        require(
            scalar_offset is None or vector_offset is None, "scalar_offset excludes vector_offset"
        )
        require(1 <= len(pattern) <= 5, f"a pattern of {len(pattern)} dimensions; at most 5")
        strides, shape = zip(*pattern, strict=True)
        if self.on_chip:
            require(
                strides[0] == self.storage.free_size, "the first stride on chip is a partition's"
            )
        view = NkiTensor(self.storage, shape, strides, self.offset + (offset or 0))
        view.row_stride, view.num_rows = self.strides[indirect_dim], self.shape[indirect_dim]
        if vector_offset is not None:
            require(not self.on_chip, "vector_offset needs a tensor in HBM")
            require(indirect_dim == 0, "vector_offset needs indirect_dim = 0")
            require(vector_offset.buffer is MemoryRegion.sbuf, "vector_offset lies in SBUF")
            require(
                vector_offset.shape == (shape[0], 1),
                f"vector_offset has shape {vector_offset.shape}, the pattern {shape[0]} rows",
            )
            require(vector_offset.dtype in (int32, uint32), "vector_offset is int32 or uint32")
            require(strides[0] == math.prod(self.shape[1:]), "the first stride is that of one row")
            view.row_index = vector_offset
        elif isinstance(scalar_offset, NkiTensor):
            require(
                scalar_offset.buffer is MemoryRegion.sbuf
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
        """The storage element that the view begins at."""
        row = self.start_row()
        require(not self.starts_outside(), f"scalar_offset {row} is outside {self.num_rows} rows")
        return self.offset + row * self.row_stride

    def span(self) -> int:
        """How many storage elements lie between the first and the last, both included."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    def window(self, flat: np.ndarray) -> np.ndarray:
        """This view of `flat`, which is the storage's data or a bitmap of its elements."""
        start = self.start()
        require(
            start >= 0 and start + self.span() <= flat.size,
            f"elements {start} to {start + self.span() - 1} of a storage of {flat.size}",
        )
        item = flat.dtype.itemsize
        return np.ndarray(
            self.shape, flat.dtype, flat, start * item, tuple(s * item for s in self.strides)
        )

    def read(self) -> np.ndarray:
        """The values, a view: whoever reads what nothing wrote is refused."""
        if self.storage.written is not None:
            require(
                bool(self.window(self.storage.written).all()),
                f"read of {self.buffer.value} {self.shape} before it is written",
            )
        return self.window(self.storage.data)

    def write(self, values: Any, where: np.ndarray | None = None, product: bool = False) -> None:
        """Store `values`, rounded to the dtype; only `where` it is true."""
        require(
            all(s != 0 or n == 1 for n, s in zip(self.shape, self.strides, strict=True)),
            "write through a broadcast view",
        )
        selected: Any = ... if where is None else where
        new = cast(np.asarray(values), self.dtype)
        self.window(self.storage.data)[selected] = new if where is None else new[where]
        if self.storage.written is not None:
            self.window(self.storage.written)[selected] = True
        if self.storage.started is not None:
            self.window(self.storage.started)[selected] = product
        if self.buffer is MemoryRegion.shared_hbm and machine().num_programs > 1:
            self.window(self.storage.writes_of(machine().program_id))[selected] = True


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a contiguous tensor."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def allocate(
    shape: Sequence[int], dtype: Any, region: MemoryRegion, data: np.ndarray | None = None
) -> NkiTensor:
    """A tensor over a storage of its own."""
    require_known(dtype)
    storage = Storage(tuple(shape), np.dtype(dtype), region, data)
    return NkiTensor(storage, shape, contiguous_strides(shape))
