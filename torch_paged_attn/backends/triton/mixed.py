"""Batches of long and short sequences on Hopper: each sequence by the kernel that suits it.

Hopper's kernel takes those that fill its tiles, the portable one, which reads keys as fast as
memory gives them, the others; unless these are so little work that one kernel had better do all.
That is decided on the device, by all lengths (`hopper/piece_plan.py`): the host knows none. The
second kernel starts where the first one leaves room, and ends after it.

Only batches with windows come here, many decodes of wide heads, and 8-bit caches of wide or narrow
ones: the others take Hopper's kernel alone (`is_one_launch` of `hopper/choices.py`), and so do
those of few keys (`is_numbered`), for deciding takes 6 to 8 us, and the second kernel some more to
begin and to end.
"""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper import attention as hopper
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.choices import Form
from torch_paged_attn.backends.triton.hopper.support import BLOCK_M
from torch_paged_attn.backends.triton.portable import attention as portable
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# mean queries of batches whose short sequences, if any, cost less than another launch
MOST_MEAN = 512

# sequences that Hopper's kernel had better take alone: short ones among them cost less than telling
MOST_ALONE = 4

# tables with room for fewer keys: nothing to share out
LEAST_KEYS = 256


def most_queries(call: AttentionCall) -> int:
    """Queries of the longest sequence that the portable kernel takes."""
    return max(BLOCK_M // call.group_size, 1)


def is_mixed(call: AttentionCall, longest: int) -> bool:
    """Whether a call that Hopper's kernel could take may hold long and short sequences. `longest`
    is what the caller says of the longest one's queries, 0 where it says nothing.
    """
    if call.block_table is None or call.layout is not None or call.total_q <= call.batch:
        return False
    if call.batch == 1 or call.total_q > MOST_MEAN * call.batch:
        return False
    if call.batch <= MOST_ALONE and support.unprofitable(call) is None:
        return False
    if call.block_table.shape[1] * call.page_size < LEAST_KEYS:
        return False
    return not 0 < longest <= most_queries(call)


def form_of(call: AttentionCall) -> Form:
    """What Hopper's kernel is told of the batch."""
    return Form(short=most_queries(call))


def plan_attention(call: AttentionCall) -> Plan:
    """A plan for the given tensors of calls like this one, in the order of the op's list."""
    new_out, new_lse = map(Allocation.like, call.new_results())
    start_long = hopper.plan_launches(call, None, form=form_of(call))
    start_short = portable.plan_beside(call)

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        # memory that the first kernel may still use when the second one gets its own
        tile_list, parts = start_long(tensors, addresses, out, lse)
        start_short(tensors, addresses, out, lse, tile_list)
        del parts
        return out, lse

    return run
