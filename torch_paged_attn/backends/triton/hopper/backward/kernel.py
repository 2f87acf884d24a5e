"""The kernels of the backward for Hopper, warp-specialised, in Gluon.

As in the forward (`forward/kernel.py`), one program stays on each multiprocessor and claims
tiles: of keys, for dK and dV (`dkdv.py`), and of queries, for dQ (`dq.py`).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from torch_paged_attn.backends.triton.hopper.backward.arguments import BackwardParams, BackwardSizes
from torch_paged_attn.backends.triton.hopper.backward.dkdv import work_on_keys
from torch_paged_attn.backends.triton.hopper.backward.dkdv_hdim256 import work_on_split_keys
from torch_paged_attn.backends.triton.hopper.backward.dkdv_producer import (
    add_parts,
    keep_keys,
    load_gradients,
    produce_queries,
)
from torch_paged_attn.backends.triton.hopper.backward.dkdv_steps import KeyPipelines
from torch_paged_attn.backends.triton.hopper.backward.dq import (
    QueryPipelines,
    consume_queries,
    load_gradients_and_values,
    produce_queries_and_keys,
)
from torch_paged_attn.backends.triton.hopper.backward.sums import BY_BOX, NONE
from torch_paged_attn.backends.triton.hopper.backward.work import new_claims, visit_tiles
from torch_paged_attn.backends.triton.hopper.common.partitions import (
    registers_of,
    run_partitions,
    warps_of,
)
from torch_paged_attn.backends.triton.hopper.common.pipeline import (
    Pipeline,
    new_barriers,
    new_pipeline,
)


@gluon.jit
def _of_keys(params, pipelines, OPTIONS: gl.constexpr, NUMBER: gl.constexpr):
    """What partition NUMBER of a program's warps does, with tiles of keys."""
    OTHER: gl.constexpr = NUMBER - OPTIONS.CONSUMERS
    if OTHER < 0 and OPTIONS.IS_SPLIT:
        visit_tiles(params, pipelines, work_on_split_keys, OPTIONS, NUMBER)
    elif OTHER < 0:
        visit_tiles(params, pipelines, work_on_keys, OPTIONS, NUMBER)
    elif OTHER == 0:
        produce_queries(params, pipelines, OPTIONS)
    elif OTHER == 1:
        visit_tiles(params, pipelines, load_gradients, OPTIONS, 0)
    elif OTHER == 2:
        keep_keys(params, pipelines, OPTIONS)
    else:
        visit_tiles(params, pipelines, add_parts, OPTIONS, 0)
        tma.store_wait(0)


@gluon.jit
def _of_queries(params, pipelines, OPTIONS: gl.constexpr, NUMBER: gl.constexpr):
    """What partition NUMBER of a program's warps does, with tiles of queries."""
    OTHER: gl.constexpr = NUMBER - OPTIONS.CONSUMERS
    if OTHER < 0:
        consume_queries(params, pipelines, OPTIONS, NUMBER)
    elif OTHER == 0:
        produce_queries_and_keys(params, pipelines, OPTIONS)
    else:
        visit_tiles(params, pipelines, load_gradients_and_values, OPTIONS, 0)
        # this kernel may have started before that of dK and dV ended, for which no later kernel
        # waits but through this one
        gl.inline_asm_elementwise(
            "griddepcontrol.wait; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
        )


@gluon.constexpr_function
def _shape(boxes, box):
    return [boxes, *box]


@gluon.jit
def _new_boxes(desc, BOXES: gl.constexpr):
    """Shared memory for BOXES boxes of a tensor map."""
    shape: gl.constexpr = _shape(BOXES, desc.block_shape)
    layout: gl.constexpr = desc.layout
    return gl.allocate_shared_memory(desc.dtype, shape, layout)


@gluon.jit
def _new_pipeline(desc, STAGES: gl.constexpr, BOXES: gl.constexpr, CONSUMERS: gl.constexpr):
    """A pipeline of STAGES stages, each of BOXES boxes of a tensor map."""
    shape: gl.constexpr = _shape(STAGES * BOXES, desc.block_shape)
    layout: gl.constexpr = desc.layout
    return new_pipeline(desc.dtype, shape, layout, STAGES, CONSUMERS, 1)


@gluon.jit
def _new_staying_tiles(desc, done, STAGES: gl.constexpr):
    """A pipeline of tiles that stay until `done` says that their results lie in their place."""
    return Pipeline(_new_boxes(desc, STAGES), new_barriers(STAGES, 1), done, STAGES)


