"""`selected_attention` on GPUs: which kernel runs a call, and the plan of the portable one."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, arguments, tensor_names
from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.hopper.selected import plan as hopper
from torch_paged_attn.backends.triton.hopper.units import plan as selected_units
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.kernel import (
    _merge_selected_kernel,
    _selected_fwd_kernel,
)
from torch_paged_attn.backends.triton.portable.selected.keys import SelectedPointers
from torch_paged_attn.backends.triton.portable.selected.latents import _selected_latents_kernel
from torch_paged_attn.backends.triton.portable.selected.unit_lists import plan_unit_lists
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.contiguous import after_copies, picker, without_gaps
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.ops.selected_checks import check_selected

NAMES = tensor_names("selected_attention")
# where the two hints are among the arguments; no plan depends on them
HINTS = next(i for i, x in enumerate(arguments("selected_attention")) if x.is_hint)


class Results(NamedTuple):
    """Where a kernel writes: results, or partial results with their sums."""

    out: Any
    lse: Any
    sums: Any
    out_scale: Any


def selected_attention(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in the op's schema."""
    if args[HINTS] < 0 or args[HINTS + 1] < 0:
        check_selected(AttentionCall.selected_attention(*args, **options))
    # values that are columns of the keys are read once; a plan knows no addresses
    kind = "one" if args[1].data_ptr() == args[2].data_ptr() else "two"
    tensors = *args[:HINTS], *args[HINTS + 2 :]
    return launch_cache.call(f"selected_attention, {kind}", _plan, tensors, options)


def _call_of(tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> AttentionCall:
    return AttentionCall.selected_attention(*tensors[:HINTS], 0, 0, *tensors[HINTS:], **options)


def _plan(*tensors: Tensor | None, **options: Any) -> Plan:
    tensors = *tensors, *(None,) * (len(NAMES) - len(tensors))
    tensors, copied = without_gaps(list(NAMES), tensors)
    call = _call_of(tensors, options)
    check_selected(call)
    BACKEND.refuse_lacking(call)
    given = [name for name, x in zip(NAMES, tensors, strict=True) if x is not None]
    return after_copies(_plan_checked(call, given), copied)


def _plan_checked(call: AttentionCall, given: list[str]) -> Plan:
    """The plan of a call that has the tensors of these names."""
    new_out, new_lse = map(Allocation.like, call.new_results())
    if 0 in new_out.shape:
        return lambda tensors, addresses: (new_out(), new_lse())
    if call.batch == 0:  # rows of padding alone
        return lambda tensors, addresses: (new_out().zero_(), new_lse().fill_(float("-inf")))
    if hopper.unsupported(call) is None:
        start = hopper.plan_launches(call, given, hopper.launches_of(call))
    elif (selected_units.unsupported(call) or selected_units.unprofitable(call)) is None:
        start = _plan_units(call, given)
    else:
        start = _plan_portable(call, given)

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        start(tensors, addresses, out, lse)
        return out, lse

    return run


def _plan_units(call: AttentionCall, given: list[str]) -> Callable[..., None]:
    """The same as `_plan_portable`, by the kernels that visit units: a long prefill."""
    attend = selected_units.plan_units(call, plan_unit_lists)
    pick = picker(given, SelectedPointers._fields)

    def start(tensors: tuple[Any, ...], addresses: Any, out: Tensor, lse: Tensor) -> None:
        attend(SelectedPointers(*pick((*tensors, None))), out, lse)

    return start


def _plan_portable(call: AttentionCall, given: list[str]) -> Callable[..., None]:
    """A function that launches the portable kernels for calls like this one. It takes the given
    tensors, their addresses or None, and the tensors for results.
    """
    target = target_of(call.q.device)
    config = selected.config_of(call, target)
    splits = selected.splits_of(call, target, config)
    options = selected.options_of(call, target, config, splits > 1)
    sizes = selected.sizes_of(call, splits)
    new_parts = [Allocation.like(x) for x in selected.new_parts(call, splits)] if splits > 1 else []
    launch = Launch(
        _selected_latents_kernel if options.SCALED_COLUMNS else _selected_fwd_kernel,
        (call.total_q * splits, call.num_kv_heads * -(-call.group_size // config.BLOCK_M)),
        **sizes._asdict(),
        strides=selected.strides_of(call),
        scalars=selected.scalars_of(call),
        OPTIONS=options,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    merge = Launch(
        _merge_selected_kernel,
        (call.total_q * call.num_heads,),
        **sizes._asdict(),
        WIDTH=next_power_of_2(call.head_dim_v),
        OPTIONS=options,
    )
    pick = picker(given, SelectedPointers._fields)
    pick_more = picker(given, ("out_scale", "sinks", "cu_seqlens_q"))

    def start(tensors: tuple[Any, ...], addresses: Any, out: Tensor, lse: Tensor) -> None:
        parts = [new() for new in new_parts]
        is_ready = launch.is_ready and (merge.is_ready or not parts) and addresses is not None
        if is_ready:
            found = (*addresses, None)
            out_scale, *more = pick_more(found)
            final = out.data_ptr(), lse.data_ptr(), None, out_scale
            written = (*(x.data_ptr() for x in parts), None) if parts else final
            launch.start(pick(found), written)
            if parts:
                merge.start(written, final, *more)
            return
        found = (*(as_stored(x, target)[0] for x in tensors), None)
        out_scale, *more = pick_more(found)
        final = Results(as_stored(out, target)[0], lse, None, out_scale)
        written = Results(parts[0], parts[1], parts[2], None) if parts else final
        launch(SelectedPointers(*pick(found)), written)
        if parts:
            merge(written, final, *more)

    return start
