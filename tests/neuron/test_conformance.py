"""The ops on Neuron over the named problems: right, or refused with the argument's name."""

import dataclasses
import functools

import hypothesis
import pytest
import torch

from torch_paged_attn.testing import PROBLEMS, assert_accurate, build
from torch_paged_attn.testing.strategies import FLOATS, problems

GENERATIONS = [2, 3, 4]

# problem -> the argument that its refusal names
REFUSED = {
    "llama3_8b/mixed/kv_e4m3": "k has dtype float8_e4m3fn",
    "llama3_8b/prefill/e4m3": "q has dtype float8_e4m3fn",
    "llama3_8b/prefill/out_e4m3": "out_dtype is",
    "training/dropout/f32": "dropout_p is 0.2",
    "phi3_small/local_strided/bf16": "crow_indices",
    "blocksparse/shared_layout/f32": "crow_indices",
    "blocksparse/batched/f32": "crow_indices",
    "blocksparse/wide_blocks/f16": "crow_indices",
}
SUPPORTED = [name for name in PROBLEMS if name not in REFUSED]

# what the generations differ in is how they transpose, and that is all they differ in
EVERY_GENERATION = (
    "llama3_8b/mixed/bf16",
    "gemma2/window_softcap/bf16",
    "gpt_oss/sinks_window/bf16",
    "llama3_8b/mixed/kv_e5m2",
    "odd_sizes/f32",
)


def over(names):
    return pytest.mark.parametrize("problem", [PROBLEMS[n] for n in names], ids=list(names))


def same_bits(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(*(t.contiguous().view(torch.uint8) for t in pair)) for pair in pairs)


@over(SUPPORTED)
def test_agrees_with_the_reference(problem, run, machine):
    call = build(problem)
    out, lse = run(call)
    assert out.dtype == (problem.out_dtype or problem.dtype) and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_accurate(out, lse, call.truth())
    assert machine.live == {"sbuf": 0, "psum": 0}


@pytest.mark.parametrize("machine", [2, 4], indirect=True)
@over(EVERY_GENERATION)
def test_agrees_on_every_generation(problem, run, machine):
    call = build(problem)
    assert_accurate(*run(call), call.truth())


@over(REFUSED)
def test_refuses_what_it_does_not_do(problem, run, machine):
    with pytest.raises(NotImplementedError) as refusal:
        run(build(problem))
    text = str(refusal.value)
    assert text.startswith(f"paged_attn::{build(problem).op}: Neuron: ") and "supported: " in text
    assert REFUSED[problem.name] in text
    assert not machine.instructions


@over(["llama3_8b/mixed/bf16", "mpt/alibi_batch/f32"])
def test_dynamic_loop_changes_no_bit(problem, run, machine, monkeypatch):
    from torch_paged_attn.backends.neuron import attention

    call = build(problem)
    unrolled = run(call)
    monkeypatch.setattr(attention, "UNROLLED_ITEMS", 0)
    assert same_bits(run(call), unrolled)


@over(["llama3_8b/mixed/bf16", "gpt_oss/sinks_window/bf16"])
def test_two_programs_write_apart_in_either_order(problem, run, machine, monkeypatch):
    from torch_paged_attn.testing import nki_emulator

    call = build(problem)
    alone = run(call)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    if problem.num_kv_heads % 2:
        with pytest.raises(NotImplementedError, match="k has 1 heads"):
            run(call)
        return
    assert same_bits(run(call), alone)
    backwards = functools.partial(nki_emulator.simulate, reverse=True)
    monkeypatch.setattr(nki_emulator, "simulate", backwards)
    assert same_bits(run(call), alone)


@over(["llama3_8b/decode_b5/bf16", "mistral/window/f32"])
def test_order_of_pages_changes_no_bit(problem, run, machine):
    moved = dataclasses.replace(problem, page_seed=problem.page_seed + 1, spare_pages=9)
    assert same_bits(run(build(problem)), run(build(moved)))


@over(["llama3_8b/mixed/bf16", "mpt/alibi_batch/f32"])
def test_sequence_alone_equals_itself_in_the_batch(problem, run, machine):
    call = build(problem)
    out, lse = run(call)
    bounds = call.args["cu_seqlens_q"].tolist()
    for b in range(len(problem.seqs)):
        rows = slice(bounds[b], bounds[b + 1])
        assert same_bits(run(call.alone(b)), (out[rows], lse[:, rows]))


def test_a_nan_of_one_sequence_stays_there(run, machine):
    call = build(PROBLEMS["llama3_8b/mixed/f32"])
    out, lse = run(call)
    call.args["q"][0] = float("nan")
    poisoned, poisoned_lse = run(call)
    assert poisoned[0].isnan().all() and poisoned_lse[:, 0].isnan().all()
    assert same_bits((poisoned[1:], poisoned_lse[:, 1:]), (out[1:], lse[:, 1:]))


@hypothesis.settings(max_examples=12, derandomize=True, database=None, deadline=None)
@hypothesis.given(problems())
def test_fuzzed_plans_agree_with_the_reference(problem):
    from torch_paged_attn.backends import neuron
    from torch_paged_attn.backends.neuron.attention import unsupported
    from torch_paged_attn.testing.nki_emulator import emulated

    # what is refused is not worth a plan
    eight_bit = problem.dtype.itemsize == 1
    dtype = FLOATS[problem.seed % len(FLOATS)] if eight_bit else problem.dtype
    problem = dataclasses.replace(
        problem,
        dtype=dtype,
        kv_dtype=None if problem.kv_dtype == torch.float8_e4m3fn else problem.kv_dtype,
        dropout_p=0.0,
        out_scale=False,
        out_dtype=problem.out_dtype if problem.out_dtype in FLOATS else None,
    )
    call = build(problem)
    args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | call.args
    assert unsupported(**args) is None
    with emulated(GENERATIONS[problem.seed % 3]):
        assert_accurate(*neuron.flash_varlen(**args), call.truth())