@gluon.jit(do_not_specialize=BackwardSizes._fields)
def _hopper_backward_keys_kernel(
    q_desc, dout_desc, k_desc, v_desc, statistics_desc, dk_desc, dv_desc, sums_desc, pointers,
    batch, statistics_tiles,
    scalars,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """dK and dV, and in one pass the sums of dQ. The arguments are those of
    `arguments.py`; sizes come one by one, as in the forward."""
    # the kernel of dQ may start on multiprocessors that this one's programs have left
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; mov.b32 $0, 0;", "=r", [], gl.int32, False, 1
    )
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    SLOTS: gl.constexpr = OPTIONS.SLOTS
    OTHERS: gl.constexpr = 4 if OPTIONS.DQ_SUMS == BY_BOX else 3
    done = new_barriers(OPTIONS.STAY_STAGES, CONSUMERS)
    keys = _new_staying_tiles(k_desc, done, OPTIONS.STAY_STAGES)
    values = _new_staying_tiles(v_desc, done, OPTIONS.STAY_STAGES)
    queries = _new_pipeline(q_desc, OPTIONS.FIRST_STAGES, 1, CONSUMERS)
    douts = _new_pipeline(dout_desc, OPTIONS.SECOND_STAGES, 1, CONSUMERS)
    statistics = _new_boxes(statistics_desc, OPTIONS.FIRST_STAGES)
    p = None
    ds = None
    sums = None
    dtype: gl.constexpr = q_desc.dtype
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    ds_shape: gl.constexpr = [OPTIONS.DS_STAGES, OPTIONS.TILE, OPTIONS.PASS]
    if OPTIONS.IS_SPLIT:
        p = gl.allocate_shared_memory(dtype, ds_shape, swizzled)
        ds = gl.allocate_shared_memory(dtype, ds_shape, swizzled)
    if OPTIONS.DQ_SUMS != NONE:
        ds = gl.allocate_shared_memory(dtype, ds_shape, swizzled)
    if OPTIONS.DQ_SUMS == BY_BOX:
        boxes = _new_boxes(sums_desc, CONSUMERS * SLOTS)
        full = new_barriers(CONSUMERS * SLOTS, 1)
        empty = new_barriers(CONSUMERS * SLOTS, 1)
        sums = Pipeline(boxes, full, empty, CONSUMERS * SLOTS)
    info, claims = new_claims(CONSUMERS + OTHERS - 1)
    pipelines = KeyPipelines(
        keys, values, queries, douts, statistics, p, ds, sums, done, info, claims
    )
    sizes = BackwardSizes(batch, statistics_tiles)
    params = BackwardParams(
        q_desc, dout_desc, k_desc, v_desc, statistics_desc, dk_desc, dv_desc, sums_desc, pointers,
        sizes, scalars,
    )  # fmt: skip
    fence_async_shared()
    run_partitions(
        _of_keys, (params, pipelines, OPTIONS), warps_of(CONSUMERS, OTHERS),
        registers_of(CONSUMERS, OPTIONS.REGISTERS, OTHERS),
    )  # fmt: skip


@gluon.jit(do_not_specialize=BackwardSizes._fields)
def _hopper_backward_queries_kernel(
    q_desc, dout_desc, k_desc, v_desc, dq_desc, pointers,
    batch, statistics_tiles,
    scalars,
    OPTIONS: gl.constexpr,
):  # fmt: skip
    """dQ. The arguments are those of `arguments.py`; sizes come one by one."""
    CONSUMERS: gl.constexpr = OPTIONS.CONSUMERS
    queries = _new_pipeline(q_desc, OPTIONS.STAY_STAGES, CONSUMERS, CONSUMERS)
    douts = _new_pipeline(dout_desc, OPTIONS.STAY_STAGES, CONSUMERS, CONSUMERS)
    keys = _new_pipeline(k_desc, OPTIONS.FIRST_STAGES, 1, CONSUMERS)
    values = _new_pipeline(v_desc, OPTIONS.SECOND_STAGES, 1, CONSUMERS)
    dq = None
    if not OPTIONS.IN_PLACE:
        dq = _new_boxes(dq_desc, CONSUMERS)
    info, claims = new_claims(CONSUMERS + 1)
    pipelines = QueryPipelines(queries, douts, keys, values, dq, info, claims)
    sizes = BackwardSizes(batch, statistics_tiles)
    params = BackwardParams(
        q_desc, dout_desc, k_desc, v_desc, None, dq_desc, None, None, pointers, sizes, scalars
    )
    fence_async_shared()
    run_partitions(
        _of_queries, (params, pipelines, OPTIONS), warps_of(CONSUMERS, 2),
        registers_of(CONSUMERS, OPTIONS.REGISTERS, 2),
    )  # fmt: skip
