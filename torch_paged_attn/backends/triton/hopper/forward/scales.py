"""Scales of 8-bit queries, keys and values, by head or by token and head.

Those by head are descales: of queries and keys they are part of the factor of scores, which is one
number for a tile; that of values is multiplied into the result.

Of those by token and head, the keys' multiply columns of scores, and the values' columns of
probabilities. The converter loads the scales of a tile of keys and of its values, ahead of the
tile, and leaves both beside the keys: consumers need those of the values before the values
themselves. Where nothing is converted, a producer does, which is one more of the keys' pipeline.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from torch_paged_attn.backends.triton.hopper.common.work_info import WORD, thread_barrier
from torch_paged_attn.backends.triton.hopper.forward.producer import key_range_of
from torch_paged_attn.backends.triton.hopper.forward.shared_memory import stages_of_scales

# scores times this are 0; what is hidden, minus infinity, times this is not
LEAST_FACTOR = gl.constexpr(2.0**-110)


@gluon.constexpr_function
def columns_at_once(width, converts):
    """Columns of values that one instruction multiplies: with four warpgroups, the assembler has no
    registers for 256."""
    return min(width, 128) if converts else width


@gluon.jit
def _of_head(descale, b, head, stride_batch, stride_head, is_sequence):
    """A descale of a KV head; 1 where none was given."""
    if descale is None:
        return 1.0
    else:
        at = descale + b * stride_batch + head * stride_head
        return gl.load(at, mask=is_sequence, other=1.0)


@gluon.jit
def descales_of(b, head, params, OPTIONS: gl.constexpr):
    """Of a query head of sequence b: whether the factor of scores is negative, its size, and the
    factor of values."""
    pointers, scalars = params.pointers, params.scalars
    kv_head = head // OPTIONS.GROUP_SIZE
    is_sequence = b < params.sizes.batch
    k_descale, v_descale = pointers.k_descale, pointers.v_descale
    if OPTIONS.BY_TOKEN:
        k_descale, v_descale = None, None
    of_q = _of_head(
        pointers.q_descale, b, kv_head, scalars.q_descale_batch, scalars.q_descale_head, is_sequence
    )
    of_k = _of_head(
        k_descale, b, kv_head, scalars.k_descale_batch, scalars.k_descale_head, is_sequence
    )
    of_v = _of_head(
        v_descale, b, kv_head, scalars.v_descale_batch, scalars.v_descale_head, is_sequence
    )
    of_scores = of_q * of_k * gl.full([], 1.0, gl.float32)
    return of_scores < 0, gl.abs(of_scores), of_v


@gluon.jit
def factor_of_scores(scale_log2, descale):
    """`scale_log2` times the size of a descale; its sign is the queries'."""
    factor = scale_log2 * descale
    return gl.where(factor < LEAST_FACTOR, LEAST_FACTOR, factor)


@gluon.jit
def _turned(q):
    """Queries with the other sign."""
    if q.dtype == gl.float8e4nv:
        bits = gl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [q.to(gl.int8, bitcast=True)], gl.int8, True, 4
        )
        return bits.to(q.dtype, bitcast=True)
    else:
        return -q


@gluon.jit
def take_queries(box, is_turned, layout: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Queries, which `is_turned` makes negative, as the operand of products."""
    smem = box.reshape([ROWS, WIDTH])
    if is_turned:
        smem.store(_turned(smem.load(layout)))
        fence_async_shared()
        thread_barrier()
    return smem


stages_of = gluon.constexpr_function(stages_of_scales)
OF_KEYS, OF_VALUES = gl.constexpr(0), gl.constexpr(1)


@gluon.jit
def new_scales(OPTIONS: gl.constexpr):
    """Room for the scales of some tiles, a row for keys and one for values."""
    layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    shape: gl.constexpr = [2 * stages_of(OPTIONS), OPTIONS.BLOCK_N]
    return gl.allocate_shared_memory(gl.float32, shape, layout)


@gluon.jit
def _places(j, page_size, seen, keys, params):
    """Pages of keys number j, and their slots there."""
    page = gl.load(keys.table + j // page_size, mask=seen, other=0)
    # a bad id that nobody checked reads the last page: wrong, but inside the cache
    last = (params.sizes.num_pages - 1).to(gl.uint32)
    return gl.minimum(page.to(gl.uint32), last).to(gl.int32), j % page_size


@gluon.jit
def load_scales(start, keys, params, OPTIONS: gl.constexpr, WARPS: gl.constexpr):
    """The scales of keys from number `start` on, and of their values; 0 where no query sees one.
    WARPS: of the partition that loads them."""
    PAGE_SIZE: gl.constexpr = OPTIONS.PAGE_SIZE
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    pointers, scalars = params.pointers, params.scalars
    j = start + gl.arange(0, OPTIONS.BLOCK_N, layout)
    seen = (j >= keys.first_key) & (j < keys.key_len)
    page = gl.zeros_like(j)
    slot = j
    if OPTIONS.IS_ROWS:
        page += keys.k_start
    elif PAGE_SIZE == 0:
        slot += keys.k_start
    elif PAGE_SIZE < 0:
        page, slot = _places(j, scalars.page_size, seen, keys, params)
    else:
        page, slot = _places(j, PAGE_SIZE, seen, keys, params)
    page, slot = page.to(gl.int64), slot.to(gl.int64)
    of_keys = pointers.k_descale + keys.kv_head * scalars.k_descale_head
    of_keys += page * scalars.k_descale_batch + slot * scalars.k_descale_slot
    of_values = pointers.v_descale + keys.kv_head * scalars.v_descale_head
    of_values += page * scalars.v_descale_batch + slot * scalars.v_descale_slot
    return gl.load(of_keys, mask=seen, other=0.0), gl.load(of_values, mask=seen, other=0.0)


@gluon.jit
def keep_scales(n, loaded, scales):
    """Leave the scales that belong to fill n of the keys."""
    STAGES: gl.constexpr = scales.shape[0] // 2
    scales.index(n % STAGES * 2 + OF_KEYS).store(loaded[0])
    scales.index(n % STAGES * 2 + OF_VALUES).store(loaded[1])


@gluon.jit
def scale_columns(x, n, scales, KIND: gl.constexpr):
    """x, (rows, keys), times the scales of fill n of the keys."""
    STAGES: gl.constexpr = scales.shape[0] // 2
    row = scales.index(n % STAGES * 2 + KIND).load(gl.SliceLayout(0, x.type.layout))
    return x * gl.expand_dims(row, 0)


@gluon.jit
def produce_scales(params, pipelines, OPTIONS: gl.constexpr):
    """Leave the scales of every tile of keys that is published, beside keys that are not
    converted."""
    work_info, keys_pipeline = pipelines.work_info, pipelines.k
    n = 0
    tile = 0
    work_info.wait(0)
    num_kv_tiles = work_info.get(0, WORD.NUM_KV_TILES)
    while num_kv_tiles > 0:
        keys, start = key_range_of(params, work_info, tile, OPTIONS)
        for _ in range(num_kv_tiles):
            start -= OPTIONS.BLOCK_N
            loaded = load_scales(start, keys, params, OPTIONS, 1)
            keys_pipeline.producer_acquire(n)
            keep_scales(n, loaded, pipelines.scales)
            mbarrier.arrive(keys_pipeline.full_barrier(n), count=1)
            n += 1
        tile += 1
        work_info.wait(tile)
        num_kv_tiles = work_info.get(tile, WORD.NUM_KV_TILES)
