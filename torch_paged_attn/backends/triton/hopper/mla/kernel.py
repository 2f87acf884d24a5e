"""Latent attention (MLA) on Hopper, in Gluon: one KV head whose values are the first 512 of the 576
columns of its keys, which are loaded once for both.

Of keys of 16 bits, one program on each multiprocessor has two consumers, which compute half of the
result's columns each (`consumer.py`). Of keys of 8 bits beside queries of 16, a multiprocessor has
two programs with one consumer each, or one program with two (`consumer_8bit.py`). Each program has
a producer (`producer.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from torch_paged_attn.backends.triton.hopper.common.partitions import (
    registers_of,
    run_partitions,
    warps_of,
)
from torch_paged_attn.backends.triton.hopper.common.pipeline import new_barriers
from torch_paged_attn.backends.triton.hopper.common.work_info import new_work_info
from torch_paged_attn.backends.triton.hopper.mla.arguments import MlaParams, MlaSizes
from torch_paged_attn.backends.triton.hopper.mla.consumer import consume_latent
from torch_paged_attn.backends.triton.hopper.mla.consumer_8bit import consume_bytes
from torch_paged_attn.backends.triton.hopper.mla.pipeline import (
    LatentPipelines,
    new_exchange,
    new_keys,
    new_queries,
)
from torch_paged_attn.backends.triton.hopper.mla.producer import produce_latent
from torch_paged_attn.backends.triton.hopper.mla.stages_8bit import (
    BytesPipelines,
    new_meetings,
    new_shared_rows,
    new_split_queries,
    new_stored_keys,
)


@gluon.jit
def _run_partition(params, pipelines, OPTIONS: gl.constexpr, NUMBER: gl.constexpr):
    """What partition NUMBER of a program's warps does: a consumer, the producer, or a warp that
    does nothing and only fills up the producer's warpgroup."""
    if NUMBER < OPTIONS.CONSUMERS and OPTIONS.FORMAT == "":
        consume_latent(params, pipelines, OPTIONS, NUMBER)
    elif NUMBER < OPTIONS.CONSUMERS:
        consume_bytes(params, pipelines, OPTIONS, NUMBER)
    elif NUMBER == OPTIONS.CONSUMERS:
        produce_latent(params, pipelines, OPTIONS)


@gluon.jit(do_not_specialize=MlaSizes._fields)
def _hopper_mla_fwd_kernel(
    q_desc, q_rope_desc, k_desc, k_rope_desc, out_desc, pointers,
    num_pages, batch, total_q, max_keys, stride_table,
    scalars,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """The arguments are those of `arguments.py`. Sizes come one by one: Triton compiles a kernel
    anew for the divisors of a number in a tuple."""
    if OPTIONS.FORMAT == "":
        queries = new_queries(q_desc, q_rope_desc, OPTIONS)
        keys = new_keys(k_desc, k_rope_desc, OPTIONS)
        work_info = new_work_info(1, queries.full)
        pipelines = LatentPipelines(queries, keys, new_exchange(), work_info)
    else:
        keys = new_stored_keys(k_desc, k_rope_desc, OPTIONS)
        queries, shared = new_split_queries(OPTIONS), new_shared_rows(OPTIONS)
        meetings = None
        if OPTIONS.CONSUMERS == 2:
            meetings = new_meetings()  # type: ignore[assignment]
        work_info = new_work_info(1, new_barriers(1, 1))
        read = new_barriers(1, OPTIONS.CONSUMERS)
        pipelines = BytesPipelines(keys, queries, shared, meetings, work_info, read)  # type: ignore[assignment]
    sizes = MlaSizes(num_pages, batch, total_q, max_keys, stride_table)
    params = MlaParams(q_desc, q_rope_desc, k_desc, k_rope_desc, out_desc, pointers, sizes, scalars)
    fence_async_shared()
    run_partitions(
        _run_partition, (params, pipelines, OPTIONS), warps_of(OPTIONS.CONSUMERS, 4),
        registers_of(OPTIONS.CONSUMERS, OPTIONS.REGISTERS, programs=OPTIONS.PROGRAMS),
    )  # fmt: skip
