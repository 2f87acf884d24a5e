"""What tests of Hopper's kernels share: a chip to plan for, and the description of a call."""

import torch
from undrawn import build_undrawn

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.runtime.target import Target, assume
from torch_paged_attn.testing import build

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HOPPER = Target.of_arch("sm90", 132)

MIXED = ((1, 300), (130, 0), (37, 91), (0, 17), (5, 64), (1, 0), (300, 600), (20, -15))
LONG = ((2100, 0), (2500, 300))


def hopper_call(problem, device=None, **changes):
    """The description of a call; without a device its numbers are none that a test may read."""
    call = build_undrawn(problem) if device is None else build(problem).to(device)
    return getattr(AttentionCall, problem.op)(**call.args | changes)


def unsupported(problem, **changes):
    with assume(HOPPER):
        return support.unsupported(hopper_call(problem, **changes))
