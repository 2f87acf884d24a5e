"""Batches with long and short sequences on Hopper, whose sequences are divided between two kernels.

Hopper's kernel runs the sequences whose queries fill its tiles. The portable kernel, which is as
fast as the memory, runs the others; if these are very little work, Hopper's kernel runs them, too.
The device decides this from the lengths (`hopper/piece_plan.py`), which the host does not know. The
second kernel starts while the first one still runs, and ends after it.

No call takes two kernels by itself: in none of 32 measured batches were they the fastest way.
"""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper import attention as hopper
from torch_paged_attn.backends.triton.hopper.choices import Form
from torch_paged_attn.backends.triton.hopper.support import BLOCK_M
from torch_paged_attn.backends.triton.portable import attention as portable
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backends.triton.runtime.workspace import Allocation


def most_queries(call: AttentionCall) -> int:
    """The most queries of a sequence that runs on the portable kernel."""
    return max(BLOCK_M // call.group_size, 1)


def form_of(call: AttentionCall) -> Form:
    """The form of Hopper's kernel beside the portable one."""
    return Form(short=most_queries(call), tiles="low")


def plan_attention(call: AttentionCall) -> Plan:
    """A plan for calls like this one. It takes the given tensors in the order of the op's list."""
    new_out, new_lse = map(Allocation.like, call.new_results())
    start_long = hopper.plan_launches(call, None, form=form_of(call))
    start_short = portable.plan_beside(call)
    has_out = call.out is not None

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = tensors[-1] if has_out else new_out(), new_lse()
        # `parts` must not be freed before the second kernel has its memory: the first one uses it
        tile_list, parts = start_long(tensors, addresses, out, lse)
        start_short(tensors, addresses, out, lse, tile_list)
        del parts
        return out, lse

    return run
