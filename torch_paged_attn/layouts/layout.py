"""The block-sparse layout of `torch_paged_attn.blocksparse`: CSR over blocks of positions."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_paged_attn.ops.accepted import as_int32

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLOCK_SIZES = (16, 32, 64, 128, 256)


@dataclass(frozen=True, eq=False)
class BlockSparseLayout:
    """Which blocks of keys each block of query positions sees, in CSR.

    Query position p belongs to row p // q_block_size, key position j to column
    j // k_block_size. The columns of row r of a head are
    `col_indices[..., crow_indices[..., r] : crow_indices[..., r + 1]]`. A row may be empty. Entries
    of col_indices after a head's last row are padding.

    crow_indices: ([batch,] H, rows + 1) int32, which int64 is cast to
    col_indices: ([batch,] H, nnz) the same, on the same device
    q_block_size, k_block_size: positions per block: 16, 32, 64, 128 or 256
    num_cols: number of columns of `dense()`; None: as many as the largest listed column needs

    H is 1, num_kv_heads or num_heads of the call: query head h uses layout head
    h // (num_heads // H). Wrong types raise TypeError, wrong shapes, dtypes and block sizes
    ValueError. The values in the tensors are checked by the op.
    """

    crow_indices: Tensor
    col_indices: Tensor
    q_block_size: int
    k_block_size: int
    num_cols: int | None = None

    def __post_init__(self) -> None:
        for name in ("crow_indices", "col_indices"):
            indices = getattr(self, name)
            if not isinstance(indices, Tensor):
                raise TypeError(f"{name} must be a tensor, got {type(indices).__name__}")
            if indices.dtype == torch.int64:
                indices = as_int32("BlockSparseLayout", name, indices)
                object.__setattr__(self, name, indices)
            if indices.dtype != torch.int32:
                raise ValueError(f"{name} must be int32 or int64, got {indices.dtype}")
            if indices.dim() not in (2, 3):
                raise ValueError(
                    f"{name} must be ([batch,] H, ...), two or three dimensions, "
                    f"got shape {tuple(indices.shape)}"
                )
        crow, col = self.crow_indices, self.col_indices
        if crow.shape[:-1] != col.shape[:-1]:
            raise ValueError(
                "crow_indices and col_indices must agree in ([batch,] H), "
                f"got shapes {tuple(crow.shape)} and {tuple(col.shape)}"
            )
        if crow.size(-1) == 0:
            raise ValueError(
                "crow_indices must have rows + 1 >= 1 entries a head, "
                f"got shape {tuple(crow.shape)}"
            )
        if crow.device != col.device:
            raise ValueError(
                "crow_indices and col_indices must be on one device, "
                f"got {crow.device} and {col.device}"
            )
        check_block_size("q_block_size", self.q_block_size)
        check_block_size("k_block_size", self.k_block_size)

    def __repr__(self) -> str:
        return (
            f"BlockSparseLayout(crow_indices={tuple(self.crow_indices.shape)}, "
            f"col_indices={tuple(self.col_indices.shape)}, q_block_size={self.q_block_size}, "
            f"k_block_size={self.k_block_size}, num_cols={self.num_cols}, device={self.device})"
        )

    @property
    def num_heads(self) -> int:
        return self.crow_indices.size(-2)

    @property
    def num_rows(self) -> int:
        return self.crow_indices.size(-1) - 1

    @property
    def device(self) -> torch.device:
        return self.crow_indices.device

    def to(self, device: torch.device | str) -> BlockSparseLayout:
        """The same layout on another device."""
        return replace(
            self,
            crow_indices=self.crow_indices.to(device),
            col_indices=self.col_indices.to(device),
        )

    def heads(self, start: int, stop: int) -> BlockSparseLayout:
        """The layout of heads start to stop - 1, such as a rank's share in tensor parallelism."""
        if not 0 <= start < stop <= self.num_heads:
            raise ValueError(
                f"heads must satisfy 0 <= start < stop <= {self.num_heads}, "
                f"got start={start}, stop={stop}"
            )
        return replace(
            self,
            crow_indices=self.crow_indices[..., start:stop, :],
            col_indices=self.col_indices[..., start:stop, :],
        )

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `blocksparse` that this layout provides."""
        return {
            "crow_indices": self.crow_indices,
            "col_indices": self.col_indices,
            "q_block_size": self.q_block_size,
            "k_block_size": self.k_block_size,
        }

    def dense(self) -> Tensor:
        """Bool ([batch,] H, rows, cols): True where a block is listed."""
        crow = self.crow_indices.flatten(0, -2).contiguous()
        col = self.col_indices.flatten(0, -2).long()
        heads, nnz = col.shape
        entries = torch.arange(nnz, dtype=torch.int32, device=self.device).expand(heads, nnz)
        # searchsorted gives -1 or num_rows for an entry outside [crow[0], crow[-1]), that is
        # padding
        row = torch.searchsorted(crow, entries.contiguous(), right=True) - 1
        listed = (row >= 0) & (row < self.num_rows)
        largest = int(torch.where(listed, col, -1).max()) if nnz else -1
        num_cols = largest + 1 if self.num_cols is None else self.num_cols
        if largest >= num_cols:
            raise ValueError(f"num_cols must exceed column {largest}, got {num_cols}")
        mask = torch.zeros(heads, self.num_rows, num_cols, dtype=torch.bool, device=self.device)
        head = torch.arange(heads, device=self.device)[:, None].expand_as(col)
        mask[head[listed], row[listed], col[listed]] = True
        return mask.reshape(*self.crow_indices.shape[:-1], self.num_rows, num_cols)

    def density(self, causal: bool = True) -> float:
        """The fraction of blocks that are listed, from 0 to 1.

        causal: whether only blocks count that a causal mask does not hide completely (a kernel
            skips the others)
        """
        mask = self.dense()
        if causal:
            reachable = self._reachable(mask.size(-1)).expand_as(mask)
            mask = mask[reachable]
        return float(mask.double().mean()) if mask.numel() else 0.0

    def plot(self, path_or_ax: str | os.PathLike[str] | Axes, head: int | None = None) -> None:
        """Draw the blocks: listed ones dark, or pale if a causal mask hides them completely.

        path_or_ax: a file to write, with one panel per head; or a matplotlib Axes for one head
        head: which head to draw; None: all in a file, the first in an Axes. In a layout with a
            batch, the heads of all batch entries are numbered consecutively

        Needs matplotlib.
        """
        mask = self.dense().flatten(0, -3).cpu()
        picture = mask.float() * torch.where(self._reachable(mask.size(-1)).cpu(), 1.0, 0.3)

        def draw(ax: Axes, head: int) -> None:
            ax.imshow(picture[head].numpy(), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
            ax.set(title=f"head {head}", xticks=[], yticks=[])

        if not isinstance(path_or_ax, str | os.PathLike):
            draw(path_or_ax, head or 0)
            return
        # a Figure instead of pyplot: that would change global state and may need a display
        from matplotlib.figure import Figure

        shown = range(len(picture)) if head is None else [head]
        across = min(8, len(shown))
        down = -(-len(shown) // across)
        figure = Figure(figsize=(1.6 * across + 0.4, 1.8 * down + 0.4), layout="constrained")
        axes = list(figure.subplots(down, across, squeeze=False).flat)
        for ax in axes:
            ax.set_axis_off()
        for ax, index in zip(axes, shown, strict=False):
            ax.set_axis_on()
            draw(ax, index)
        figure.supxlabel(f"key blocks of {self.k_block_size}")
        figure.supylabel(f"query blocks of {self.q_block_size}")
        figure.savefig(path_or_ax, dpi=150)

    def _reachable(self, num_cols: int) -> Tensor:
        """Bool (rows, cols): blocks that contain a pair with key position <= query position."""
        last_q = torch.arange(1, self.num_rows + 1, device=self.device) * self.q_block_size - 1
        first_k = torch.arange(num_cols, device=self.device) * self.k_block_size
        return first_k <= last_q[:, None]


def from_dense_mask(
    mask: Tensor, q_block_size: int = 64, k_block_size: int | None = None
) -> BlockSparseLayout:
    """The layout that lists the True entries of a mask over blocks.

    mask: bool (rows, cols), (H, rows, cols) or (batch, H, rows, cols), one entry per block
    q_block_size, k_block_size: positions per block; k_block_size is q_block_size if None

    Raises:
        ValueError: mask is no bool tensor of 2 to 4 dimensions, or a block size is not allowed.
    """
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
        got = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"mask must be a bool tensor, got {got}")
    if not 2 <= mask.dim() <= 4:
        raise ValueError(f"mask must be ([[batch,] H,] rows, cols), got shape {tuple(mask.shape)}")
    mask = mask[None] if mask.dim() == 2 else mask
    leading, (rows, cols) = mask.shape[:-2], mask.shape[-2:]

    flat = mask.flatten(0, -3)
    crow = torch.zeros(len(flat), rows + 1, dtype=torch.int32, device=mask.device)
    crow[:, 1:] = flat.sum(-1).cumsum(-1)
    counts = crow[:, -1].long()
    head, _, column = flat.nonzero(as_tuple=True)
    first = counts.cumsum(0) - counts
    entry = torch.arange(len(head), device=mask.device) - first[head]
    nnz = int(counts.max()) if len(flat) else 0
    col = torch.zeros(len(flat), nnz, dtype=torch.int32, device=mask.device)
    col[head, entry] = column.int()
    return BlockSparseLayout(
        crow.reshape(*leading, rows + 1),
        col.reshape(*leading, nnz),
        q_block_size,
        q_block_size if k_block_size is None else k_block_size,
        cols,
    )


def check_block_size(name: str, value: int) -> None:
    """Raise ValueError unless `value` is a block size that the op allows."""
    if value not in BLOCK_SIZES:
        raise ValueError(f"{name} must be one of {BLOCK_SIZES}, got {value!r}")
