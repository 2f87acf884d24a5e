"""Lists of latent keys on Hopper, in Gluon: a producer of four warps copies the rows that the lists
name (`producer.py`), or those of all keys (`in_order.py`), and consumers of four forms multiply
them.

Of many heads, two consumers, as in `mla/kernel.py` (`consumer.py`). Of few heads one, whose rows
are keys (`few_heads.py`); beside latents of 8 bits with warps that convert them, or one that
converts them itself (`pairs_8bit.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_paged_attn.backends.triton.hopper.common.partitions import (
    registers_of,
    run_partitions,
    warps_of,
)
from torch_paged_attn.backends.triton.hopper.common.work_info import new_work_info
from torch_paged_attn.backends.triton.hopper.mla.pipeline import (
    ROWS,
    LatentPipelines,
    new_exchange,
    new_keys,
    new_queries,
    new_seen_keys,
    new_weights,
)
from torch_paged_attn.backends.triton.hopper.selected.arguments import ListParams, ListSizes
from torch_paged_attn.backends.triton.hopper.selected.consumer import consume_lists
from torch_paged_attn.backends.triton.hopper.selected.few_heads import (
    consume_few,
    fold_block,
    fold_converted,
)
from torch_paged_attn.backends.triton.hopper.selected.in_order import produce_in_order
from torch_paged_attn.backends.triton.hopper.selected.pairs_8bit import consume_pairs
from torch_paged_attn.backends.triton.hopper.selected.producer import produce_lists
from torch_paged_attn.backends.triton.hopper.selected.stages_8bit import (
    GROUPS,
    convert_latents,
    new_stored_pipelines,
)


@gluon.constexpr_function
def _consumers_of(heads):
    return 1 if heads < ROWS.value else 2


@gluon.constexpr_function
def _registers(consumers, of_consumer, programs, has_scales, converters):
    """Registers of a thread of each partition but the first. One thread of each of a program's
    warpgroups, together, have 512 with two or four warpgroups, and 504 with three."""
    if converters > 0:  # of the producer and of converters
        return [128, 128] if converters == 1 else [120, 88, 88]
    if consumers == 1 and not has_scales:
        return [128]
    return registers_of(consumers, of_consumer, 1, programs=programs)


@gluon.jit
def _run_partition(params, pipelines, OPTIONS: gl.constexpr, NUMBER: gl.constexpr):
    """What partition NUMBER of a program's warps does: a consumer, the producer, or warps that
    convert latents."""
    CONSUMERS: gl.constexpr = _consumers_of(OPTIONS.PACKED_HEADS)
    if NUMBER == CONSUMERS and OPTIONS.IN_ORDER:
        produce_in_order(params, pipelines, OPTIONS)
    elif NUMBER == CONSUMERS:
        produce_lists(params, pipelines, OPTIONS)
    elif NUMBER > CONSUMERS:
        convert_latents(pipelines, OPTIONS, NUMBER - CONSUMERS - 1)
    elif CONSUMERS == 2:
        consume_lists(params, pipelines, OPTIONS, NUMBER)
    elif not OPTIONS.HAS_SCALES:
        consume_few(params, pipelines, fold_block, 2, OPTIONS)
    elif OPTIONS.CONVERTERS > 0:
        consume_few(params, pipelines, fold_converted, GROUPS, OPTIONS)
    else:
        consume_pairs(params, pipelines, OPTIONS)


@gluon.jit(do_not_specialize=ListSizes._fields)
def _hopper_selected_fwd_kernel(
    q_desc, q_rope_desc, pointers,
    total_q, batch, entries, num_rows, max_pages, stride_index_token, stride_count_token,
    stride_table, units, unit_pairs,
    scalars,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """The arguments are those of `arguments.py`. Sizes come one by one: Triton compiles a kernel
    anew for the divisors of a number in a tuple."""
    CONSUMERS: gl.constexpr = _consumers_of(OPTIONS.PACKED_HEADS)
    dtype: gl.constexpr = q_desc.dtype
    queries = new_queries(q_desc, q_rope_desc, OPTIONS, CONSUMERS)
    if OPTIONS.HAS_SCALES:
        pipelines = new_stored_pipelines(queries, dtype, OPTIONS)
    elif CONSUMERS == 1:
        keys = new_keys(q_desc, q_rope_desc, OPTIONS)
        work_info, seen = new_work_info(2, queries.full), new_seen_keys()
        weights = new_weights(dtype, OPTIONS.PACKED_HEADS)
        pipelines = LatentPipelines(queries, keys, None, work_info, seen, weights)
    else:
        keys = new_keys(q_desc, q_rope_desc, OPTIONS)
        work_info, seen = new_work_info(2, queries.full), new_seen_keys()
        pipelines = LatentPipelines(queries, keys, new_exchange(), work_info, seen)
    sizes = ListSizes(
        total_q, batch, entries, num_rows, max_pages, stride_index_token, stride_count_token,
        stride_table, units, unit_pairs,
    )  # fmt: skip
    params = ListParams(q_desc, q_rope_desc, pointers, sizes, scalars)
    fence_async_shared()
    run_partitions(
        _run_partition, (params, pipelines, OPTIONS),
        warps_of(CONSUMERS + 1 + OPTIONS.CONVERTERS),
        _registers(
            CONSUMERS, OPTIONS.REGISTERS, OPTIONS.PROGRAMS, OPTIONS.HAS_SCALES, OPTIONS.CONVERTERS
        ),
    )  # fmt: skip
