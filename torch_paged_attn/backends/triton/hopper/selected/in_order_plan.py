"""`flash_varlen` on Hopper for decodes over latents of 8 bits with scales by column: the kernel for
lists of latent keys, without lists.
"""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, is_by_column
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.mla import work
from torch_paged_attn.backends.triton.hopper.mla.plan import LEAST_KEYS, ROPE
from torch_paged_attn.backends.triton.hopper.selected import plan as lists
from torch_paged_attn.backends.triton.hopper.selected.arguments import (
    ListOptions,
    ListScalars,
    ListSizes,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.ops.lacking import COLUMN_SCALES, OPTIONAL, all_but, lacking

# callers look at `batch_invariant` themselves
LACKS = all_but(("batch_invariant", "q_latent", *COLUMN_SCALES), OPTIONAL)

# mean queries of a sequence, at most: each reads all keys, where the portable kernel's tiles share
# them
MOST_QUERIES = 2


def unsupported(call: AttentionCall) -> str | None:
    """Why a call cannot take this kernel; None if it can."""
    if not is_by_column(call.v_descale, call.v):
        return "it has no scales by column"
    if (call.head_dim, call.head_dim_v, call.num_kv_heads) != (ROPE, work.HEAD_DIM_V, 1):
        return f"heads are {call.head_dim} and {call.head_dim_v} wide, of {call.num_kv_heads}"
    if (reason := support.unsupported_device(call.q.device)) is not None:
        return reason
    if (reason := lists.unsupported_scales(call)) is not None:
        return reason
    if call.result_dtype != call.q.dtype:
        return f"out_dtype is {call.out_dtype}"
    for name in (*support.NOT_CARRIED, "q_descale", "k_descale", "alibi_slopes", "sinks"):
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.dropout_p > 0.0 or call.softcap or call.layout is not None:
        return "it has no dropout_p, no softcap and no layout"
    if (lacked := lacking(call, LACKS)) is not None:
        return f"it has no {lacked}"
    if support.is_bound(call.window_size_left) or (
        call.window_right and support.is_bound(call.window_right)
    ):
        return "it has no windows"
    if not support.LEAST_SCALE <= call.scale <= 1.0 / support.LEAST_SCALE:
        return f"softmax_scale is {call.softmax_scale}"
    if 0 in call.k.shape:
        return "there are no keys"
    given = call.q, call.k, call.v, call.q_latent
    if any(x is None or support.is_misaligned(x, x.dim() - 1) for x in given):
        return "q, k, v or q_latent is not aligned to 16 bytes"
    return None


def unprofitable(call: AttentionCall) -> str | None:
    """Why a call that can take this kernel should not; None if it should."""
    if call.total_q > MOST_QUERIES * call.batch:
        return f"sequences have more than {MOST_QUERIES} queries on average"
    if support.key_bound(call) < LEAST_KEYS:
        return f"a sequence has room for fewer than {LEAST_KEYS} keys"
    return None


def options_of(call: AttentionCall) -> ListOptions:
    options = lists.options_of(call)
    return options._replace(HAS_RIGHT=call.window_right == 0, IN_ORDER=True, UNIT_KEYS=lists.PAIR)


def _launches_of(call: AttentionCall) -> lists.Launches:
    """The launches of calls like this one."""
    from torch_paged_attn.backends.triton.hopper.selected.kernel import _hopper_selected_fwd_kernel

    options = options_of(call)
    programs, latents = work.programs_of(call, options), lists.pieces(call, call.v)
    table = call.block_table
    sizes = ListSizes(
        total_q=call.total_q,
        batch=call.batch,
        entries=work.sizes_of(call).max_keys,
        num_rows=call.k.shape[0],
        max_pages=0 if table is None else table.shape[1],
        stride_index_token=0,
        stride_count_token=0,
        stride_table=0 if table is None else table.stride(0),
        units=1,
        unit_pairs=1,
    )
    scalars = ListScalars(
        call.num_heads, 1, *latents, *latents, left=0, right=0, scale_log2=call.scale * LOG2E.value
    )
    first = work.first_launch(_hopper_selected_fwd_kernel, programs, options, sizes, scalars)
    combine = work.combine_launch(call, options, programs)
    return lists.Launches(options, first, combine, work.part_elements(programs, options))


def plan_attention(call: AttentionCall) -> Plan:
    """A plan for the given tensors of calls like this one, in the order of the op's list."""
    new_out, new_lse = map(Allocation.like, call.new_results())
    if call.total_q == 0:
        return lambda tensors, addresses: (new_out(), new_lse())
    start = lists.plan_launches(call, list(call.given_tensors()), _launches_of(call))
    has_out = call.out is not None

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = tensors[-1] if has_out else new_out(), new_lse()
        start(tensors, addresses, out, lse)
        return out, lse

    return run
