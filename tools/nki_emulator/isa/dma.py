"""DMA: copies between HBM and SBUF, with rows gathered or scattered by an index."""

from typing import Any

import numpy as np

from nki_emulator.dtypes import cast
from nki_emulator.enums import DgeMode, Engine, OobMode
from nki_emulator.machine import Transfer, Violation, machine, require
from nki_emulator.memory import PSUM, SBUF, SHARED_HBM
from nki_emulator.tensor import NkiTensor

SKIP, HWDGE, UNKNOWN = OobMode.skip, DgeMode.hwdge, Engine.unknown
BOOL = np.dtype(bool)


def dma_copy(
    dst: NkiTensor,
    src: NkiTensor,
    priority: Any = None,
    oob_mode: OobMode = OobMode.error,
    dge_mode: DgeMode = DgeMode.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> None:
    """Copy as many elements, through float32 where the types differ."""
    current = machine()
    current.count("dma", "dma_copy")
    require(PSUM not in (dst.buffer, src.buffer), "dma_copy does not reach PSUM")
    if dst.size != src.size:
        raise Violation(f"dma_copy of {src.shape} into {dst.shape}")
    gathers, scatters = src.row_index is not None, dst.row_index is not None
    require(not (src.is_indirect and dst.is_indirect), "dma_copy is indirect on one side at most")
    if gathers or scatters:
        require(
            current.generation >= 3,
            "dma_copy: gathers and scatters came with the third generation",
        )
        require(dge_mode in (DgeMode.unknown, DgeMode.swdge), "dma_copy: vector_offset needs swdge")
    if dge_mode is HWDGE:
        require(current.generation >= 3, "dma_copy: hwdge came with the third generation")
        require(dst.dtype == src.dtype, "dma_copy: hwdge does not convert")
    require(
        engine is UNKNOWN or (dge_mode is HWDGE and engine in (Engine.sync, Engine.scalar)),
        "dma_copy: only hwdge has an engine, sync or scalar",
    )
    _check_priority("dma_copy", priority)
    skips = oob_mode is SKIP
    require(
        not skips or src.is_indirect or dst.is_indirect, "dma_copy: only an index can be skipped"
    )
    moved = 1.0
    if gathers:
        rows, inside = _rows(src, skips)
        moved = float(inside.mean())
        _check_written(src, rows[inside])
        values = _windows(src, src.storage.data, src.dtype)[rows[inside]]
        where = np.broadcast_to(inside.reshape(-1, *[1] * (src.ndim - 1)), src.shape)
        full = np.zeros(src.shape, src.dtype)
        full[inside] = values
        dst.write(
            cast(full, dst.dtype).reshape(dst.shape),
            None if inside.all() else where.reshape(dst.shape),
        )
    elif scatters:
        moved = _scatter(dst, src, skips)
    elif skips and (src.starts_outside() or dst.starts_outside()):
        moved = 0.0
    else:
        dst.write(src.read().reshape(dst.shape))
    _count_bytes(dst, src, moved)


# the axes of `dst` in `src`, by the rank of `src`: no others
TRANSPOSED = {2: (1, 0), 3: (2, 1, 0), 4: (3, 1, 2, 0)}


def dma_transpose(
    dst: NkiTensor,
    src: NkiTensor,
    axes: tuple[int, ...] | None = None,
    priority: Any = None,
    dge_mode: DgeMode = DgeMode.unknown,
    oob_mode: OobMode = OobMode.error,
    name: str | None = None,
) -> None:
    """`dst` = `src` with its first and last dimension exchanged; without an index here."""
    machine().count("dma", "dma_transpose")
    require(machine().generation >= 3, "dma_transpose came with the third generation")
    require(PSUM not in (dst.buffer, src.buffer), "dma_transpose does not reach PSUM")
    require(dst.buffer is SBUF, "dma_transpose writes SBUF")
    _check_priority("dma_transpose", priority)
    require(not (src.is_indirect or dst.is_indirect), "dma_transpose: an index is not emulated")
    require(dge_mode is DgeMode.unknown, "dma_transpose: only dge_mode unknown is emulated")
    require(oob_mode is OobMode.error, "dma_transpose: only an index can be skipped")
    allowed = TRANSPOSED.get(src.ndim)
    require(allowed is not None, f"dma_transpose of {src.ndim} dimensions; allowed: 2 to 4")
    require(axes is None or tuple(axes) == allowed, f"dma_transpose by {axes}; allowed: {allowed}")
    require(src.dtype.itemsize == 2, f"dma_transpose of {src.dtype}; allowed: types of 2 bytes")
    require(dst.dtype == src.dtype, f"dma_transpose: {src.dtype} into {dst.dtype}")
    require(src.shape[-1] <= 128, f"dma_transpose: last dimension {src.shape[-1]}; at most 128")
    turned = src.read().transpose(allowed)
    require(dst.shape == turned.shape, f"dma_transpose: {src.shape} into {dst.shape}")
    dst.write(np.ascontiguousarray(turned))
    _count_bytes(dst, src, 1.0)


def _check_priority(instruction: str, priority: Any) -> None:
    """A DMA has a priority from the fourth generation on."""
    if priority is not None and (machine().generation < 4 or priority not in range(4)):
        raise Violation(
            f"{instruction}: priority {priority}; allowed: 0 to 3, from the fourth generation on"
        )


def _windows(view: NkiTensor, flat: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Element `[i]` is what row `i` of an indexed view would be; as many rows as fit.

    `flat` is the storage's data, or a bitmap of its elements.
    """
    inner = 1 + sum((n - 1) * s for n, s in zip(view.shape[1:], view.strides[1:], strict=True))
    fitting = (flat.size - view.offset - inner) // view.row_stride + 1
    require(fitting > 0, "dma_copy: an indexed row reaches past its tensor")
    item = dtype.itemsize
    return np.ndarray(
        (fitting, *view.shape[1:]),
        dtype,
        flat,
        view.offset * item,
        tuple(s * item for s in (view.row_stride, *view.strides[1:])),
    )


def _rows(view: NkiTensor, skips: bool) -> tuple[np.ndarray, np.ndarray]:
    """The index, and which of its entries lie in bounds."""
    assert view.row_index is not None
    rows = view.row_index.read().reshape(-1).astype(np.int64)
    inside = (rows >= 0) & (rows < view.num_rows)
    require(skips or bool(inside.all()), "dma_copy: an index is out of bounds")
    fitting = len(_windows(view, view.storage.data, view.dtype))
    require(
        bool((rows[inside] < fitting).all()), "dma_copy: an indexed row reaches past its tensor"
    )
    return rows, inside


def _check_written(view: NkiTensor, rows: np.ndarray) -> None:
    """What is gathered from these rows has been written before."""
    if view.storage.written is not None:
        written = _windows(view, view.storage.written, BOOL)[rows]
        require(bool(written.all()), "dma_copy reads HBM before it is written")


def _scatter(dst: NkiTensor, src: NkiTensor, skips: bool) -> float:
    """Returns the share of the rows that was not skipped."""
    rows, inside = _rows(dst, skips)
    kept = rows[inside]
    require(
        len(np.unique(kept)) == len(kept),
        "dma_copy: two rows are scattered to one index, in no order",
    )
    values = cast(src.read().reshape(dst.shape), dst.dtype)
    _windows(dst, dst.storage.data, dst.dtype)[kept] = values[inside]
    bitmaps = [dst.storage.written]
    if dst.buffer is SHARED_HBM and machine().num_programs > 1:
        bitmaps.append(dst.storage.writes_of(machine().program_id))
    for bitmap in bitmaps:
        if bitmap is not None:
            _windows(dst, bitmap, BOOL)[kept] = True
    return float(inside.mean())


def _count_bytes(dst: NkiTensor, src: NkiTensor, moved: float) -> None:
    """`moved` is the share of the rows that was not skipped.

    What is contiguous on the HBM side is one descriptor; partitions never join.
    """
    side = dst if src.on_chip else src
    other = src if src.on_chip else dst
    together = 1
    for n, stride in zip(reversed(side.shape), reversed(side.strides), strict=True):
        if n > 1 and stride != together:
            break
        together *= n
    if other.on_chip:
        together = min(together, other.size // other.shape[0])
    item = side.dtype.itemsize
    if moved:
        on_chip = dst.on_chip and src.on_chip
        machine().transfers.append(
            Transfer(round(side.size * item * moved), together * item, on_chip)
        )
