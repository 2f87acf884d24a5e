"""`flash_varlen` on Hopper for latent attention (MLA): one KV head, whose values are the first 512
of the 576 columns of its keys, and few queries a sequence.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.mla import arguments, work
from torch_paged_attn.backends.triton.runtime.contiguous import picker
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.ops.lacking import lacking

# columns of the result that a consumer computes; columns of keys that are no values; of keys of
# 8 bits, columns of a box
HALF, ROPE, BOX = 256, 64, 128

# calls for which this kernel was timed and is faster than the portable one: rows of a sequence and
# room for its keys, at least; mean queries of a sequence, at most
LEAST_ROWS, LEAST_KEYS, MOST_QUERIES = 16, 500, 2


def unsupported(call: AttentionCall) -> str | None:
    """Why a call cannot take this kernel; None if it can. Whether the values are columns of the
    keys follows from addresses, so it is seen when a call is run.
    """
    q, k, v = call.q, call.k, call.v
    if (call.head_dim, call.head_dim_v, call.num_kv_heads) != (work.HEAD_DIM, work.HEAD_DIM_V, 1):
        return "it is no latent attention"
    if (reason := support.unsupported_device(q.device)) is not None:
        return reason
    if q.dtype not in support.IN_16_BITS or k.dtype not in (q.dtype, *support.IN_8_BITS):
        return f"q is {q.dtype} and k is {k.dtype}"
    if call.result_dtype != q.dtype:
        return f"out_dtype is {call.out_dtype}"
    if k.stride() != v.stride() or call.layout is not None:
        return "the values do not lie as the keys do"
    for name in (
        *support.NOT_CARRIED,
        *(() if support.converts(call) else support.DESCALES),
        "alibi_slopes",
        "sinks",
    ):
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.dropout_p > 0.0 or call.softcap:
        return "it has no dropout_p and no softcap"
    if (lacked := lacking(call, (*support.LACKS, *support.OF_LISTS))) is not None:
        return f"it has no {lacked}"
    if support.is_bound(call.window_size_left) or (
        call.window_right and support.is_bound(call.window_right)
    ):
        return "it has no windows"
    if not support.LEAST_SCALE <= call.scale <= 1.0 / support.LEAST_SCALE:
        return f"softmax_scale is {call.softmax_scale}"
    if call.block_table is not None:
        if call.page_size % support.LEAST_BOX:
            return f"page_size is {call.page_size}, not a multiple of {support.LEAST_BOX}"
        if k.stride(2) <= 0 or k.stride(0) % k.stride(2):
            return "pages do not lie a whole number of slots apart"
    if any(support.is_misaligned(x, x.dim() - 1) for x in (q, k)) or 0 in k.shape:
        return "q or k is not aligned to 16 bytes"
    return None


def unprofitable(call: AttentionCall) -> str | None:
    """Why a call that can take this kernel should not; None if it should."""
    if call.total_q > MOST_QUERIES * call.batch:
        return f"sequences have more than {MOST_QUERIES} queries on average"
    if call.total_q * call.num_heads < LEAST_ROWS * call.batch:
        return f"sequences have fewer than {LEAST_ROWS} rows on average"
    if support.key_bound(call) < LEAST_KEYS:
        return f"a sequence has room for fewer than {LEAST_KEYS} keys"
    return None


def plan_attention(call: AttentionCall, otherwise: Plan) -> Plan:
    """A plan for the given tensors of calls like this one, in the order of the op's list. It runs
    `otherwise` if the values are no columns of the keys but lie elsewhere, which the description of
    a call does not say.
    """
    results = call.new_results()
    new_out, new_lse = map(Allocation.like, results)
    if call.total_q == 0:
        return lambda tensors, addresses: (new_out(), new_lse())
    start = plan_launches(call, results[0])
    has_out = call.out is not None

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        _, k, v = addresses[:3] if addresses is not None else [x.data_ptr() for x in tensors[:3]]
        if k != v:
            return otherwise(tensors, addresses)
        out, lse = tensors[-1] if has_out else new_out(), new_lse()
        start(tensors, addresses, out, lse)
        return out, lse

    return run


def scalars_of(call: AttentionCall) -> arguments.MlaScalars:
    scalars = arguments.MlaScalars(
        num_heads=call.num_heads,
        page_rows=call.k.stride(0) // call.k.stride(2) if call.page_size else 0,
        scale_log2=call.scale * LOG2E.value,
    )
    if not support.converts(call):
        return scalars
    # descales are one number, or (batch, 1): one for each sequence and the KV head
    given = [getattr(call, name) for name in support.DESCALES]
    strides = [0 if x is None or x.dim() < 2 else x.stride(0) for x in given]
    return scalars._replace(
        q_token=call.q.stride(0),
        q_head=call.q.stride(1),
        q_descale_batch=strides[0],
        k_descale_batch=strides[1],
        v_descale_batch=strides[2],
    )


class Map(NamedTuple):
    """A tensor map that the kernel takes."""

    number: int  # among the kernel's maps
    name: str  # of the tensor whose it is
    boxes: Any


def _maps_of(call: AttentionCall, out: Tensor, options: arguments.MlaOptions) -> list[Map | None]:
    """The kernel's tensor maps for a result like `out`; None for one that it does not take."""
    from torch_paged_attn.backends.triton.hopper.common.tma import ragged_rows

    k, width = work.keys_of(call), BOX if support.converts(call) else HALF // options.COLUMN_BOXES
    of_keys = [("k", ragged_rows(k, options.BOX_ROWS, 1, x)) for x in (width, ROPE)]
    if support.converts(call):
        return [None, None, *(Map(i, *x) for i, x in enumerate(of_keys)), None]
    rows = {"rows": options.TOKENS, "heads": options.PACKED_HEADS}
    of_queries = [("q", ragged_rows(call.q, **rows, width=x)) for x in (HALF, ROPE)]
    of_all = *of_queries, *of_keys, ("out", ragged_rows(out, **rows, width=HALF))
    return [Map(i, *x) for i, x in enumerate(of_all)]


