"""The ops on Neuron over the named problems: right on every generation, whoever shares the work."""

import dataclasses
import functools
import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from torch_paged_attn.reference.philox import dropout_keep
from torch_paged_attn.testing import PROBLEMS, Layout, assert_accurate, build
from torch_paged_attn.testing.strategies import layouts, problems

GENERATIONS = [2, 3, 4]
FULL = Layout(16, 16, density=1.0)


def over(names):
    return pytest.mark.parametrize("problem", [PROBLEMS[n] for n in names], ids=list(names))


@functools.cache
def truth(name):
    return build(PROBLEMS[name]).truth()


def pairs(bounds):
    return list(itertools.pairwise(bounds.tolist()))


def same_bits(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(*(t.contiguous().view(torch.uint8) for t in pair)) for pair in pairs)


@pytest.mark.parametrize("machine", GENERATIONS, indirect=True)
@over(PROBLEMS)
def test_agrees_with_the_reference(problem, run, machine):
    out, lse = run(build(problem))
    assert out.dtype == (problem.out_dtype or problem.dtype) and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_accurate(out, lse, truth(problem.name))
    assert machine.live == {"sbuf": 0, "psum": 0}


@pytest.mark.parametrize("dims", [(1025, 8), (8, 513)])
def test_refuses_what_no_tile_holds(dims, run, machine):
    problem = dataclasses.replace(PROBLEMS["llama3_8b/mixed/bf16"], head_dim=dims[0])
    name = "k has head_dim 1025" if dims[0] > 1024 else "v has head_dim 513"
    with pytest.raises(NotImplementedError, match=rf"flash_varlen: Neuron: {name}; supported: "):
        run(build(dataclasses.replace(problem, head_dim_v=dims[1])))
    assert not machine.instructions


def test_heads_without_room_together_go_one_by_one(run, machine):
    problem = dataclasses.replace(
        PROBLEMS["llama3_8b/mixed/bf16"], num_heads=136, num_kv_heads=136, seqs=((3, 20), (1, 0))
    )
    call = build(problem)
    assert_accurate(*run(call), call.truth())


@over(
    ["llama3_8b/mixed/bf16", "mpt/alibi_batch/f32", "phi3_small/local_strided/bf16", "t5/bias/f32"]
)
def test_dynamic_loop_changes_no_bit(problem, run, machine, monkeypatch):
    from torch_paged_attn.backends.neuron import attention

    call = build(problem)
    unrolled = run(call)
    monkeypatch.setattr(attention, "UNROLLED", 0)
    assert same_bits(run(call), unrolled)


# the first shares its heads, the others have one, or one at a time: these share their items
@pytest.mark.parametrize("is_dynamic", [False, True])
@over(
    [
        "llama3_8b/mixed/bf16",
        "gpt_oss/sinks_window/bf16",
        "odd_sizes/f32",
        "phi3_small/local_strided/bf16",
        "blocksparse/batched/f32",
    ]
)
def test_two_programs_write_apart_in_either_order(problem, is_dynamic, run, machine, monkeypatch):
    import nki_emulator

    from torch_paged_attn.backends.neuron import attention

    call = build(problem)
    alone = run(call)
    monkeypatch.setattr(attention, "UNROLLED", 0 if is_dynamic else 2**20)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    assert same_bits(run(call), alone)
    backwards = functools.partial(nki_emulator.simulate, reverse=True)
    monkeypatch.setattr(nki_emulator, "simulate", backwards)
    assert same_bits(run(call), alone)


@pytest.mark.parametrize("layout", ["", "one", "all"])
def test_dropout_has_the_reference_bits(layout, run, machine):
    """Equal probabilities, and values that say which keys they came from."""
    problem = dataclasses.replace(
        PROBLEMS["training/dropout/f32"],
        seqs=((5, 3), (9, 120)),
        causal=False,
        head_dim_v=129,
        lengths="cu_seqlens_k",
        layout=None if not layout else dataclasses.replace(FULL, heads=layout),
    )
    call = build(problem)
    call.args["q"].zero_()
    call.args["v"].zero_()
    for b, (start, stop) in enumerate(pairs(call.args["cu_seqlens_k"])):
        call.args["v"][start:stop] = torch.eye(129)[: stop - start, None]
        out, _ = run(call)
        rows = slice(*pairs(call.args["cu_seqlens_q"])[b])
        kept = out[rows, :, : stop - start].transpose(0, 1) > 0
        lens = rows.stop - rows.start, stop - start
        expected = dropout_keep(call.args["rng_state"], problem.dropout_p, b, 4, *lens)
        assert torch.equal(kept, expected) and not kept.all()


@over(["llama3_8b/decode_b5/bf16", "mistral/window/f32", "phi3_small/local_strided/bf16"])
def test_order_of_pages_changes_no_bit(problem, run, machine):
    moved = dataclasses.replace(problem, page_seed=problem.page_seed + 1, spare_pages=9)
    assert same_bits(run(build(problem)), run(build(moved)))


@over(["llama3_8b/mixed/bf16", "mpt/alibi_batch/f32", "blocksparse/batched/f32", "t5/bias/f32"])
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


@hypothesis.given(
    problems(st.one_of(st.none(), layouts)),
    st.sampled_from(GENERATIONS),
    st.sampled_from((1, 2)),
    st.booleans(),
)
def test_fuzzed_plans_agree_with_the_reference(problem, generation, programs, is_dynamic):
    from nki_emulator import emulated

    from torch_paged_attn.backends import neuron
    from torch_paged_attn.backends.neuron import attention

    call = build(problem)
    args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | call.args
    with pytest.MonkeyPatch.context() as patch, emulated(generation):
        patch.setenv("NEURON_LOGICAL_NC_CONFIG", str(programs))
        patch.setattr(attention, "UNROLLED", 0 if is_dynamic else 2**20)
        assert_accurate(*getattr(neuron, call.op)(**args), call.truth())
