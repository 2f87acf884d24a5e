"""Four warps that convert 8-bit keys and values to 16 bits, which is exact.

Scores of float8 queries and keys are products of float8, at twice the rate. Hopper keeps 14 bits of
the sums of such products. That is close enough for the terms of a score, but not for weighted sums
of values: so probabilities and values are float16. Keys are converted if queries have 16 bits.

A tile is converted from one place in shared memory to another, once for all consumers. With
transposed products, whose left operand may be converted in registers, each consumer would convert
all values, and probabilities would have to go through shared memory.

Where values have scales by token, probabilities are multiplied by them: they and values are
bfloat16, whose range is float32's.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_paged_attn.backends.triton.hopper.common.clear import clear_before
from torch_paged_attn.backends.triton.hopper.common.pipeline import new_pipeline
from torch_paged_attn.backends.triton.hopper.common.results import seen_as
from torch_paged_attn.backends.triton.hopper.common.tma import boxes
from torch_paged_attn.backends.triton.hopper.common.work_info import WORD
from torch_paged_attn.backends.triton.hopper.forward.producer import key_range_of
from torch_paged_attn.backends.triton.hopper.forward.scales import keep_scales, load_scales

# registers of a converter's thread, and the rows that it converts at a time
CONVERTER_REGISTERS = gl.constexpr(56)
ROWS = gl.constexpr(128)
# stages of tiles in 16 bits
STAGES = gl.constexpr(2)

# four 8-bit numbers in a register to float16. An E5M2 number is the upper byte of a float16. In
# float16 the bits 0x6400 + n are the number 1024 + n, for n from 0 to 255; here n is int8 + 128
_E5M2_PTX = gl.constexpr("prmt.b32 $0, $2, 0, 0x1404; prmt.b32 $1, $2, 0, 0x3424;")
_INT8_PTX = gl.constexpr(
    "{.reg .b32 bytes, offset; xor.b32 bytes, $2, 0x80808080; mov.b32 offset, 0x64806480;"
    " prmt.b32 $0, bytes, 0x64646464, 0x4140; prmt.b32 $1, bytes, 0x64646464, 0x4342;"
    " sub.f16x2 $0, $0, offset; sub.f16x2 $1, $1, offset;}"
)
# four bytes of two int4 each to bfloat16 pairs. In bfloat16 the bits 0x4300 + n are 128 + n; here n
# is int4 + 8. The upper bits of a byte become the upper half of a pair
_INT4_PTX = gl.constexpr(
    "{.reg .b32 x, y, offset; mov.b32 offset, 0x43084308;"
    + "".join(
        f" shr.b32 x, $4, {8 * i}; shl.b32 y, x, 12; lop3.b32 x, x, y, 0xFFFF0000, 0xD8;"
        f" lop3.b32 x, x, 0x000F000F, offset, 0x6A; sub.rn.bf16x2 ${i}, x, offset;"
        for i in range(4)
    )
    + "}"
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
    """Room for a box of results for each consumer."""
    dtype: gl.constexpr = desc.dtype
    layout: gl.constexpr = desc.layout
    shape: gl.constexpr = boxes(CONSUMERS, desc.block_shape)
    return gl.allocate_shared_memory(dtype, shape, layout)


@gluon.constexpr_function
def _layout(width):
    """A layout of rows of `width` numbers, of which a thread of four warps has eight in a row: what
    it writes at once."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 8], [32 // across, across], [4, 1], [1, 0])


