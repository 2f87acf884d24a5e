"""What tests of Hopper's kernels share: a chip to plan for, and the description of a call."""

import torch

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.runtime.target import Target
from torch_paged_attn.testing import build

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HOPPER = Target.of_arch("sm90", 132)


def hopper_call(problem, device="cpu", **changes):
    return getattr(AttentionCall, problem.op)(**build(problem).to(device).args | changes)
