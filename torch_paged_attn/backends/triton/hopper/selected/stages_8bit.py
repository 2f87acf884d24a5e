"""Latents of 8 bits with scales, rope keys and converted latents in shared memory.

A block of 64 keys has four groups of 128 columns, which share a scale of a key. Groups follow each
other through two rings: as they lie in memory, and converted to bfloat16, which is exact. What a
block has besides, rope keys, scales, and which keys are seen, is there for two blocks.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_paged_attn.backends.triton.hopper.common.pipeline import new_pipeline
from torch_paged_attn.backends.triton.hopper.common.results import seen_as
from torch_paged_attn.backends.triton.hopper.common.tma import async_load_pointers
from torch_paged_attn.backends.triton.hopper.common.work_info import (
    WORD,
    new_work_info,
    thread_barrier,
)
from torch_paged_attn.backends.triton.hopper.mla.pipeline import (
    HALF,
    KEYS,
    ROPE,
    new_seen_keys,
    new_weights,
    opaque_zero,
)

# columns of a group, pairs of these, groups of a block, and blocks of a pair
SCALED, PAIRS, GROUPS, BLOCKS = (gl.constexpr(i) for i in (128, 64, 4, 2))
# blocks whose scales have room. The scales of block n may be written once the scores of block n - 2
# are there: block n - 3 is done then, and its scales are read
SCALE_STAGES = gl.constexpr(3)
# numbers of 8 bits in a piece of 16 bytes
BYTES = gl.constexpr(16)

# four e4m3 in a register to bfloat16, by way of float16 and float32: there is no shorter one
_BFLOAT16_PTX = gl.constexpr(
    "{.reg .b16 low, high, a, b, c, d; .reg .b32 x, y; .reg .f32 e, f, g, h;"
    " mov.b32 {low, high}, $2; cvt.rn.f16x2.e4m3x2 x, low; cvt.rn.f16x2.e4m3x2 y, high;"
    " mov.b32 {a, b}, x; mov.b32 {c, d}, y;"
    " cvt.f32.f16 e, a; cvt.f32.f16 f, b; cvt.f32.f16 g, c; cvt.f32.f16 h, d;"
    " cvt.rn.bf16x2.f32 $0, f, e; cvt.rn.bf16x2.f32 $1, h, g;}"
)


class StoredPipelines(NamedTuple):
    """All of these, and the words about each tile (`work_info.py`)."""

    q: Any
    stored: Any  # groups of 8 bits: (STAGES, KEYS, SCALED)
    k: Any  # the same of 16 bits: (CONVERTED, KEYS, SCALED)
    ropes: Any  # (BLOCKS, KEYS, ROPE); with a block's, its scales arrive
    scales: Any  # (SCALE_STAGES, KEYS, GROUPS) float32
    seen: Any
    work_info: Any
    split: Any  # where the queries lie, as float16: (2, heads, HALF) (`pairs_8bit.py`)
    weights: Any  # of a block, for each of its scales


@gluon.jit
def new_stored_pipelines(queries, rope_dtype: gl.constexpr, OPTIONS: gl.constexpr):
    """Room for all of them beside these queries."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    STAGES: gl.constexpr = OPTIONS.STAGES
    CONVERTED: gl.constexpr = OPTIONS.CONVERTED
    # each of the producer's threads says when what it copied has arrived
    if OPTIONS.CONVERTERS == 0:
        stored = new_pipeline(gl.int16, [STAGES, KEYS, PAIRS], swizzled, STAGES, 1, 128)
        keys = stored
    else:
        stored = new_pipeline(gl.float8e4nv, [STAGES, KEYS, SCALED], plain, STAGES, 1, 128)
        keys = new_pipeline(rope_dtype, [CONVERTED, KEYS, SCALED], swizzled, CONVERTED, 1, 1)
    ropes = new_pipeline(rope_dtype, [BLOCKS, KEYS, ROPE], swizzled, BLOCKS, 1, 128)
    scales = gl.allocate_shared_memory(gl.float32, [SCALE_STAGES, KEYS, GROUPS], plain)
    seen, work_info = new_seen_keys(), new_work_info(2, queries.full)
    of_products: gl.constexpr = rope_dtype if OPTIONS.CONVERTERS > 0 else gl.float16
    shape: gl.constexpr = [2, OPTIONS.PACKED_HEADS, HALF]
    split = seen_as(queries.halves, shape, swizzled, gl.float16)
    weights = new_weights(of_products, GROUPS * OPTIONS.PACKED_HEADS)
    return StoredPipelines(queries, stored, keys, ropes, scales, seen, work_info, split, weights)


@gluon.constexpr_function
def _copied_layout(piece):
    """Of rows of pieces; a thread has the rows that it has in `producer.py`."""
    return gl.BlockedLayout([1, piece], [4, 8], [4, 1], [1, 0])


