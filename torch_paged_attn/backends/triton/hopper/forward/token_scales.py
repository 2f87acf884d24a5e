"""Scales of a cache by token and head: those of keys multiply columns of scores, those of values
columns of probabilities.

The converter loads the scales of a tile of keys and of its values, ahead of the tile, and leaves
both beside the keys: consumers need those of the values before the values themselves. Where nothing
is converted, a producer does, which is one more of the keys' pipeline.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from torch_paged_attn.backends.triton.hopper.common.work_info import WORD
from torch_paged_attn.backends.triton.hopper.forward.producer import key_range_of
from torch_paged_attn.backends.triton.hopper.forward.shared_memory import stages_of_scales

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
