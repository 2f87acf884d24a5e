"""What `flash_attn_func` and `flash_attn_varlen_func` hand back of a loss: the op's gradients."""

import pytest
import torch
from sequences import HEADS, MIXED, Batch

from torch_paged_attn import flash_varlen
from torch_paged_attn.integrations.flash_attn import flash_attn_func, flash_attn_varlen_func
from torch_paged_attn.ops import attention_gradients


def gradients(function, leaves):
    out, lse = function(*leaves)
    lse = torch.where(lse > float("-inf"), lse, 0.0)
    return torch.autograd.grad((out.float() ** 2).sum() + lse.sum(), leaves)


def trained(batch):
    return [x.detach().requires_grad_() for x in (batch.q, batch.k, batch.v)]


def test_packed():
    batch = Batch(*MIXED, torch.bfloat16)
    sinks = torch.randn(HEADS).requires_grad_()
    leaves = [*trained(batch), sinks]
    bounds = batch.cu_q, batch.cu_k
    options = {"causal": True, "softcap": 2.0}

    def ours(q, k, v, sinks):
        return flash_attn_varlen_func(
            q, k, v, *bounds, s_aux=sinks, window_size=(9, -1), return_softmax_lse=True, **options
        )

    def op(q, k, v, sinks):
        return flash_varlen(q, k, v, *bounds, sinks=sinks, window_size_left=9, **options)

    for one, other in zip(gradients(ours, leaves), gradients(op, leaves), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("asking", ["qkv", "q"])
@pytest.mark.parametrize("heads_first", [False, True])
def test_dense(heads_first, asking):
    """Keys that lie heads first are pages to a call that serves, and copied for one that trains."""
    batch = Batch([3, 3], [5, 5])
    tensors = [x.unflatten(0, (2, -1)) for x in (batch.q, batch.k, batch.v)]
    if heads_first:
        tensors = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tensors]
    leaves = [
        x.detach().requires_grad_(name in asking) for name, x in zip("qkv", tensors, strict=True)
    ]
    asked = [x for x in leaves if x.requires_grad]
    out, lse = flash_attn_func(*leaves, causal=True, return_softmax_lse=True)
    found = torch.autograd.grad(out.sum() + lse.sum(), asked)
    flat = [x.flatten(0, 1) for x in leaves]
    out, lse = flash_varlen(*flat, batch.cu_q, batch.cu_k, causal=True)
    wanted = torch.autograd.grad(out.sum() + lse.sum(), asked)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)


def test_dense_of_sinks_alone():
    """All else is frozen, and keys lie heads first."""
    batch = Batch([3, 3], [5, 5])
    rows = (x.unflatten(0, (2, -1)) for x in (batch.q, batch.k, batch.v))
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in rows)
    sinks = torch.randn(HEADS).requires_grad_()
    (found,) = torch.autograd.grad(flash_attn_func(q, k, v, s_aux=sinks).sum(), sinks)
    out, _ = flash_varlen(batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, sinks=sinks)
    assert torch.equal(found, torch.autograd.grad(out.sum(), sinks)[0])


@pytest.mark.parametrize("asked", [False, True])
def test_deterministic_is_flash_attns(asked, monkeypatch):
    """False unless it is asked for; a call that does not train leaves it to the op."""
    seen = []
    save = attention_gradients.AttentionDerivative.save

    def watched(self, ctx, args, options, results):
        seen.append(options.get("deterministic", True))
        return save(self, ctx, args, options, results)

    monkeypatch.setattr(attention_gradients.AttentionDerivative, "save", watched)
    batch = Batch([3], [3])
    flash_attn_varlen_func(*trained(batch), batch.cu_q, batch.cu_k, deterministic=asked)
    flash_attn_func(*(x[None] for x in trained(batch)), deterministic=asked)
    assert seen == [asked, asked]
