"""A paged cache in its storage, as rows that DMAs gather and scatter without a copy."""

import dataclasses
import math

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Element (page, head, slot, d) is at `row * row_size + offset + head * head_stride + d` of
    `storage`, where `row = first_row + page * page_rows + head * head_rows + slot * slot_rows`:
    either `head_stride` or `head_rows` is 0. NKI's constants have 32 bits: `offset` stays within a
    row, however far into its storage a cache begins.
    """

    storage: Tensor  # (rows, row_size), contiguous
    first_row: int
    page_rows: int
    head_rows: int
    slot_rows: int
    slot_stride: int
    head_stride: int
    offset: int
    dim: int

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """The fields of the kernels' `RowLayout`."""
        return self.slot_stride, self.head_stride, self.offset, self.dim

    @property
    def rows_of_head(self) -> int:
        """From a head to the next, where they share a gather: a head begins with a row."""
        return self.head_stride // self.storage.shape[1]

    def row_of(self, page: Tensor, head: Tensor | int, slot: Tensor) -> Tensor:
        """The rows in which the keys of these pages, heads and slots start."""
        row = page * self.page_rows + head * self.head_rows + slot * self.slot_rows
        return self.first_row + row


def as_rows(cache: Tensor, allow_copy: bool = True, by_head: bool = False) -> PagedKV | None:
    """A cache (num_pages, num_kv_heads, page_size, dim) of any strides as rows.

    None if only a copy has rows and no copy is allowed. `by_head` makes rows of one head each.
    """
    page_size, dim = cache.shape[2:]
    page_stride, head_stride, slot_stride, _ = _strides(cache)
    row_size = math.gcd(page_stride, slot_stride, head_stride if by_head else 0) or dim
    found = _dense(cache, row_size) or _in_storage(cache, row_size)
    if found is None:
        return as_rows(cache.contiguous(), by_head=by_head) if allow_copy else None
    storage, start = found
    first_row, offset = divmod(start, row_size)
    return PagedKV(
        storage=storage,
        first_row=first_row,
        page_rows=page_stride // row_size,
        head_rows=head_stride // row_size if by_head else 0,
        slot_rows=slot_stride // row_size,
        slot_stride=slot_stride if page_size > 1 else dim,
        head_stride=0 if by_head else head_stride,
        offset=offset,
        dim=dim,
    )


def _strides(cache: Tensor) -> list[int]:
    """The strides, but 0 for a dimension of one element, where a stride means nothing."""
    return [0 if n == 1 else s for n, s in zip(cache.shape, cache.stride(), strict=True)]


def is_dense(cache: Tensor) -> bool:
    """Whether a cache's elements fill a stretch of memory, in any order of its dimensions."""
    return cache.permute(_outermost_first(cache)).is_contiguous()


def _outermost_first(cache: Tensor) -> list[int]:
    """The dimensions from the largest stride to the smallest; the last one stays last."""
    strides = _strides(cache)[:-1]
    return [*sorted(range(len(strides)), key=lambda i: -strides[i]), len(strides)]


def _dense(cache: Tensor, row_size: int) -> tuple[Tensor, int] | None:
    """Rows by views that torch.compile can invert: it follows no write through `as_strided`."""
    if not is_dense(cache):
        return None
    return cache.permute(_outermost_first(cache)).view(-1, row_size), 0


def _in_storage(cache: Tensor, row_size: int) -> tuple[Tensor, int] | None:
    """Rows of the storage, whatever else it holds, and where in it the cache begins."""
    start = int(cache.storage_offset())
    last = start + sum((n - 1) * s for n, s in zip(cache.shape, cache.stride(), strict=True))
    rows = cache.untyped_storage().nbytes() // cache.itemsize // row_size
    if last >= rows * row_size or row_size < cache.shape[3]:
        return None
    return cache.as_strided((rows, row_size), (row_size, 1), 0), start
