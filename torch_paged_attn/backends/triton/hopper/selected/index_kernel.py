"""Scores of index queries on index keys for Hopper, in Gluon.

A program keeps the queries of some tokens in shared memory, all heads of a group, while tiles of
keys pass by. Keys are the rows of its products, and heads the columns, so that the sum over heads
is mostly one of a thread's own numbers. Consumers take tiles in turns: the sums of one overlap with
the products of the others.
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

from torch_paged_attn.backends.triton.hopper.common.partitions import (
    registers_of,
    run_partitions,
    warps_of,
)
from torch_paged_attn.backends.triton.hopper.common.pipeline import new_pipeline
from torch_paged_attn.backends.triton.hopper.common.tma import boxes, load_rows, shape_of_tiles
from torch_paged_attn.backends.triton.hopper.selected.index_arguments import (
    CHUNK,
    KEYS,
    IndexParams,
    IndexSizes,
)
from torch_paged_attn.backends.triton.hopper.selected.producer import find_sequence

BLOCK, SPAN = gl.constexpr(KEYS), gl.constexpr(CHUNK)


class IndexPipelines(NamedTuple):
    """What the producer loads."""

    q: Any
    k: Any


class Part(NamedTuple):
    """Rows of one sequence, up to `stop_row`, and the tiles of keys from key `first` on that a
    program multiplies them with, as values of the kernel."""

    sequence: Any
    stop_row: Any
    first: Any
    stop_key: Any
    tiles: Any


@gluon.jit
def _work_of(number, params, OPTIONS: gl.constexpr):
    """The first row, group and first key of a piece of work."""
    chunks = (params.sizes.num_keys + SPAN - 1) // SPAN
    of_rows = number // chunks
    row = params.sizes.first_row + of_rows // OPTIONS.GROUPS * OPTIONS.TOKENS
    return row, of_rows % OPTIONS.GROUPS, number % chunks * SPAN


@gluon.jit
def _pieces(params, OPTIONS: gl.constexpr):
    """How many pieces of work there are."""
    sizes = params.sizes
    tiles = (sizes.stop_row - sizes.first_row + OPTIONS.TOKENS - 1) // OPTIONS.TOKENS
    return tiles * OPTIONS.GROUPS * ((sizes.num_keys + SPAN - 1) // SPAN)


@gluon.jit
def _part_of(row, stop_row, first, params, OPTIONS: gl.constexpr):
    """The part that begins with a row."""
    sequence = find_sequence(row, 0 * row, params, OPTIONS)
    stop_row = gl.minimum(sequence.q_stop, stop_row)
    stop_key = sequence.stop_key
    if OPTIONS.HAS_RIGHT:
        last = sequence.shift.to(gl.int64) + stop_row
        stop_key = gl.minimum(gl.maximum(last, 0), stop_key.to(gl.int64)).to(gl.int32)
    seen = gl.minimum(stop_key - first, SPAN)
    tiles = gl.maximum((seen + BLOCK - 1) // BLOCK, 0)
    return Part(sequence, stop_row, first, stop_key, tiles)


@gluon.jit
def _load_keys(key, part, group, barrier, tile, params, OPTIONS: gl.constexpr):
    """Load a tile of keys; those past the last one become zeros."""
    ROWS: gl.constexpr = OPTIONS.BOX_ROWS
    PAGE_SIZE: gl.constexpr = OPTIONS.PAGE_SIZE
    sizes = params.sizes
    for i in gl.static_range(BLOCK // ROWS):
        box = tile.slice(i * ROWS, ROWS, dim=2)
        at = key + i * ROWS
        if PAGE_SIZE == 0:
            # a bound that nobody checked reads other keys, but no other memory
            start = gl.maximum(part.sequence.k_start, 0)
            load_rows(params.k_desc, start, part.stop_key, at, group, barrier, box)
        else:
            column, slot = at // PAGE_SIZE, at % PAGE_SIZE
            exists = at < part.stop_key
            page = gl.load(part.sequence.table + column, mask=exists, other=0)
            page = gl.minimum(page.to(gl.uint32), (sizes.num_rows - 1).to(gl.uint32)).to(gl.int32)
            size = gl.maximum(gl.minimum(part.stop_key - (at - slot), PAGE_SIZE), 0)
            load_rows(params.k_desc, page * sizes.page_rows, size, slot, group, barrier, box)


@gluon.jit
def _produce(params, pipelines, OPTIONS: gl.constexpr):
    """Load the queries and keys of a program's pieces of work."""
    queries, keys = pipelines.q, pipelines.k
    pieces = _pieces(params, OPTIONS)
    number = gl.program_id(0)
    fill = 0
    n = 0
    while number < pieces:
        row, group, first = _work_of(number, params, OPTIONS)
        stop_row = gl.minimum(row + OPTIONS.TOKENS, params.sizes.stop_row)
        while row < stop_row:
            part = _part_of(row, stop_row, first, params, OPTIONS)
            queries.producer_acquire(fill)
            barrier = queries.full_barrier(fill)
            mbarrier.expect(barrier, params.q_desc.block_type.nbytes)
            head = group * OPTIONS.GROUP_SIZE
            tile = queries.tile(fill)
            load_rows(params.q_desc, row, part.stop_row - row, 0, head, barrier, tile)
            for t in range(part.tiles):
                keys.producer_acquire(n)
                barrier = keys.full_barrier(n)
                boxes_of_tile: gl.constexpr = BLOCK // OPTIONS.BOX_ROWS
                mbarrier.expect(barrier, boxes_of_tile * params.k_desc.block_type.nbytes)
                key = first + t * BLOCK
                _load_keys(key, part, group, barrier, keys.tile(n), params, OPTIONS)
                n += 1
            fill += 1
            row = part.stop_row
        number += gl.num_programs(0)


