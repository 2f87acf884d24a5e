"""Attention of selected units of keys for Hopper, in Gluon: each unit is read once for all tokens
that name it.

Read token by token, the units of 8,192 tokens would be some 34 GB, which no cache delivers in time,
and lists of neighbouring tokens may have nothing in common. So a program takes a unit of keys and
the tokens that name it (`unit_lists.py`): its keys and values stay in shared memory while the
tokens' queries pass by, 64 rows at a time; queries of few heads are copied into that order before
(`rows.py`). Each consumer has rows of its own, and its softmax
overlaps with the other's products. What a unit adds to a token's result is left as a part,
in float16 with a power of two as the scale of a row; `rows.py` adds the parts up in the
order of the list. So no bit depends on the order in which tokens come.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from torch_paged_attn.backends.triton.common.softmax import finite_or_zero
from torch_paged_attn.backends.triton.common.unit_items import ITEM, ITEM_WORDS
from torch_paged_attn.backends.triton.hopper.common.partitions import (
    registers_of,
    run_partitions,
    warps_of,
)
from torch_paged_attn.backends.triton.hopper.common.pipeline import new_pipeline
from torch_paged_attn.backends.triton.hopper.common.softmax import row_max
from torch_paged_attn.backends.triton.hopper.common.tma import (
    boxes,
    load_fill,
    load_rows,
    shape_of_tiles,
)
from torch_paged_attn.backends.triton.hopper.units.arguments import UnitParams, UnitSizes

# the largest number of a part is below two to this power; float16 ends at 2**16
HIGHEST = gl.constexpr(14)


class UnitPipelines(NamedTuple):
    """What the producer loads. Values arrive together with keys, in stages of the same number."""

    q: Any
    k: Any
    v: Any


@gluon.jit
def _item_word(item, params, WORD: gl.constexpr):
    return gl.load(params.pointers.items + item.to(gl.int64) * ITEM_WORDS + WORD)


@gluon.jit
def _load_unit(desc, place, page_rows, barrier, tile, params, OPTIONS: gl.constexpr):
    """Load the keys, or values, of a unit; those from key number `stop` on become zeros."""
    first, unit, stop, b, head = place
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    ROWS: gl.constexpr = OPTIONS.BOX_ROWS
    PAGE_SIZE: gl.constexpr = OPTIONS.PAGE_SIZE
    for i in gl.static_range(BLOCK_N // ROWS):
        box = tile.slice(i * ROWS, ROWS, dim=2)
        key = unit * BLOCK_N + i * ROWS
        if PAGE_SIZE == 0:
            load_rows(desc, first, stop, key, head, barrier, box)
        else:
            column, slot = key // PAGE_SIZE, key % PAGE_SIZE
            page = column
            if not OPTIONS.IS_SLOTS:
                # pages past the last key are not read
                entry = params.pointers.block_table + b.to(gl.int64) * params.sizes.stride_table
                page = gl.load(entry + gl.where(key < stop, column, 0))
            # a bad id that nobody checked reads the last page: wrong, but inside the cache
            most = (params.sizes.num_pages - 1).to(gl.uint32)
            page = gl.minimum(page.to(gl.uint32), most).to(gl.int32)
            size = gl.maximum(gl.minimum(stop - (key - slot), PAGE_SIZE), 0)
            load_rows(desc, page * page_rows, size, slot, head, barrier, box)


@gluon.jit
def _tokens_of(tile, first_entry, count, params, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """The query rows that producer number INDEX loads of an item's tile of queries: the last ones
    again where there are no more, which are not stored."""
    OWN: gl.constexpr = OPTIONS.TOKENS // OPTIONS.PRODUCERS
    rows = ()
    for i in gl.static_range(OWN):
        place = gl.minimum(tile * OPTIONS.TOKENS + INDEX * OWN + i, count - 1)
        row = gl.load(params.pointers.rows + first_entry + place)
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005
    return rows


@gluon.jit
def _load_copied(before, first_entry, count, tiles, params, queries, OPTIONS: gl.constexpr):
    """Load an item's queries, which lie one behind the other; rows past the last are zeros."""
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    BLOCK_M: gl.constexpr = OPTIONS.TOKENS * GROUP_SIZE
    for t in range(tiles):
        start, size = first_entry * GROUP_SIZE, count * GROUP_SIZE
        load_fill(params.q_desc, queries, before + t, start, size, t * BLOCK_M, 0)


