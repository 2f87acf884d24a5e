"""Any plan that trains: gradients right by the one rule, the same bits twice and alone."""

import dataclasses

import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_paged_attn import reference
from torch_paged_attn.reference import BASELINE
from torch_paged_attn.testing import assert_accurate_gradients, build
from torch_paged_attn.testing.inputs import hostile_gradients
from torch_paged_attn.testing.strategies import layouts, problems

trained = problems(st.one_of(st.none(), layouts), trains=True)
masks = st.one_of(st.just((True,) * 5), st.tuples(*[st.booleans()] * 5))


def same_bits(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@given(trained, st.integers(0, 2**16))
def test_the_rule_lets_the_formula_pass(problem, seed):
    """In float32, with a kernel's roundings or without them, from results that have theirs."""
    call = build(problem)
    out, lse = call.run()
    dout, dlse = hostile_gradients(call, out, lse, seed)
    truth = call.gradients(dout, dlse)
    backward = call.backward(dout, dlse, out, lse)
    for precision in (BASELINE, dataclasses.replace(BASELINE, round_probabilities=False)):
        found = getattr(reference, backward.op)(**backward.args, precision=precision)
        assert_accurate_gradients(found, truth)
