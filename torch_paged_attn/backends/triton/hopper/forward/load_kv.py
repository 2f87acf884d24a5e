"""Loading tiles of keys and values: packed or in pages, in a row or by a list of blocks.

The tensor memory accelerator loads a tile as one box or, from pages or by a list, as several. From
pages smaller than a box, a warp copies rows.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import tuple as tuple_of_values

from torch_paged_attn.backends.triton.hopper.common.pipeline import Pipeline
from torch_paged_attn.backends.triton.hopper.common.records import record
from torch_paged_attn.backends.triton.hopper.common.tma import (
    as_matrix,
    async_load_pointers,
    is_in_atoms,
    load_page,
    load_rows,
    rows_of_box,
    start_of_page,
)
from torch_paged_attn.backends.triton.hopper.schedule.block_runs import (
    load_entries,
    spans_of_entries,
)


class KeyRange(NamedTuple):
    """The keys that a tile of queries visits, as values of the kernel."""

    table: Any  # the sequence's row of the block table; 0 for packed keys
    k_start: Any  # the sequence's first row of packed keys; if IS_ROWS, its only page
    key_len: Any
    first_key: Any  # of those that a window shows
    kv_head: Any
    # with a layout: a list of blocks, how long it is, the rows of the list that the tile holds, and
    # the position of the tile's first query
    list_ptr: Any
    num_entries: Any
    row_mask: Any
    position: Any


@gluon.constexpr_function
def _elements_of_piece(dtype):
    """Of 16 bytes, which a lane copies at a time."""
    return 128 // dtype.primitive_bitwidth


@record
class KvLoader:
    """Loads part number PART of each tile of keys, or of values, into a pipeline."""

    desc: tma.tensor_descriptor
    # where copied rows are: the first, elements from slot to slot and from head to head, and shared
    # memory for where the rows of a tile are
    slots: tuple_of_values
    pipeline: Pipeline
    page_rows: gl.tensor
    page_size: gl.tensor
    num_pages: gl.tensor
    OPTIONS: gl.constexpr
    PART: gl.constexpr

    @gluon.jit
    def load_tiles(self, n, stop, num_tiles, keys):
        """Fill n and the next ones with the tiles before key number `stop`, or before that entry of
        a list, from right to left. Returns the number of the next fill."""
        if self.OPTIONS.GATHERS:
            n = self._copy_tiles(n, stop, num_tiles, keys)
        else:
            for _ in range(num_tiles):
                stop -= self.OPTIONS.KV_STEP
                self.load(n, stop, keys)
                n += 1
        return n

    @gluon.jit
    def load(self, n, start, keys):
        """Fill n: the tile from key number `start` on, or of the entries of a list from there."""
        BLOCK_N: gl.constexpr = self.OPTIONS.BLOCK_N
        PAGE_SIZE: gl.constexpr = self.OPTIONS.PAGE_SIZE
        HAS_LAYOUT: gl.constexpr = self.OPTIONS.HAS_LAYOUT
        # a tile is whole pages, or in one page
        IS_EVEN: gl.constexpr = PAGE_SIZE & (PAGE_SIZE - 1) == 0
        IN_WHOLE_PAGES: gl.constexpr = PAGE_SIZE > 0 and IS_EVEN and not HAS_LAYOUT
        runs = (start,)
        if HAS_LAYOUT:
            runs = load_entries(keys.list_ptr, start, keys.num_entries, self.OPTIONS.KV_STEP)
        if IN_WHOLE_PAGES and (start >= keys.first_key) & (start + BLOCK_N <= keys.key_len):
            self._load_pages(n, start, keys, True)
        elif is_in_atoms(self.desc.block_shape):
            self._load_pages(n, start, keys, False)
        else:
            self._load_runs(n, runs, keys)

    @gluon.jit
    def _slot_of(self, j):
        """Which of a sequence's pages key number j is in, its slot there, and the page size."""
        if self.OPTIONS.PAGE_SIZE > 0:
            PAGE_SIZE: gl.constexpr = self.OPTIONS.PAGE_SIZE
            return j // PAGE_SIZE, j % PAGE_SIZE, PAGE_SIZE
        else:
            return j // self.page_size, j % self.page_size, self.page_size

    @gluon.jit
    def _find_pages(self, starts, stops, keys):
        """The page of each box of runs of keys, -1 where there is none to read."""
        RUN: gl.constexpr = self.OPTIONS.BLOCK_N // len(starts)
        ROWS: gl.constexpr = rows_of_box(self.desc.block_shape)
        BOXES: gl.constexpr = self.OPTIONS.BLOCK_N // ROWS // self.OPTIONS.KV_PARTS
        FIRST: gl.constexpr = self.PART * BOXES
        pages = ()
        for i in gl.static_range(FIRST, FIRST + BOXES):
            j = starts[i * ROWS // RUN] + i * ROWS % RUN
            # entries past the keys, or before a window, may hold anything: they are not read
            seen = (j < stops[i * ROWS // RUN]) & (j + ROWS > keys.first_key)
            entry, _, _ = self._slot_of(j)
            page = gl.load(keys.table + entry, mask=seen, other=-1)
            # the compiler of kernels knows no unpacking
            pages = pages + (page,)  # type: ignore[assignment]  # noqa: RUF005
        return pages

    @gluon.jit
    def _load_pages(self, n, start, keys, IS_SEEN: gl.constexpr):
        """Fill n with keys from `start` on in whole boxes; unless IS_SEEN, nobody may see some of
        them. The boxes are asked for closely one after the other: products would wait in between.
        """
        ROWS: gl.constexpr = rows_of_box(self.desc.block_shape)
        BOXES: gl.constexpr = self.OPTIONS.BLOCK_N // ROWS // self.OPTIONS.KV_PARTS
        FIRST: gl.constexpr = self.PART * BOXES
        PAGE_SIZE: gl.constexpr = self.OPTIONS.PAGE_SIZE
        pages = ()
        if IS_SEEN:
            entry = keys.table + start // PAGE_SIZE
            for i in gl.static_range(FIRST, FIRST + BOXES):
                pages = pages + (gl.load(entry + i),)  # type: ignore[assignment]  # noqa: RUF005
        else:
            pages = self._find_pages((start,), (keys.key_len,), keys)
        in_page = 0
        if PAGE_SIZE > ROWS:
            in_page = start % PAGE_SIZE
        starts = ()
        for i in gl.static_range(BOXES):
            # a bad id that nobody checked reads the last page: wrong, but inside the cache
            page = gl.minimum(pages[i].to(gl.uint32), (self.num_pages - 1).to(gl.uint32))
            box = start_of_page(self.desc, page.to(gl.int32), self.page_rows, in_page)
            starts = starts + (box,)  # type: ignore[assignment]  # noqa: RUF005
        barrier = self.pipeline.full_barrier(n)
        self.pipeline.producer_acquire(n)
        mbarrier.expect(barrier, self.desc.block_type.nbytes * BOXES)
        for i in gl.static_range(BOXES):
            tile = self.pipeline.tile(n)
            load_page(self.desc, FIRST + i, starts[i], keys.kv_head, barrier, tile)

    @gluon.jit
    def _load_runs(self, n, runs, keys):
        """Fill n: one run of rows from a key on, or a run for each of several entries of a list. Of
        pages, a run is as many boxes as they are cut into."""
        desc = self.desc
        ROWS: gl.constexpr = desc.block_shape[2]
        RUN: gl.constexpr = self.OPTIONS.BLOCK_N // len(runs)
        BOXES: gl.constexpr = self.OPTIONS.BLOCK_N // ROWS // self.OPTIONS.KV_PARTS
        FIRST: gl.constexpr = self.PART * BOXES
        PAGE_SIZE: gl.constexpr = self.OPTIONS.PAGE_SIZE
        starts = runs
        stops = (keys.key_len,)
        if self.OPTIONS.HAS_LAYOUT:
            starts, stops = spans_of_entries(
                runs, keys.row_mask, keys.position, keys.key_len, self.OPTIONS
            )
        barrier = self.pipeline.full_barrier(n)
        if PAGE_SIZE == 0:
            self.pipeline.producer_acquire(n)
            mbarrier.expect(barrier, desc.block_type.nbytes * BOXES)
            first = keys.k_start
            if self.OPTIONS.IS_ROWS:
                first = keys.k_start * self.page_rows
            for i in gl.static_range(BOXES):
                box = self.pipeline.tile(n).slice(i * ROWS, ROWS, dim=2)
                load_rows(desc, first, stops[i], starts[i], keys.kv_head, barrier, box)
        else:
            # all of them on their way before anything waits
            pages = self._find_pages(starts, stops, keys)
            self.pipeline.producer_acquire(n)
            mbarrier.expect(barrier, desc.block_type.nbytes * BOXES)
            for i in gl.static_range(FIRST, FIRST + BOXES):
                j = starts[i * ROWS // RUN] + i * ROWS % RUN
                page = pages[i - FIRST]
                is_page = (page >= 0) & (page < self.num_pages)
                _, slot, page_size = self._slot_of(j)
                left = stops[i * ROWS // RUN] - (j - slot)
                size = gl.where(is_page, gl.minimum(left, page_size), 0)
                start = gl.where(is_page, page, 0) * self.page_rows
                box = self.pipeline.tile(n).slice(i * ROWS, ROWS, dim=2)
                load_rows(desc, start, size, slot, keys.kv_head, barrier, box)

    @gluon.jit
    def _copy_tiles(self, n, stop, num_tiles, keys):
        """Fill n and the next ones row by row, from right to left. What the table says of the next
        tile is on its way while rows are asked for."""
        BLOCK_N: gl.constexpr = self.OPTIONS.BLOCK_N
        ROWS: gl.constexpr = BLOCK_N // self.OPTIONS.KV_PARTS
        # a warp reads the table once for all rows, and looks them up in shared memory
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
        j = stop - BLOCK_N + self.PART * ROWS + gl.arange(0, ROWS, layout)
        _, _, _, found = self.slots
        pages = self._pages_of(j, keys)
        for _ in range(num_tiles):
            found.store(self._rows_of(j, pages, keys))
            j -= BLOCK_N
            pages = self._pages_of(j, keys)
            self._copy_rows(n, keys)
            n += 1
        return n

    @gluon.jit
    def _copy_rows(self, n, keys):
        """Fill n with the rows that were found; what nobody sees is zero."""
        WIDTH: gl.constexpr = self.desc.block_shape[4]
        ROWS: gl.constexpr = self.OPTIONS.BLOCK_N // self.OPTIONS.KV_PARTS
        FIRST: gl.constexpr = self.PART * ROWS
        PIECE: gl.constexpr = _elements_of_piece(self.desc.dtype)
        LANES: gl.constexpr = WIDTH // PIECE  # of a row
        STEP: gl.constexpr = max(4 * 32 // LANES, 8)
        layout: gl.constexpr = gl.BlockedLayout([1, PIECE], [32 // LANES, LANES], [1, 1], [1, 0])
        column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        base, _, stride_head, found = self.slots
        columns = gl.expand_dims(base + keys.kv_head.to(gl.int64) * stride_head + column, 0)
        tile = as_matrix(self.pipeline.tile(n), self.OPTIONS.BLOCK_N, WIDTH)
        barrier = self.pipeline.full_barrier(n)
        self.pipeline.producer_acquire(n)
        for i in gl.static_range(0, ROWS, STEP):
            row = gl.expand_dims(found.slice(i, STEP).load(gl.SliceLayout(1, layout)), 1)
            target = tile.slice(FIRST + i, STEP)
            async_load_pointers(target, columns + row * PIECE, row >= 0)
        async_copy.mbarrier_arrive(barrier)
        mbarrier.arrive(barrier, count=1)

    @gluon.jit
    def _pages_of(self, j, keys):
        """The table's entries for keys number j."""
        seen = (j >= keys.first_key) & (j < keys.key_len)
        return gl.load(keys.table + j // self.OPTIONS.PAGE_SIZE, mask=seen, other=0)

    @gluon.jit
    def _rows_of(self, j, pages, keys):
        """Where the rows of keys number j begin, in pieces; -1 where nobody sees one."""
        seen = (j >= keys.first_key) & (j < keys.key_len)
        # a bad id that nobody checked reads the last page: wrong, but inside the cache
        page = gl.minimum(pages.to(gl.uint32), (self.num_pages - 1).to(gl.uint32))
        slot = page.to(gl.int64) * self.page_rows + j % self.OPTIONS.PAGE_SIZE
        _, stride, _, _ = self.slots
        PIECE: gl.constexpr = _elements_of_piece(self.desc.dtype)
        return gl.where(seen, slot * (stride // PIECE), -1)
