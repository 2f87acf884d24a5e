"""Dropout's seed in graphs whose backward computes parts of the forward again.

The result is linear in v, so it equals v times its gradient if both have dropped the same keys.
"""

import pytest
import torch
from torch._functorch import config
from torch.utils import checkpoint

from torch_paged_attn.integrations import diffusers, flash_attn, transformers

# `make test-gpu` runs this file on the oldest torch
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUDGETS = [
    {"activation_memory_budget": 1.0},
    {"activation_memory_budget": 0.0},
    {"aggressive_recomputation": True},
    {"ban_recompute_not_in_allowlist": False, "ban_recompute_materialized_backward": False},
]


def by_flash_attn(q, k, v, w):
    return flash_attn.flash_attn_func((q @ w).sin(), k, v, dropout_p=0.5) @ w


def by_diffusers(q, k, v, w):
    return diffusers.attention((q @ w).sin(), k, v, dropout_p=0.5) @ w


LAYER = torch.nn.Module()


def by_transformers(q, k, v, w):
    q, k, v = (x.transpose(1, 2) for x in ((q @ w).sin(), k, v))
    out, _ = transformers.attention_forward(LAYER, q, k, v, None, dropout=0.5, scaling=0.3)
    return out @ w


CASES = [(by_flash_attn, budget) for budget in BUDGETS]
CASES += [(call, BUDGETS[1]) for call in (by_diffusers, by_transformers)]
# budgets between take the way of none
CASES += [
    pytest.param(by_flash_attn, {"activation_memory_budget": x}, marks=pytest.mark.thorough)
    for x in (0.5, 0.1)
]


def off_by(call):
    """By how much of the result its mask and that of the gradient differ."""
    torch.manual_seed(0)
    q, k, v, w = (torch.randn(1, 8, 2, 16, requires_grad=True, device=DEVICE) for _ in range(4))
    result = call(q, k, v, w[0, :, 0].repeat(2, 1)).sum()
    result.backward()
    return float(abs(result - (v * v.grad).sum()).detach() / abs(result).detach())


@pytest.mark.parametrize(("call", "budget"), CASES, ids=lambda x: getattr(x, "__name__", str(x)))
def test_the_backward_drops_what_the_forward_dropped(call, budget):
    torch._dynamo.reset()
    with config.patch(**budget):
        assert off_by(torch.compile(call, backend="aot_eager_decomp_partition")) < 1e-5
        torch._dynamo.reset()
        compiled = torch.compile(call, backend="aot_eager_decomp_partition", fullgraph=True)
        if budget == BUDGETS[0]:
            assert off_by(compiled) < 1e-5
        else:  # the graph breaks where the seed is drawn
            with pytest.raises(torch._dynamo.exc.Unsupported, match="dropout's seed"):
                off_by(compiled)


def test_a_region_with_a_budget_is_refused():
    region = getattr(torch.autograd.graph, "region_activation_memory_budget", None)
    if region is None:
        return  # before torch 2.13
    torch._dynamo.reset()

    def call(*args):
        with region(0.0):
            return by_flash_attn(*args)

    with pytest.raises(torch._dynamo.exc.Unsupported, match="dropout's seed"):
        off_by(torch.compile(call, backend="aot_eager_decomp_partition", fullgraph=True))
    with pytest.raises(RuntimeError, match="region_activation_memory_budget"):
        off_by(torch.compile(call, backend="aot_eager_decomp_partition"))


def test_a_graph_without_gradients_is_whole():
    torch._dynamo.reset()
    args = [torch.randn(1, 8, 2, 16, device=DEVICE) for _ in range(3)]
    compiled = torch.compile(by_flash_attn, backend="aot_eager", fullgraph=True)
    with config.patch(activation_memory_budget=0.0), torch.no_grad():
        assert compiled(*args, torch.randn(16, 16, device=DEVICE)).shape == (1, 8, 2, 16)


POLICY = None


def _policy(_context, op, *_args, **_options):
    ours, others = POLICY
    return ours if "flash_varlen" in str(op) else others


def _contexts():
    return checkpoint.create_selective_checkpoint_contexts(_policy)


def by_checkpoint(*args):
    return checkpoint.checkpoint(by_flash_attn, *args, use_reentrant=False, context_fn=_contexts)


@pytest.mark.parametrize(
    "policy", [("MUST_SAVE", "PREFER_RECOMPUTE"), ("MUST_RECOMPUTE", "PREFER_SAVE")]
)
@pytest.mark.parametrize("compiled", [False, True])
def test_selective_checkpoints(policy, compiled, monkeypatch):
    torch._dynamo.reset()
    names = checkpoint.CheckpointPolicy
    monkeypatch.setitem(globals(), "POLICY", tuple(names[x] for x in policy))
    call = by_checkpoint
    if compiled:
        call = torch.compile(call, backend="aot_eager_decomp_partition", fullgraph=True)
    assert off_by(call) < 1e-5