@gluon.jit
def _consume(params, pipelines, OPTIONS: gl.constexpr, INDEX: gl.constexpr):
    """Every tile of keys in turn."""
    TOKENS: gl.constexpr = OPTIONS.TOKENS
    GROUP_SIZE: gl.constexpr = OPTIONS.GROUP_SIZE
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    NUM_HEADS: gl.constexpr = OPTIONS.GROUPS * GROUP_SIZE
    COLUMNS: gl.constexpr = TOKENS * GROUP_SIZE
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, COLUMNS, 16])
    queries, keys, sizes = pipelines.q, pipelines.k, params.sizes
    zeros = gl.zeros([BLOCK, COLUMNS], gl.float32, layout)
    column = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    pieces = _pieces(params, OPTIONS)
    number = gl.program_id(0)
    fill = 0
    n = 0
    while number < pieces:
        row, group, first = _work_of(number, params, OPTIONS)
        stop_row = gl.minimum(row + TOKENS, sizes.stop_row)
        while row < stop_row:
            part = _part_of(row, stop_row, first, params, OPTIONS)
            token = row + column // GROUP_SIZE
            weight = gl.where(token < part.stop_row, 1.0, 0.0)
            if params.pointers.weights is not None:
                at = token.to(gl.int64) * NUM_HEADS + group * GROUP_SIZE + column % GROUP_SIZE
                at += params.pointers.weights
                weight = gl.load(at, mask=token < part.stop_row, other=0.0)
            weight = gl.expand_dims(weight, 0)
            queries.consumer_wait(fill)
            q = queries.tile(fill).reshape([COLUMNS, OPTIONS.WIDTH]).permute((1, 0))
            begin = (INDEX + CONSUMERS - n % CONSUMERS) % CONSUMERS
            for t in range(begin, part.tiles, CONSUMERS):
                keys.consumer_wait(n + t)
                k = keys.tile(n + t).reshape([BLOCK, OPTIONS.WIDTH])
                s = warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
                s = warpgroup_mma_wait(0, deps=[s])
                keys.consumer_release(n + t)
                if OPTIONS.IS_RELU:
                    s = gl.maximum(s, 0.0)
                total = gl.sum(gl.reshape(s * weight, [BLOCK, TOKENS, GROUP_SIZE]), 2)
                _store(total, row, group, first + t * BLOCK, part, params, OPTIONS)
            queries.consumer_release(fill)
            fill += 1
            n += part.tiles
            row = part.stop_row
        number += gl.num_programs(0)


@gluon.jit
def _store(total, row, group, key, part, params, OPTIONS: gl.constexpr):
    """Store the scores, (BLOCK, TOKENS), of the keys that tokens see."""
    layout: gl.constexpr = total.type.layout
    sizes = params.sizes
    token = row + gl.arange(0, OPTIONS.TOKENS, gl.SliceLayout(0, layout))
    key += gl.arange(0, BLOCK, gl.SliceLayout(1, layout))
    at = ((token - sizes.first_row) * OPTIONS.GROUPS + group).to(gl.int64) * sizes.num_keys
    at = gl.expand_dims(at, 0) + gl.expand_dims(key, 1)
    is_seen = gl.expand_dims(token < part.stop_row, 0) & gl.expand_dims(key < part.stop_key, 1)
    if OPTIONS.HAS_RIGHT:
        position = gl.expand_dims(part.sequence.shift + token, 0)
        is_seen = is_seen & (gl.expand_dims(key, 1) <= position)
    gl.store(params.pointers.scores + at, total, mask=is_seen)


@gluon.jit
def _run_partition(params, pipelines, OPTIONS: gl.constexpr, NUMBER: gl.constexpr):
    if NUMBER < OPTIONS.CONSUMERS:
        _consume(params, pipelines, OPTIONS, NUMBER)
    elif NUMBER == OPTIONS.CONSUMERS:
        _produce(params, pipelines, OPTIONS)


@gluon.jit(do_not_specialize=IndexSizes._fields)
def _hopper_index_scores_kernel(
    q_desc, k_desc, pointers,
    first_row, stop_row, num_keys, batch, num_rows, max_pages, stride_table, page_rows,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """The arguments are those of `index_arguments.py`. Sizes come one by one: Triton compiles a
    kernel anew for the divisors of a number in a tuple."""
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = q_desc.layout
    k_layout: gl.constexpr = k_desc.layout
    box: gl.constexpr = [1, 1, OPTIONS.TOKENS, OPTIONS.GROUP_SIZE, OPTIONS.WIDTH]
    q_shape: gl.constexpr = boxes(OPTIONS.Q_STAGES, box)
    k_shape: gl.constexpr = shape_of_tiles(OPTIONS.KEY_STAGES, k_desc.block_shape, BLOCK)
    queries = new_pipeline(dtype, q_shape, q_layout, OPTIONS.Q_STAGES, CONSUMERS, 1)
    # a tile of keys has one reader
    keys = new_pipeline(dtype, k_shape, k_layout, OPTIONS.KEY_STAGES, 1, 1)
    pipelines = IndexPipelines(queries, keys)
    sizes = IndexSizes(
        first_row, stop_row, num_keys, batch, num_rows, max_pages, stride_table, page_rows
    )
    params = IndexParams(q_desc, k_desc, pointers, sizes)
    fence_async_shared()
    run_partitions(
        _run_partition, (params, pipelines, OPTIONS), warps_of(CONSUMERS, 4),
        registers_of(CONSUMERS, OPTIONS.REGISTERS),
    )  # fmt: skip
