"""Four warps that make 16-bit numbers of 8-bit keys and values, each of which is exactly one.

Of float8 queries and keys, scores are float8 products, at twice the rate. Hopper adds these up in
14 bits, which is close enough for the terms of a score and not for those of a context: so
probabilities are float16, and the values, too. Beside queries of 16 bits keys are converted as
well. A tile goes from one place in shared memory to another, once for all consumers: transposed
products, whose operand of values would be converted in registers, had every consumer convert all of
them, and would send the probabilities through shared memory besides.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_paged_attn.backends.triton.hopper.consumer import clear_before
from torch_paged_attn.backends.triton.hopper.pipeline import new_pipeline
from torch_paged_attn.backends.triton.hopper.tma import boxes
from torch_paged_attn.backends.triton.hopper.work_info import FIRST_KEY, KV_STOP, NUM_KV_TILES

# registers of a converter's thread, and the rows that it converts at a time
CONVERTER_REGISTERS = gl.constexpr(56)
ROWS = gl.constexpr(128)
# stages of tiles in 16 bits
STAGES = gl.constexpr(2)

# four 8-bit numbers in a register to float16: 0x6400 + n is 1024 + n, for n from 0 to 255
_E5M2_PTX = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")
_INT8_PTX = gl.constexpr(
    "{.reg .b32 bytes, offset; xor.b32 bytes, $2, 0x80808080; mov.b32 offset, 0x64806480;"
    " prmt.b32 $0, bytes, 0x64646464, 0x4140; prmt.b32 $1, bytes, 0x64646464, 0x4342;"
    " sub.f16x2 $0, $0, offset; sub.f16x2 $1, $1, offset;}"
)


@gluon.jit
def new_tiles(
    dtype: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, CONSUMERS: gl.constexpr
):
    """A pipeline of tiles of 16-bit keys or values."""
    layout: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=5)
    shape: gl.constexpr = [STAGES, 1, 1, HEIGHT, 1, WIDTH]
    return new_pipeline(dtype, shape, layout, STAGES, CONSUMERS, 1)


@gluon.jit
def new_results(desc, CONSUMERS: gl.constexpr):
    """A box of results for each consumer."""
    dtype: gl.constexpr = desc.dtype
    layout: gl.constexpr = desc.layout
    shape: gl.constexpr = boxes(CONSUMERS, desc.block_shape)
    return gl.allocate_shared_memory(dtype, shape, layout)


@gluon.constexpr_function
def _layout(width):
    """Rows of a tile in the threads of four warps, by eights: what a thread writes at once."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _as_float16(x):
    if x.dtype == gl.float8e4nv:
        return x.to(gl.float16)
    else:
        asm: gl.constexpr = _INT8_PTX if x.dtype == gl.int8 else _E5M2_PTX
        return gl.inline_asm_elementwise(asm, "=&r,=&r,r", [x], gl.float16, True, 4)


@gluon.jit
def _convert(n, stored, tiles, first):
    """Convert fill n of a pipeline into fill n of another; rows before row `first` become zeros."""
    HEIGHT: gl.constexpr = tiles.tiles.shape[3]
    WIDTH: gl.constexpr = tiles.tiles.shape[5]
    layout: gl.constexpr = _layout(WIDTH)
    stored.consumer_wait(n)
    tiles.producer_acquire(n)
    source = stored.tile(n).reshape([HEIGHT, WIDTH])
    target = tiles.tile(n).reshape([HEIGHT, WIDTH])
    AT_ONCE: gl.constexpr = min(HEIGHT, ROWS)
    for i in gl.static_range(HEIGHT // AT_ONCE):
        x = _as_float16(source.slice(i * AT_ONCE, AT_ONCE).load(layout))
        target.slice(i * AT_ONCE, AT_ONCE).store(x.to(target.dtype))
    if first > 0:
        clear_before(target, first)
    fence_async_shared()
    stored.consumer_release(n)
    mbarrier.arrive(tiles.full_barrier(n), count=1)


@gluon.jit
def convert_tiles(pipelines, OPTIONS: gl.constexpr):
    """Convert the values of every tile that is published, and keys if they are to be, in the order
    in which consumers take them: keys before the values of the tile before."""
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    HAS_LEFT: gl.constexpr = OPTIONS.HAS_LEFT
    stored_v, values, work_info = pipelines.stored_v, pipelines.v, pipelines.work_info
    n = 0
    tile = 0
    work_info.wait(0)
    num_kv_tiles = work_info.get(0, NUM_KV_TILES)
    while num_kv_tiles > 0:
        # the first row that is seen of a tile of values: none is hidden but by a window
        first = 0
        if HAS_LEFT:
            first = work_info.get(tile, FIRST_KEY) - work_info.get(tile, KV_STOP)
        if OPTIONS.CONVERTS_K:
            _convert(n, pipelines.stored_k, pipelines.k, 0)
        for i in range(1, num_kv_tiles + 1):
            if OPTIONS.CONVERTS_K and i < num_kv_tiles:
                _convert(n + 1, pipelines.stored_k, pipelines.k, 0)
            if HAS_LEFT:
                first += BLOCK_N
            _convert(n, stored_v, values, first)
            n += 1
        tile += 1
        work_info.wait(tile)
        num_kv_tiles = work_info.get(tile, NUM_KV_TILES)