@gluon.jit
def _load_by_token(
    before, first_entry, count, tiles, head, params, queries, OPTIONS: gl.constexpr,
    INDEX: gl.constexpr,
):  # fmt: skip
    """Load the queries of some tokens of each of an item's tiles."""
    OWN: gl.constexpr = OPTIONS.TOKENS // OPTIONS.PRODUCERS
    rows = _tokens_of(0, first_entry, count, params, OPTIONS, INDEX)
    for t in range(tiles):
        # on their way before anything waits
        more = _tokens_of(t + 1, first_entry, count, params, OPTIONS, INDEX)
        fill = before + t
        queries.producer_acquire(fill)
        barrier = queries.full_barrier(fill)
        mbarrier.expect(barrier, OWN * params.q_desc.block_type.nbytes)
        for i in gl.static_range(OWN):
            box = queries.tile(fill).slice(INDEX * OWN + i, 1, dim=2)
            head_row = head * OPTIONS.GROUP_SIZE
            load_rows(params.q_desc, rows[i], 1, 0, head_row, barrier, box)
        rows = more


@gluon.jit
def _produce(params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Load queries of some tokens of each tile; the first producer loads units, too."""
    pointers, scalars = params.pointers, params.scalars
    queries, keys, values = pipelines.q, pipelines.k, pipelines.v
    num_items = gl.load(pointers.num_items)
    item = gl.program_id(0)
    n = 0
    before = 0  # tiles of the items before
    while item < num_items:
        first_entry, count = (
            _item_word(item, params, ITEM.FIRST),
            _item_word(item, params, ITEM.COUNT),
        )
        head = _item_word(item, params, ITEM.HEAD)
        tiles = (count + OPTIONS.TOKENS - 1) // OPTIONS.TOKENS
        if INDEX == 0:
            unit, stop = _item_word(item, params, ITEM.UNIT), _item_word(item, params, ITEM.STOP)
            b = _item_word(item, params, ITEM.BATCH)
            first = 0
            if OPTIONS.PAGE_SIZE == 0:
                first = gl.load(pointers.k_first + b).to(gl.int32)
            keys.producer_acquire(n)
            barrier = keys.full_barrier(n)
            boxes_of_unit: gl.constexpr = OPTIONS.BLOCK_N // OPTIONS.BOX_ROWS
            bytes_of_unit: gl.constexpr = boxes_of_unit * (
                params.k_desc.block_type.nbytes + params.v_desc.block_type.nbytes
            )
            mbarrier.expect(barrier, bytes_of_unit)
            place = first, unit, stop, b, head
            tile = keys.tile(n)
            _load_unit(params.k_desc, place, scalars.k_page_rows, barrier, tile, params, OPTIONS)
            tile = values.index(n % OPTIONS.KV_STAGES)
            _load_unit(params.v_desc, place, scalars.v_page_rows, barrier, tile, params, OPTIONS)
        if OPTIONS.IS_COPIED:
            _load_copied(before, first_entry, count, tiles, params, queries, OPTIONS)
        else:
            _load_by_token(before, first_entry, count, tiles, head, params, queries, OPTIONS, INDEX)
        before += tiles
        item += gl.num_programs(0)
        n += 1


@gluon.jit
def _row_sum(p):
    partial = gl.sum(gl.reshape(p, [p.shape[0], p.shape[1] // 8, 8]), 1)
    return gl.convert_layout(gl.sum(partial, 1), gl.SliceLayout(1, p.type.layout), True)


@gluon.constexpr_function
def _lanes(columns):
    """The layout in which a consumer stores a part of 64 rows: each thread has 16 bytes in a row,
    and four of them 64. The numbers are where a product leaves them."""
    own = [[0, 1], [0, 2], [0, 4], *([0, 32 << i] for i in range(columns // 64)), [8, 0]]
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(own, lanes, [[16, 0], [32, 0]], [], [64, columns])


@gluon.jit
def by_lane(acc):
    """A part in the order in which its lanes store it: of 32 columns, each of four lanes has 8."""
    ROWS: gl.constexpr = acc.shape[0]
    COLUMNS: gl.constexpr = acc.shape[1]
    x = gl.reshape(acc, [ROWS, COLUMNS // 32, 4, 4, 2])
    x = gl.reshape(gl.permute(x, [0, 1, 3, 2, 4]), [ROWS, COLUMNS])
    return gl.convert_layout(x, _lanes(COLUMNS))


@gluon.jit
def _consume(params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Every other tile of a program's queries, if there are two consumers."""
    BLOCK_M: gl.constexpr = OPTIONS.TOKENS * OPTIONS.GROUP_SIZE
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    WIDTH: gl.constexpr = OPTIONS.WIDTH
    WIDTH_V: gl.constexpr = OPTIONS.WIDTH_V
    TOKENS: gl.constexpr = OPTIONS.TOKENS
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    result: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH_V, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, result, 2)
    score_rows: gl.constexpr = gl.SliceLayout(1, scores)
    pointers = params.pointers
    queries, keys, values = pipelines.q, pipelines.k, pipelines.v
    dtype: gl.constexpr = values.dtype
    scale_log2 = params.scalars.scale_log2
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    none = gl.zeros([BLOCK_M, WIDTH_V], gl.float32, result)
    r = gl.arange(0, BLOCK_M, score_rows)
    column = gl.expand_dims(gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores)), 0)
    num_items = gl.load(pointers.num_items)
    item = gl.program_id(0)
    n = 0
    before = 0  # tiles of the items before
    while item < num_items:
        first_entry, count = (
            _item_word(item, params, ITEM.FIRST),
            _item_word(item, params, ITEM.COUNT),
        )
        unit, is_cut = _item_word(item, params, ITEM.UNIT), _item_word(item, params, ITEM.IS_CUT)
        tiles = (count + TOKENS - 1) // TOKENS
        # tiles go to the consumers in turns
        begin = (INDEX + CONSUMERS - before % CONSUMERS) % CONSUMERS
        keys.consumer_wait(n)
        k = keys.tile(n).reshape([BLOCK_N, WIDTH]).permute((1, 0))
        v = values.index(n % OPTIONS.KV_STAGES).reshape([BLOCK_N, WIDTH_V])
        for tile in range(begin, tiles, CONSUMERS):
            fill = before + tile
            place = tile * TOKENS + r // GROUP_SIZE
            exists = place < count
            entry = gl.load(pointers.entries + first_entry + place, mask=exists, other=0)
            queries.consumer_wait(fill)
            q = queries.tile(fill).reshape([BLOCK_M, WIDTH])
            s = warpgroup_mma(q, k, zeros, use_acc=False, is_async=True)
            s = warpgroup_mma_wait(0, deps=[s])
            queries.consumer_release(fill)
            if is_cut != 0:
                token = entry // params.sizes.entries
                last = gl.load(pointers.last_keys + token, mask=exists, other=0) - unit * BLOCK_N
                s = gl.where(column <= gl.expand_dims(last, 1), s, -float("inf"))
            m = row_max(s) * scale_log2
            shift = finite_or_zero(m)
            p = gl.exp2(s * scale_log2 - gl.expand_dims(shift, 1))
            total = _row_sum(p)
            p = gl.convert_layout(p.to(dtype), operand)
            acc = warpgroup_mma(p, v, none, use_acc=False, is_async=True)
            # meanwhile
            at = entry.to(gl.int64) * GROUP_SIZE + r % GROUP_SIZE
            gl.store(pointers.part_lse + at, m + gl.log2(total), mask=exists)
            acc = warpgroup_mma_wait(0, deps=[acc])
            largest = gl.convert_layout(row_max(gl.abs(acc)), score_rows, True)
            exponent = (largest.to(gl.int32, bitcast=True) >> 23) - 127
            exponent = HIGHEST - 1 - gl.maximum(exponent, -100)
            up = ((127 + exponent) << 23).to(gl.float32, bitcast=True)
            down = ((127 - exponent) << 23).to(gl.float32, bitcast=True)
            share = gl.where(total > 0.0, down / total, 0.0)
            gl.store(pointers.part_scale + at, share, mask=exists)
            up = gl.convert_layout(up, gl.SliceLayout(1, result), True)
            part = by_lane((acc * gl.expand_dims(up, 1)).to(gl.float16))
            lanes: gl.constexpr = part.type.layout
            to = gl.convert_layout(at, gl.SliceLayout(1, lanes)) * WIDTH_V
            is_stored = gl.convert_layout(exists, gl.SliceLayout(1, lanes))
            d = gl.expand_dims(gl.arange(0, WIDTH_V, gl.SliceLayout(0, lanes)), 0)
            to = pointers.parts + gl.expand_dims(to, 1) + d
            gl.store(to, part, mask=gl.expand_dims(is_stored, 1))
        keys.consumer_release(n)
        before += tiles
        item += gl.num_programs(0)
        n += 1


