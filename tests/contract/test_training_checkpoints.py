"""Gradients of calls that run again in the backward, by checkpointing."""

import pytest
import torch
from gradient_cases import assert_same, by_hand, case, gradients, loss_of
from recorded_graphs import Graphs

import torch_paged_attn

pytestmark = pytest.mark.usefixtures("reference_backward")


def policy_of(policy):
    """Contexts of selective checkpointing that save attention, or compute it again."""
    from torch.utils import checkpoint

    def decide(_context, op, *_args, **_kwargs):
        is_ours = op is torch.ops.paged_attn.flash_varlen.default
        return policy if is_ours else checkpoint.CheckpointPolicy.PREFER_RECOMPUTE

    return lambda: checkpoint.create_selective_checkpoint_contexts(decide)


def block(**args):
    out, lse = torch_paged_attn.flash_varlen(**args)
    return out * 1.0, lse * 1.0


def checkpointed(context_fn=None):
    from torch.utils.checkpoint import checkpoint

    options = {} if context_fn is None else {"context_fn": context_fn}
    return lambda **args: checkpoint(block, use_reentrant=False, **options, **args)


class Calls(torch.utils._python_dispatch.TorchDispatchMode):
    """How often an operator ran."""

    def __init__(self, op):
        super().__init__()
        self.op, self.count = op, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func is self.op
        return func(*args, **(kwargs or {}))


POLICIES = {"MUST_SAVE": 1, "PREFER_RECOMPUTE": 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing(policy):
    from torch.utils.checkpoint import CheckpointPolicy

    _, args, leaves = case()
    context = policy_of(CheckpointPolicy[policy])
    with Calls(torch.ops.paged_attn.flash_varlen.default) as calls:
        found = gradients(checkpointed(context), args, leaves)
    assert calls.count == POLICIES[policy]
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))


@pytest.mark.parametrize("policy", POLICIES)
def test_selective_checkpointing_compiled(policy):
    from torch.utils.checkpoint import CheckpointPolicy

    _, args, leaves = case()
    graphs = Graphs()
    compiled = graphs.compile(checkpointed(policy_of(CheckpointPolicy[policy])))
    found = gradients(compiled, args, leaves)
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))
    assert graphs.count("flash_varlen") == (1, POLICIES[policy] - 1)
    assert graphs.count("flash_varlen_backward") == (0, 1)


def test_checkpointing():
    """Computing again stops as soon as all is there: an exception that passes a kernel in C++."""
    _, args, leaves = case()
    found = gradients(checkpointed(), args, leaves)
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))


def test_reentrant_checkpointing():
    from torch.utils.checkpoint import checkpoint

    _, args, leaves = case()

    def again(*inputs):
        return block(**args | dict(zip(leaves, inputs, strict=True)))

    # this one refuses `torch.autograd.grad`
    loss_of(*checkpoint(again, *leaves.values(), use_reentrant=True)).backward()
    found = [x.grad for x in leaves.values()]
    assert_same(found, gradients(by_hand("flash_varlen"), args, leaves))
