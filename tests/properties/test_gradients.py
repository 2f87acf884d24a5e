"""Any plan that trains: gradients right by the one rule, the same bits twice and alone."""

import dataclasses

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from same_bits import assert_same_bits, same_bits

from torch_paged_attn import reference
from torch_paged_attn.backends.cpu import BACKEND
from torch_paged_attn.ops.lacking import OF_BACKWARD
from torch_paged_attn.reference import BASELINE
from torch_paged_attn.testing import Problem, assert_accurate_gradients, build
from torch_paged_attn.testing.inputs import hostile_gradients
from torch_paged_attn.testing.strategies import layouts, problems

# what the CPU's backward has of the arguments that a backend may lack
HAS = frozenset(OF_BACKWARD) - frozenset(BACKEND.lacks_in_backward)
trained = st.one_of(
    problems(trains=True, optional=HAS),
    problems(layouts, trains=True, optional=HAS - {"key_ranks"}),
)
# the window of the last query is between the keys of this rank
WINDOW_OF_ANOTHER_RANK = Problem(
    "window_of_another_rank",
    ((2, 16),),
    num_heads=1,
    num_kv_heads=1,
    head_dim=1,
    window_size_left=1,
    tail=True,
    key_ranks=2,
    key_interleave=16,
)
masks = st.one_of(st.just((True,) * 5), st.tuples(*[st.booleans()] * 5))


def backward_of(problem, seed):
    """A call, and what its backward takes after the CPU's forward."""
    call = build(problem)
    out, lse = call.run()
    dout, dlse = hostile_gradients(call, out, lse, seed)
    return call, dout, dlse, out, lse


# dk of 171 rows, of which two, of the third sequence's one query, have almost all of the error
ONE_LARGE_QUERY = Problem(
    "one_large_query",
    ((1, 0), (1, 0), (1, 54), (1, 0)),
    num_heads=3,
    num_kv_heads=3,
    head_dim=87,
    dtype=torch.bfloat16,
    causal=False,
    softmax_scale=-0.3,
    alibi="batch",
    dropout_p=0.9,
    dropout_base=(9, 0, 5),
    k_ranges="shared",
    seed=5474,
)


@pytest.mark.any_isa
@given(trained, st.integers(0, 2**16))
@example(ONE_LARGE_QUERY, 7405)
def test_the_rule_lets_the_formula_pass(problem, seed):
    """In float32, with a kernel's roundings or without them, from results that have theirs."""
    call, *given = backward_of(problem, seed)
    truth = call.gradients(*given[:2])
    backward = call.backward(*given)
    for precision in (BASELINE, dataclasses.replace(BASELINE, round_probabilities=False)):
        found = getattr(reference, backward.op)(**backward.args, precision=precision)
        assert_accurate_gradients(found, truth)


# 24 numbers, whose probabilities a kernel scales by what dropout leaves after it rounds them
FEW_NUMBERS = Problem(
    "few_numbers",
    ((3, 5),),
    num_heads=9,
    num_kv_heads=3,
    head_dim=1,
    dtype=torch.bfloat16,
    lengths="cu_seqlens_k",
    fused_qkv=True,
    dropout_p=0.1,
    tail=True,
    key_ranks=2,
    key_rank=1,
    key_interleave=3,
    seed=14382,
)


@given(trained, st.integers(0, 2**16))
@example(WINDOW_OF_ANOTHER_RANK, 0)
@example(FEW_NUMBERS, 20373)
def test_gradients_agree_with_the_reference(problem, seed):
    call, *given = backward_of(problem, seed)
    assert_accurate_gradients(call.backward(*given).run(), call.gradients(*given[:2]))


@given(trained, masks, st.integers(0, 2**20))
def test_bits_depend_on_the_sequence_alone(problem, mask, hint):
    """Nor do they on hints, or on what else is asked for; dsinks is a sum over all sequences."""
    call, dout, dlse, out, lse = backward_of(problem, hint)
    every = call.backward(dout, dlse, out, lse).run()
    hints = {"max_seqlen_q": hint, "max_seqlen_k": hint, "output_mask": mask}
    some = call.backward(dout, dlse, out, lse, **hints).run()
    for asked, one, other in zip(mask, some, every, strict=True):
        assert same_bits([one], [other]) if asked else one.shape == (0,)
    if problem.dropout_p or problem.k_ranges:
        # a dropout mask depends on the place in the batch, and keys may be of several sequences
        return
    q_bounds = call.args["cu_seqlens_q"].tolist()
    k_bounds = call.args.get("cu_seqlens_k", call.args["cu_seqlens_q"]).tolist()
    for b in range(len(problem.seqs)):
        rows, keys = (slice(*bounds[b : b + 2]) for bounds in (q_bounds, k_bounds))
        given = dout[rows], dlse[:, rows], out[rows], lse[:, rows]
        dq, dk, dv, dbias, _ = call.alone(b).backward(*given).run()
        assert_same_bits((dq, dk, dv), (every[0][rows], every[1][keys], every[2][keys]))
        assert not dbias.numel() or same_bits([dbias], [every[3][:, rows]])
