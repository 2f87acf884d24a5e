"""Four warps that make float16 of float8 values: see `float8.py`."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_paged_attn.backends.triton.hopper.consumer import clear_before
from torch_paged_attn.backends.triton.hopper.pipeline import new_pipeline
from torch_paged_attn.backends.triton.hopper.work_info import FIRST_KEY, KV_STOP, NUM_KV_TILES

# registers of a converter's thread, and the rows that it converts at a time
CONVERTER_REGISTERS = gl.constexpr(56)
ROWS = gl.constexpr(32)
# stages of values in 16 bits
STAGES = gl.constexpr(2)


@gluon.jit
def new_values(ROWS_OF_TILE: gl.constexpr, WIDTH: gl.constexpr, CONSUMERS: gl.constexpr):
    """A pipeline of tiles of values in float16."""
    layout: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=128, element_bitwidth=16, rank=5
    )
    shape: gl.constexpr = [STAGES, 1, 1, ROWS_OF_TILE, 1, WIDTH]
    return new_pipeline(gl.float16, shape, layout, STAGES, CONSUMERS, 1)


@gluon.constexpr_function
def _one_of_each(count, box):
    return [count, *box]


@gluon.jit
def new_results(desc, CONSUMERS: gl.constexpr):
    """A box of results of each consumer."""
    dtype: gl.constexpr = desc.dtype
    layout: gl.constexpr = desc.layout
    shape: gl.constexpr = _one_of_each(CONSUMERS, desc.block_shape)
    return gl.allocate_shared_memory(dtype, shape, layout)


@gluon.constexpr_function
def _layout(width):
    """Rows of values in the threads of four warps, by eights: what a thread writes at once."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def convert_values(pipelines, OPTIONS: gl.constexpr):
    """Convert the values of every tile that is published, as four warps."""
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    WIDTH: gl.constexpr = OPTIONS.WIDTH_V
    layout: gl.constexpr = _layout(WIDTH)
    stored, values, work_info = pipelines.stored_v, pipelines.v, pipelines.work_info
    n = 0
    tile = 0
    work_info.wait(0)
    num_kv_tiles = work_info.get(0, NUM_KV_TILES)
    while num_kv_tiles > 0:
        first_key = work_info.get(tile, FIRST_KEY)
        kv_start = work_info.get(tile, KV_STOP)
        for _ in range(num_kv_tiles):
            kv_start -= BLOCK_N
            stored.consumer_wait(n)
            values.producer_acquire(n)
            source = stored.tile(n).reshape([BLOCK_N, WIDTH])
            target = values.tile(n).reshape([BLOCK_N, WIDTH])
            for i in gl.static_range(BLOCK_N // ROWS):
                x = source.slice(i * ROWS, ROWS).load(layout)
                target.slice(i * ROWS, ROWS).store(x.to(gl.float16))
            if OPTIONS.HAS_LEFT and kv_start < first_key:
                clear_before(target, first_key - kv_start)
            fence_async_shared()
            stored.consumer_release(n)
            mbarrier.arrive(values.full_barrier(n), count=1)
            n += 1
        tile += 1
        work_info.wait(tile)
        num_kv_tiles = work_info.get(tile, NUM_KV_TILES)
