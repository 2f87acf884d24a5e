"""Attention forward for Hopper, warp-specialised, in Gluon.

One program stays on each multiprocessor. Its producers, a warp each, claim tiles of queries, the
longest first (`tile_scheduler.py`), and have the tensor memory accelerator load queries, keys and
values into pipelines in shared memory; two or three consumers, four warps and 64 rows each,
multiply and write the result from shared memory. While one tile of queries ends, the next ones are
on their way.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_paged_attn.backends.triton.hopper.common.partitions import (
    registers_of,
    run_partitions,
    warps_of,
)
from torch_paged_attn.backends.triton.hopper.common.pipeline import (
    Pipelines,
    new_barriers,
    new_pipeline,
)
from torch_paged_attn.backends.triton.hopper.common.tma import boxes, shape_of_tiles
from torch_paged_attn.backends.triton.hopper.common.work_info import new_work_info
from torch_paged_attn.backends.triton.hopper.forward.arguments import Params, Sizes
from torch_paged_attn.backends.triton.hopper.forward.consumer import consume
from torch_paged_attn.backends.triton.hopper.forward.converter import (
    CONVERTER_REGISTERS,
    convert_tiles,
    new_results,
    new_tiles,
)
from torch_paged_attn.backends.triton.hopper.forward.producer import (
    loader_of_keys,
    loader_of_values,
    produce_kv,
    produce_tiles,
)
from torch_paged_attn.backends.triton.hopper.forward.scales import new_scales, produce_scales
from torch_paged_attn.backends.triton.hopper.forward.split_keys import consume_split, new_halves
from torch_paged_attn.backends.triton.hopper.schedule.stretches import new_left

# consumers come first, then this many producers
PRODUCERS = gl.constexpr(4)


@gluon.jit
def _run_partition(params, pipelines, OPTIONS: gl.constexpr, NUMBER: gl.constexpr):
    """What partition NUMBER of a program's warps does: a consumer, the converter if there is one,
    or one of the four producers."""
    PRODUCER: gl.constexpr = NUMBER - OPTIONS.CONSUMERS - OPTIONS.CONVERTS_V
    HAS_PARTS: gl.constexpr = OPTIONS.KV_PARTS > 1
    if NUMBER < OPTIONS.CONSUMERS:
        if OPTIONS.ROW_GROUPS < OPTIONS.CONSUMERS:
            consume_split(params, pipelines, OPTIONS, NUMBER)
        else:
            consume(params, pipelines, OPTIONS, NUMBER)
    elif PRODUCER < 0:
        convert_tiles(params, pipelines, OPTIONS)
    elif PRODUCER == 0:
        produce_tiles(params, pipelines, OPTIONS)
    elif PRODUCER == 1:
        if OPTIONS.BY_TOKEN and not OPTIONS.CONVERTS_K:
            produce_scales(params, pipelines, OPTIONS)
        elif HAS_PARTS:
            produce_kv(params, pipelines, loader_of_keys(params, pipelines, OPTIONS, 1), OPTIONS)
    elif PRODUCER == 2 or HAS_PARTS:
        values = loader_of_values(params, pipelines, OPTIONS, PRODUCER - 2)
        produce_kv(params, pipelines, values, OPTIONS)


@gluon.jit(do_not_specialize=Sizes._fields)
def _hopper_attention_fwd_kernel(
    q_desc, k_desc, v_desc, out_desc, pointers,
    num_pages, batch, total_q, lists_per_head, stride_table, heads_per_unit, k_page_rows,
    v_page_rows,
    scalars,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """The arguments are those of `arguments.py`. Sizes come one by one: Triton compiles a kernel
    anew for the divisors of a number in a tuple."""
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    Q_STAGES: gl.constexpr = OPTIONS.Q_STAGES
    KV_STAGES: gl.constexpr = OPTIONS.KV_STAGES
    KV_PARTS: gl.constexpr = OPTIONS.KV_PARTS
    CONVERTS_K: gl.constexpr = OPTIONS.CONVERTS_K
    CONVERTS_V: gl.constexpr = OPTIONS.CONVERTS_V
    dtype: gl.constexpr = q_desc.dtype
    q_layout: gl.constexpr = q_desc.layout
    k_layout: gl.constexpr = k_desc.layout
    v_layout: gl.constexpr = v_desc.layout
    ROW_GROUPS: gl.constexpr = OPTIONS.ROW_GROUPS
    q_shape: gl.constexpr = boxes(Q_STAGES * ROW_GROUPS, q_desc.block_shape)
    k_shape: gl.constexpr = shape_of_tiles(KV_STAGES, k_desc.block_shape, OPTIONS.BLOCK_N)
    v_shape: gl.constexpr = shape_of_tiles(KV_STAGES, v_desc.block_shape, OPTIONS.BLOCK_N)
    queries = new_pipeline(dtype, q_shape, q_layout, Q_STAGES, CONSUMERS, 1)
    # tiles that are converted have one reader, and so have those that consumers of the same rows
    # divide
    of_keys: gl.constexpr = 1 if CONVERTS_K else ROW_GROUPS
    of_values: gl.constexpr = 1 if CONVERTS_V else ROW_GROUPS
    k_dtype: gl.constexpr = k_desc.dtype
    v_dtype: gl.constexpr = v_desc.dtype
    HAS_PRODUCER: gl.constexpr = OPTIONS.BY_TOKEN and not CONVERTS_V
    producers: gl.constexpr = KV_PARTS + 1 if HAS_PRODUCER else KV_PARTS
    keys = new_pipeline(k_dtype, k_shape, k_layout, KV_STAGES, of_keys, producers)
    values = new_pipeline(v_dtype, v_shape, v_layout, KV_STAGES, of_values, KV_PARTS)
    found = None
    if OPTIONS.GATHERS:
        row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        rows: gl.constexpr = [PRODUCERS, OPTIONS.BLOCK_N // KV_PARTS]
        found = gl.allocate_shared_memory(gl.int64, rows, row)
    work_info = new_work_info(Q_STAGES, new_barriers(Q_STAGES, 1))
    pipelines = Pipelines(queries, keys, values, work_info, found=found)
    if CONVERTS_V:
        stored = keys, values
        out = None
        if CONVERTS_K:
            keys = new_tiles(dtype, OPTIONS.BLOCK_N, OPTIONS.WIDTH, CONSUMERS)
        else:
            out = new_results(out_desc, CONSUMERS)
        of_products: gl.constexpr = gl.bfloat16 if OPTIONS.BY_TOKEN else gl.float16
        values = new_tiles(of_products, OPTIONS.BLOCK_N, OPTIONS.WIDTH_V, CONSUMERS)
        scales = None
        if OPTIONS.BY_TOKEN:
            scales = new_scales(OPTIONS)
        pipelines = Pipelines(
            queries, keys, values, pipelines.work_info, stored[0], stored[1], out, found,
            scales=scales,
        )  # fmt: skip
    if HAS_PRODUCER:
        p = pipelines
        pipelines = Pipelines(p.q, p.k, p.v, p.work_info, scales=new_scales(OPTIONS))
    if OPTIONS.STRETCH > 0:
        p = pipelines
        left = new_left(CONSUMERS, OPTIONS.BLOCK_M)
        pipelines = Pipelines(
            p.q, p.k, p.v, p.work_info, p.stored_k, p.stored_v, p.out, p.found, left
        )
    if ROW_GROUPS < CONSUMERS:
        p = pipelines
        halves = new_halves(OPTIONS.BLOCK_M, OPTIONS.WIDTH_V)
        pipelines = Pipelines(p.q, p.k, p.v, p.work_info, found=p.found, halves=halves)
    sizes = Sizes(
        num_pages, batch, total_q, lists_per_head, stride_table, heads_per_unit, k_page_rows,
        v_page_rows,
    )  # fmt: skip
    params = Params(q_desc, k_desc, v_desc, out_desc, pointers, sizes, scalars)
    fence_async_shared()
    run_partitions(
        _run_partition, (params, pipelines, OPTIONS),
        warps_of(CONSUMERS + CONVERTS_V, PRODUCERS),
        registers_of(
            CONSUMERS, OPTIONS.REGISTERS, PRODUCERS, [CONVERTER_REGISTERS] * CONVERTS_V
        ),
    )  # fmt: skip