@gluon.jit
def _run_partition(params, pipelines, OPTIONS: gl.constexpr, NUMBER: gl.constexpr):
    if NUMBER < OPTIONS.CONSUMERS:
        _consume(params, pipelines, OPTIONS, NUMBER)
    elif NUMBER < OPTIONS.CONSUMERS + OPTIONS.PRODUCERS:
        _produce(params, pipelines, OPTIONS, NUMBER - OPTIONS.CONSUMERS)


@gluon.jit(do_not_specialize=UnitSizes._fields)
def _hopper_attention_units_kernel(
    q_desc, k_desc, v_desc, pointers,
    entries, num_pages, stride_table,
    scalars,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """The arguments are those of `arguments.py`. Sizes come one by one: Triton compiles a
    kernel anew for the divisors of a number in a tuple."""
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = q_desc.layout
    k_layout: gl.constexpr = k_desc.layout
    v_layout: gl.constexpr = v_desc.layout
    rows: gl.constexpr = OPTIONS.BLOCK_N
    TOKENS: gl.constexpr = OPTIONS.TOKENS
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    of_token: gl.constexpr = [1, 1, TOKENS, GROUP_SIZE, OPTIONS.WIDTH]
    of_rows: gl.constexpr = [1, 1, TOKENS * GROUP_SIZE, 1, OPTIONS.WIDTH]
    box: gl.constexpr = of_rows if OPTIONS.IS_COPIED else of_token
    q_shape: gl.constexpr = boxes(OPTIONS.Q_STAGES, box)
    k_shape: gl.constexpr = shape_of_tiles(OPTIONS.KV_STAGES, k_desc.block_shape, rows)
    v_shape: gl.constexpr = shape_of_tiles(OPTIONS.KV_STAGES, v_desc.block_shape, rows)
    queries = new_pipeline(dtype, q_shape, q_layout, OPTIONS.Q_STAGES, 1, OPTIONS.PRODUCERS)
    keys = new_pipeline(dtype, k_shape, k_layout, OPTIONS.KV_STAGES, CONSUMERS, 1)
    values = gl.allocate_shared_memory(dtype, v_shape, v_layout)
    pipelines = UnitPipelines(queries, keys, values)
    sizes = UnitSizes(entries, num_pages, stride_table)
    params = UnitParams(q_desc, k_desc, v_desc, pointers, sizes, scalars)
    fence_async_shared()
    run_partitions(
        _run_partition, (params, pipelines, OPTIONS), warps_of(CONSUMERS, 4),
        registers_of(CONSUMERS, OPTIONS.REGISTERS),
    )  # fmt: skip
