"""`selected_attention` on GPUs: lists of keys, gathered by the portable kernel."""

from typing import Any, NamedTuple

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.dequant import as_stored
from torch_paged_attn.backends.triton.hopper import selected as hopper
from torch_paged_attn.backends.triton.hopper import selected_units
from torch_paged_attn.backends.triton.portable import selected
from torch_paged_attn.backends.triton.portable.selected_kernel import (
    _merge_selected_kernel,
    _selected_fwd_kernel,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.unit_lists import make_unit_lists
from torch_paged_attn.ops.lacking import INT4, TOKEN_SCALES, refuse_lacking
from torch_paged_attn.ops.selected_checks import check_selected


class Results(NamedTuple):
    """Where a kernel writes: results, or partial results with their sums."""

    out: Any
    lse: Any
    sums: Any
    out_scale: Any


def selected_attention(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in the op's schema."""
    call = AttentionCall.selected_attention(*args, **kwargs)
    check_selected(call)
    refuse_lacking(call, "triton", (*TOKEN_SCALES, *INT4))
    call = selected.without_gaps(call)
    out, lse = call.new_results()
    if out.numel() == 0:
        return out, lse
    if call.batch == 0:  # rows of padding alone
        return out.zero_(), lse.fill_(float("-inf"))
    if hopper.unsupported(call) is None:
        hopper.selected_attention(call, out, lse)
        return out, lse
    if (selected_units.unsupported(call) or selected_units.unprofitable(call)) is None:
        selected_units.attend(call, out, lse, make_unit_lists)
        return out, lse
    target = target_of(call.q.device)
    config = selected.config_of(call, target)
    splits = selected.splits_of(call, target, config)
    options = selected.options_of(call, target, config, splits > 1)
    sizes = selected.sizes_of(call, splits)
    final = Results(as_stored(out, target)[0], lse, None, call.out_scale)
    written = Results(*selected.new_parts(call, splits), None) if splits > 1 else final
    head_tiles = call.num_kv_heads * -(-call.group_size // config.BLOCK_M)
    pointers = selected.pointers_of(call, target)
    Launch(
        _selected_fwd_kernel,
        (call.total_q * splits, head_tiles),
        **sizes._asdict(),
        strides=selected.strides_of(call),
        scalars=selected.scalars_of(call),
        OPTIONS=options,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )(pointers, written)
    if splits > 1:
        Launch(
            _merge_selected_kernel,
            (call.total_q * call.num_heads,),
            **sizes._asdict(),
            WIDTH=next_power_of_2(call.head_dim_v),
            OPTIONS=options,
        )(written, final, call.sinks, call.cu_seqlens_q)
    return out, lse
