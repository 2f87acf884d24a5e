"""Loading tiles of keys and values: packed or in pages, in a row or by a list of blocks.

The tensor memory accelerator loads a tile as one box or, from pages or by a list, as several. From
pages smaller than a box, a warp copies rows.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.language.core import _aggregate as aggregate
from triton.language.core import tuple as tuple_of_values

from torch_paged_attn.backends.triton.hopper.block_runs import load_entries, spans_of_entries
from torch_paged_attn.backends.triton.hopper.pipeline import Pipeline
from torch_paged_attn.backends.triton.hopper.tma import (
    as_matrix,
    is_in_atoms,
    load_page,
    load_rows,
    rows_of_box,
    start_of_page,
)


class KeyRange(NamedTuple):
    """The keys that a tile of queries visits, as values of the kernel."""

    table: Any  # the sequence's row of the block table; 0 for packed keys
    k_start: Any  # the sequence's first row of packed keys
    key_len: Any
    first_key: Any  # of those that a window shows
    kv_head: Any
    # with a layout: a list of blocks, how long it is, the rows of the list that the tile holds, and
    # the position of the tile's first query
    list_ptr: Any
    num_entries: Any
    row_mask: Any
    position: Any


@aggregate
class KvLoader:
    """Loads part number PART of each tile of keys, or of values, into a pipeline."""

    desc: tma.tensor_descriptor
    # where copied rows are: first, elements from slot to slot and from head to head
    slots: tuple_of_values
    pipeline: Pipeline
    page_rows: gl.tensor
    num_pages: gl.tensor
    OPTIONS: gl.constexpr
    PART: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, desc, slots, pipeline, page_rows, num_pages, OPTIONS, PART):
        self.desc = desc
        self.slots = slots
        self.pipeline = pipeline
        self.page_rows = page_rows
        self.num_pages = num_pages
        self.OPTIONS = gl.constexpr(OPTIONS)
        self.PART = gl.constexpr(PART)

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
        if self.OPTIONS.GATHERS:
            self._copy_rows(n, start, keys)
        elif IN_WHOLE_PAGES and (start >= keys.first_key) & (start + BLOCK_N <= keys.key_len):
            self._load_pages(n, start, keys, True)
        elif is_in_atoms(self.desc.block_shape):
            self._load_pages(n, start, keys, False)
        else:
            self._load_runs(n, runs, keys)

    @gluon.jit
    def _find_pages(self, starts, stops, keys):
        """The page of each box of runs of keys, -1 where there is none to read."""
        RUN: gl.constexpr = self.OPTIONS.BLOCK_N // len(starts)
        ROWS: gl.constexpr = rows_of_box(self.desc.block_shape)
        BOXES: gl.constexpr = self.OPTIONS.BLOCK_N // ROWS // self.OPTIONS.KV_PARTS
        FIRST: gl.constexpr = self.PART * BOXES
        PAGE_SIZE: gl.constexpr = self.OPTIONS.PAGE_SIZE
        pages = ()
        for i in gl.static_range(FIRST, FIRST + BOXES):
            j = starts[i * ROWS // RUN] + i * ROWS % RUN
            # entries past the keys, or before a window, may hold anything: they are not read
            seen = (j < stops[i * ROWS // RUN]) & (j + ROWS > keys.first_key)
            page = gl.load(keys.table + j // PAGE_SIZE, mask=seen, other=-1)
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
            for i in gl.static_range(BOXES):
                box = self.pipeline.tile(n).slice(i * ROWS, ROWS, dim=2)
                load_rows(desc, keys.k_start, stops[i], starts[i], keys.kv_head, barrier, box)
        else:
            # all of them on their way before anything waits
            pages = self._find_pages(starts, stops, keys)
            self.pipeline.producer_acquire(n)
            mbarrier.expect(barrier, desc.block_type.nbytes * BOXES)
            for i in gl.static_range(FIRST, FIRST + BOXES):
                j = starts[i * ROWS // RUN] + i * ROWS % RUN
                page = pages[i - FIRST]
                is_page = (page >= 0) & (page < self.num_pages)
                left = stops[i * ROWS // RUN] - j // PAGE_SIZE * PAGE_SIZE
                size = gl.where(is_page, gl.minimum(left, PAGE_SIZE), 0)
                start = gl.where(is_page, page, 0) * self.page_rows
                box = self.pipeline.tile(n).slice(i * ROWS, ROWS, dim=2)
                load_rows(desc, start, size, j % PAGE_SIZE, keys.kv_head, barrier, box)

    @gluon.jit
    def _copy_rows(self, n, start, keys):
        """Fill n row by row; what nobody sees is zero."""
        WIDTH: gl.constexpr = self.desc.block_shape[4]
        ROWS: gl.constexpr = self.OPTIONS.BLOCK_N // self.OPTIONS.KV_PARTS
        LANES: gl.constexpr = WIDTH // 8  # of a row, 16 bytes each
        STEP: gl.constexpr = max(4 * 32 // LANES, 8)
        layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [1, 1], [1, 0])
        column = gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
        base, stride, stride_head = self.slots
        head = keys.kv_head.to(gl.int64) * stride_head
        columns = gl.expand_dims(base + head + column, 0)
        tile = as_matrix(self.pipeline.tile(n), self.OPTIONS.BLOCK_N, WIDTH)
        barrier = self.pipeline.full_barrier(n)
        FIRST: gl.constexpr = self.PART * ROWS
        r = start + FIRST + gl.arange(0, STEP, gl.SliceLayout(1, layout))
        slot, seen = self._slots_of(r, keys)
        self.pipeline.producer_acquire(n)
        for i in gl.static_range(0, ROWS, STEP):
            rows = columns + gl.expand_dims(slot * stride, 1)
            is_seen = gl.expand_dims(seen, 1)
            if i + STEP < ROWS:
                # on their way while these rows are asked for
                slot, seen = self._slots_of(r + (i + STEP), keys)
            async_copy.async_copy_global_to_shared(tile.slice(FIRST + i, STEP), rows, is_seen)
        async_copy.mbarrier_arrive(barrier)
        mbarrier.arrive(barrier, count=1)

    @gluon.jit
    def _slots_of(self, j, keys):
        """Slots of keys number j, and which of them somebody sees."""
        PAGE_SIZE: gl.constexpr = self.OPTIONS.PAGE_SIZE
        seen = (j >= keys.first_key) & (j < keys.key_len)
        page = gl.load(keys.table + j // PAGE_SIZE, mask=seen, other=0)
        # a bad id that nobody checked reads the last page: wrong, but inside the cache
        page = gl.minimum(page.to(gl.uint32), (self.num_pages - 1).to(gl.uint32))
        return page.to(gl.int64) * self.page_rows + j % PAGE_SIZE, seen
