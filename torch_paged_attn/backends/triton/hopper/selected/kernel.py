"""Lists of latent keys on Hopper, in Gluon: the consumers of `mla/kernel.py`, and a producer of
four warps, which copies the rows that the lists name.
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
    LatentPipelines,
    new_exchange,
    new_keys,
    new_queries,
    new_seen_keys,
)
from torch_paged_attn.backends.triton.hopper.selected.arguments import ListParams, ListSizes
from torch_paged_attn.backends.triton.hopper.selected.consumer import consume_lists
from torch_paged_attn.backends.triton.hopper.selected.producer import produce_lists


@gluon.jit
def _run_partition(params, pipelines, OPTIONS: gl.constexpr, NUMBER: gl.constexpr):
    """What partition NUMBER of a program's warps does."""
    if NUMBER < 2:
        consume_lists(params, pipelines, OPTIONS, NUMBER)
    else:
        produce_lists(params, pipelines, OPTIONS)


@gluon.jit(do_not_specialize=ListSizes._fields)
def _hopper_selected_fwd_kernel(
    q_desc, q_rope_desc, pointers,
    total_q, batch, entries, num_rows, max_pages, stride_index_token, stride_count_token,
    stride_table, units, unit_pairs,
    scalars,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """The arguments are those of `arguments.py`. Sizes come one by one: Triton compiles a
    kernel anew for the divisors of a number in a tuple."""
    queries = new_queries(q_desc, q_rope_desc, OPTIONS)
    keys = new_keys(q_desc, q_rope_desc, OPTIONS)
    pipelines = LatentPipelines(queries, keys, new_exchange(), new_work_info(2), new_seen_keys())
    sizes = ListSizes(
        total_q, batch, entries, num_rows, max_pages, stride_index_token, stride_count_token,
        stride_table, units, unit_pairs,
    )  # fmt: skip
    params = ListParams(q_desc, q_rope_desc, pointers, sizes, scalars)
    fence_async_shared()
    run_partitions(
        _run_partition,
        (params, pipelines, OPTIONS),
        warps_of(3),
        registers_of(2, OPTIONS.REGISTERS, 1),
    )