def plan_launches(call: AttentionCall, out: Tensor) -> Callable[..., None]:
    """A function that launches the kernels for calls like this one. It takes the given tensors,
    their addresses or None, and the tensors for results: one like `out`, and its lse."""
    from torch_paged_attn.backends.triton.hopper.mla.kernel import _hopper_mla_fwd_kernel

    options = work.options_of(call)
    programs = work.programs_of(call, options)
    new_parts = Allocation((work.part_elements(programs, options),), torch.float32, call.q.device)
    kernel, sizes = _hopper_mla_fwd_kernel, work.sizes_of(call)
    launch = work.first_launch(kernel, programs, options, sizes, scalars_of(call))
    maps = _maps_of(call, out, options)
    combine = work.combine_launch(call, options, programs)
    by_address = work.BESIDE_8_BITS if support.converts(call) else ("",) * len(work.BESIDE_8_BITS)
    taken = (*work.READ_BY_ADDRESS, *by_address)
    # the result is behind the given tensors
    pick = picker([*call.given_tensors(), "out"], taken)
    count = len(work.READ_BY_ADDRESS)

    def start(tensors: tuple[Any, ...], addresses: Any, out: Tensor, lse: Tensor) -> None:
        parts, to = new_parts(), out.data_ptr()
        if not (launch.is_ready and combine.is_ready) or addresses is None:
            q, k = (x.data_ptr() for x in tensors[:2])
            at, given = {"q": q, "k": k, "out": to}, pick((*tensors, out, None))
            pointers = arguments.MlaPointers._make((lse, *given[:count], parts, *given[count:]))
            launch(*(x and x.boxes.at(at[x.name]) for x in maps), pointers)
            combine(out, pointers)
            return
        boxes_at, given = launch.map_arguments, pick((*addresses, to, None))
        at = {"q": addresses[0], "k": addresses[1], "out": to}
        memory = lse.data_ptr(), *given[:count], parts.data_ptr(), *given[count:]
        described: list[Any] = []
        for x in maps:
            described += [None] if x is None else boxes_at(x.number, x.boxes, at[x.name])
        launch.start(*described, memory)
        combine.start(to, memory)

    return start