@gluon.constexpr_function
def _layout_of_bytes(width):
    """The same of `width` int4 in bytes, of which a thread has four in a row."""
    across = min(32, width // 8)
    return gl.BlockedLayout([1, 4], [32 // across, across], [4, 1], [1, 0])


@gluon.jit
def _as_float16(x):
    """8-bit numbers, a multiple of four in a thread, as float16."""
    if x.dtype == gl.float8e4nv:
        return x.to(gl.float16)
    else:
        asm: gl.constexpr = _INT8_PTX if x.dtype == gl.int8 else _E5M2_PTX
        return gl.inline_asm_elementwise(asm, "=&r,=&r,r", [x], gl.float16, True, 4)


@gluon.jit
def _as_pairs(x):
    """Bytes of two int4 each, a multiple of four in a thread, as two bfloat16 in an int32."""
    return gl.inline_asm_elementwise(_INT4_PTX, "=&r,=&r,=&r,=&r,r", [x], gl.int32, True, 4)


@gluon.jit
def _convert(n, stored, tiles, first, scales, loaded):
    """Convert fill n of the pipeline `stored` into fill n of the pipeline `tiles`. Rows before row
    `first` become zeros. `loaded`: what `scales`, unless it is None, are to hold beside it."""
    HEIGHT: gl.constexpr = tiles.tiles.shape[3]
    WIDTH: gl.constexpr = tiles.tiles.shape[5]
    layout: gl.constexpr = _layout(WIDTH)
    stored.consumer_wait(n)
    tiles.producer_acquire(n)
    target = tiles.tile(n).reshape([HEIGHT, WIDTH])
    AT_ONCE: gl.constexpr = min(HEIGHT, ROWS)
    if scales is not None:
        keep_scales(n, loaded, scales)
    if stored.tiles.dtype == gl.uint8:
        HALF: gl.constexpr = WIDTH // 2
        by_four: gl.constexpr = _layout_of_bytes(WIDTH)
        pairs: gl.constexpr = gl.NVMMASharedLayout(128, 32, 5)
        source = stored.tile(n).reshape([HEIGHT, HALF])
        into = seen_as(tiles.tile(n), [1, 1, HEIGHT, 1, HALF], pairs, gl.int32)
        into = into.reshape([HEIGHT, HALF])
        for i in gl.static_range(HEIGHT // AT_ONCE):
            x = _as_pairs(source.slice(i * AT_ONCE, AT_ONCE).load(by_four))
            into.slice(i * AT_ONCE, AT_ONCE).store(x)
    else:
        source = stored.tile(n).reshape([HEIGHT, WIDTH])
        for i in gl.static_range(HEIGHT // AT_ONCE):
            x = _as_float16(source.slice(i * AT_ONCE, AT_ONCE).load(layout))
            target.slice(i * AT_ONCE, AT_ONCE).store(x.to(target.dtype))
    if first > 0:
        clear_before(target, first)
    fence_async_shared()
    stored.consumer_release(n)
    mbarrier.arrive(tiles.full_barrier(n), count=1)


@gluon.jit
def convert_tiles(params, pipelines, OPTIONS: gl.constexpr):
    """Convert the values of every tile that is published, and keys if CONVERTS_K, in the order in
    which consumers read them: a tile of keys, then the values of the tile of keys before it."""
    BLOCK_N: gl.constexpr = OPTIONS.BLOCK_N
    HAS_LEFT: gl.constexpr = OPTIONS.HAS_LEFT
    stored_v, values, work_info = pipelines.stored_v, pipelines.v, pipelines.work_info
    scales = pipelines.scales
    n = 0
    tile = 0
    work_info.wait(0)
    num_kv_tiles = work_info.get(0, WORD.NUM_KV_TILES)
    while num_kv_tiles > 0:
        # the first row of a tile of values that is seen; only a window hides rows before it
        first = 0
        if HAS_LEFT:
            first = work_info.get(tile, WORD.FIRST_KEY) - work_info.get(tile, WORD.KV_STOP)
        loaded = 0
        if OPTIONS.BY_TOKEN:
            keys, start = key_range_of(params, work_info, tile, OPTIONS)
            start -= BLOCK_N
            loaded = load_scales(start, keys, params, OPTIONS, 4)
        if OPTIONS.CONVERTS_K:
            _convert(n, pipelines.stored_k, pipelines.k, 0, scales, loaded)
        if OPTIONS.BY_TOKEN:
            start -= BLOCK_N
            loaded = load_scales(start, keys, params, OPTIONS, 4)
        for i in range(1, num_kv_tiles + 1):
            if OPTIONS.CONVERTS_K and i < num_kv_tiles:
                _convert(n + 1, pipelines.stored_k, pipelines.k, 0, scales, loaded)
            if OPTIONS.BY_TOKEN:
                # on their way while values are converted
                start -= BLOCK_N
                loaded = load_scales(start, keys, params, OPTIONS, 4)
            if HAS_LEFT:
                first += BLOCK_N
            _convert(n, stored_v, values, first, None, 0)
            n += 1
        tile += 1
        work_info.wait(tile)
        num_kv_tiles = work_info.get(tile, WORD.NUM_KV_TILES)
