"""`flash_varlen` and `blocksparse` on every backend, over the named problems."""

import dataclasses

import pytest
import torch

from torch_paged_attn import environment
from torch_paged_attn.testing import PROBLEMS, assert_accurate, build


def over(keep):
    """Parametrise over the problems that `keep` picks."""
    problems = [p for p in PROBLEMS.values() if keep(p)]
    return pytest.mark.parametrize("problem", problems, ids=[p.name for p in problems])


PROBLEM = over(lambda p: True)


def bits(results):
    """Results as bytes: NaN equals NaN, and 0.0 is not -0.0."""
    return [t.cpu().contiguous().view(torch.uint8) for t in results]


def assert_same_bits(one, other):
    for a, b in zip(bits(one), bits(other), strict=True):
        assert torch.equal(a, b)


@PROBLEM
def test_agrees_with_the_reference(problem, device):
    call = build(problem)
    out, lse = call.to(device).run()
    assert out.dtype == (problem.out_dtype or problem.dtype)
    assert lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_accurate(out, lse, call.truth())


@PROBLEM
def test_same_call_same_bits_whatever_the_hints(problem, device):
    call = build(problem).to(device)
    first = call.run()
    assert_same_bits(first, call.run())
    assert_same_bits(first, call.run(max_seqlen_q=0, max_seqlen_k=0))
    assert_same_bits(first, call.run(max_seqlen_q=2**31 + 5, max_seqlen_k=2**40))


@over(lambda p: p.page_size is not None)
def test_order_of_pages_changes_no_bit(problem, device):
    first = build(problem).to(device).run()
    moved = dataclasses.replace(problem, page_seed=problem.page_seed + 1, spare_pages=9)
    assert_same_bits(first, build(moved).to(device).run())


@over(lambda p: p.dropout_p == 0.0)  # a dropout mask depends on the place in the batch
def test_sequence_alone_equals_itself_in_the_batch(problem, device, monkeypatch):
    monkeypatch.setattr(
        environment, "BATCH_INVARIANT", True
    )  # always so on the CPU, asked for on GPUs
    call = build(problem)
    out, lse = call.to(device).run()
    bounds = call.args["cu_seqlens_q"].tolist()
    for b in range(len(problem.seqs)):
        rows = slice(bounds[b], bounds[b + 1])
        assert_same_bits(call.alone(b).to(device).run(), (out[rows], lse[:, rows]))


def test_padding_rows_are_zero(device):
    problem = PROBLEMS["llama3_8b/mixed/f32"]
    out, lse = build(problem).to(device).run()
    assert (out[-problem.padding_rows :] == 0).all()
    assert (lse[:, -problem.padding_rows :] == float("-inf")).all()


def test_caches_are_only_read(device):
    call = build(PROBLEMS["llama3_8b/mixed/bf16"]).to(device)
    before = {name: t.clone() for name, t in call.args.items() if isinstance(t, torch.Tensor)}
    call.run()
    for name, tensor in before.items():
        assert_same_bits([tensor], [call.args[name]])