@gluon.jit
def _copy(target, pointer, row, is_seen, COLUMNS: gl.constexpr, PIECE: gl.constexpr):
    """Copy COLUMNS columns of rows that begin `row` pieces of 16 bytes, PIECE numbers, behind
    `pointer`; zeros where a key is not seen."""
    layout: gl.constexpr = _copied_layout(PIECE)
    by_row: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.expand_dims(gl.convert_layout(row, by_row), 1)
    is_seen = gl.expand_dims(gl.convert_layout(is_seen, by_row), 1)
    column = gl.expand_dims(gl.arange(0, COLUMNS, gl.SliceLayout(0, layout)), 0)
    async_load_pointers(target, pointer + (row * PIECE + column), is_seen)


@gluon.jit
def stage_of(n, ring, PLACE: gl.constexpr, FILLS: gl.constexpr):
    """Of fill number PLACE of the FILLS fills of pair n: its stage in a ring, and its phase."""
    if ring.STAGES == FILLS:
        return PLACE + opaque_zero(FILLS * n + PLACE), n & 1
    else:
        fill = n * FILLS + PLACE
        return fill % ring.STAGES, (fill // ring.STAGES) & 1


@gluon.jit
def copy_stored_block(n, rows, params, pipelines, BLOCK: gl.constexpr):
    """Copy block number BLOCK of pair n, of keys in these rows, and say which of them are seen."""
    pointers, stored = params.pointers, pipelines.stored
    # consumers that convert read scales with the first group; others have no use for them before
    # the last, and these copies would wait for the block that has the room
    IN_PAIRS: gl.constexpr = stored.tiles.dtype == gl.int16
    if IN_PAIRS:
        _copy_ropes(n, rows, params, pipelines, BLOCK)
    for i in gl.static_range(GROUPS):
        stage, phase = stage_of(n, stored, GROUPS * BLOCK + i, BLOCKS * GROUPS)
        mbarrier.wait(stored.empty.index(stage), phase ^ 1)
        tile = stored.tiles.index(stage)
        if IN_PAIRS:
            latents = pointers.latents.to(gl.pointer_type(gl.int16), bitcast=True) + i * PAIRS
            _copy(tile, latents, rows.latent, rows.is_seen, PAIRS, 8)
        else:
            latents = pointers.latents + i * SCALED
            _copy(tile, latents, rows.latent, rows.is_seen, SCALED, BYTES)
        async_copy.mbarrier_arrive(stored.full.index(stage), increment_count=False)
    if not IN_PAIRS:
        _copy_ropes(n, rows, params, pipelines, BLOCK)


@gluon.jit
def _copy_ropes(n, rows, params, pipelines, BLOCK: gl.constexpr):
    """Copy rope keys and scales of a block, and say which of its keys are seen."""
    pointers, ropes = params.pointers, pipelines.ropes
    block = 2 * n + BLOCK
    stage, phase = stage_of(n, ropes, BLOCK, BLOCKS)
    mbarrier.wait(ropes.empty.index(stage), phase ^ 1)
    pipelines.seen.put(rows.is_seen, BLOCK)
    _copy(ropes.tiles.index(stage), pointers.ropes, rows.latent, rows.is_seen, ROPE, 8)
    scales = pipelines.scales.index(block % SCALE_STAGES)
    _copy(scales, pointers.scales, rows.latent, rows.is_seen, GROUPS, 4)
    async_copy.mbarrier_arrive(ropes.full.index(stage), increment_count=False)


@gluon.jit
def _as_bfloat16(x):
    """e4m3, a multiple of four in a thread, as bfloat16."""
    asm: gl.constexpr = _BFLOAT16_PTX
    return gl.inline_asm_elementwise(asm, "=&r,=&r,r", [x], gl.bfloat16, True, 4)


@gluon.jit
def _convert_group(n, stored, keys):
    """Convert fill n of one ring into fill n of the other."""
    # a thread has eight numbers in a row, 16 bytes when they are converted
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    stored.consumer_wait(n)
    keys.producer_acquire(n)
    keys.tile(n).store(_as_bfloat16(stored.tile(n).load(layout)))
    fence_async_shared()
    thread_barrier()  # the thread that arrives has not read and written all of these
    stored.consumer_release(n)
    mbarrier.arrive(keys.full_barrier(n), count=1)


@gluon.jit
def convert_latents(pipelines, OPTIONS: gl.constexpr, W: gl.constexpr):
    """As group of warps W of CONVERTERS, convert every group whose turn it is."""
    CONVERTERS: gl.constexpr = OPTIONS.CONVERTERS
    n = 0
    tile = 0
    pipelines.q.wait(0)
    pairs = pipelines.work_info.get(0, WORD.NUM_KV_TILES)
    while pairs > 0:
        for _ in range(pairs * (2 * GROUPS // CONVERTERS)):
            _convert_group(CONVERTERS * n + W, pipelines.stored, pipelines.k)
            n += 1
        tile += 1
        pipelines.q.wait(tile)
        pairs = pipelines.work_info.get(tile, WORD.NUM_KV_TILES)
