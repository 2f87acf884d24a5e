"""How a gradient reaches the backward ops, which the reference answers here."""

import itertools

import pytest
import torch

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.testing import Layout, Problem, build

pytestmark = pytest.mark.usefixtures("reference_backward")

SEQS = ((3, 2), (0, 0), (5, 0))
SPARSE = {"layout": Layout(16, 16, "kv")}
PROBLEM = Problem("glue", SEQS, 4, 2, 8, 6, bias="float", sinks=True, softcap=3.0)
INPUTS = ("q", "k", "v", "attn_bias", "sinks")


def case(**changes):
    """A call without NaN, its leaves, and a loss of both of its results."""
    call = build(Problem(**{**vars(PROBLEM), **changes}))
    args = {n: x.nan_to_num(0.0) if is_float(x) else x for n, x in call.args.items()}
    leaves = {n: args[n].requires_grad_() for n in INPUTS if is_float(args.get(n))}
    return call.op, args, leaves


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def loss_of(out, lse):
    return (out.float() ** 2).sum() + torch.where(lse > float("-inf"), lse, 0.0).sin().sum()


def gradients(function, args, leaves):
    loss = loss_of(*function(**args))
    return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)


def assert_same(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.allclose(x.double(), y.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, SPARSE], ids=["flash_varlen", "blocksparse"])
def test_eager(changes, reference_backward):
    op, args, leaves = case(**changes)
    found = gradients(getattr(torch_paged_attn, op), args, leaves)
    assert reference_backward == [f"{op}_backward"]
    assert_same(found, gradients(getattr(reference, op), args, leaves))


SUBSETS = [s for n in (1, 2, 4) for s in itertools.combinations(INPUTS, n)][::3]


@pytest.mark.parametrize("names", SUBSETS, ids="-".join)
def test_some_of_the_inputs(names, reference_backward, monkeypatch):
    _, args, leaves = case()
    for name in INPUTS:
        leaves[name].requires_grad_(name in names)
    asked = {name: leaves[name] for name in names}
    masks = []
    backward = reference.flash_varlen_backward

    def watched(*args, output_mask, **kwargs):
        masks.append(tuple(output_mask))
        return backward(*args, output_mask=output_mask, **kwargs)

    monkeypatch.setattr(reference, "flash_varlen_backward", watched)
    found = gradients(torch_paged_attn.flash_varlen, args, asked)
    assert masks == [tuple(name in names for name in INPUTS)]
    assert_same(found, gradients(reference.flash_varlen, args, asked))
