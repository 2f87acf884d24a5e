"""`flash_varlen` and `blocksparse` on every backend, over the named problems.

Memory that no query may see is hostile in their inputs: `testing/inputs.py`.
"""

import dataclasses
import re

import pytest
import torch
import truths
from gaps import all_with_gaps, shorter
from same_bits import assert_same_bits
from sampling import ALL

from torch_paged_attn.testing import PROBLEMS, assert_accurate, build

INF = float("inf")


def over(keep):
    """Parametrise over the problems that `keep` picks."""
    return pytest.mark.over({name: p for name, p in ALL.items() if keep(p)})


# each argument in one of them
WITH_GAPS = (
    "llama3_8b/mixed/kv_e4m3",
    "llama3_8b/speculative/bf16",
    "llama3_8b/prefill/out_e4m3",
    "gpt_oss/sinks_window/bf16",
    "mpt/alibi_batch/f32",
    "nano_vllm/cu_seqlens_k/bf16",
    "training/dropout/f32",
    "blocksparse/batched/f32",
    "eagle/tree_verify/bf16",
    "vllm/tokens_int8/bf16",
    "ring/window_alibi/bf16",
)


@over(lambda p: True)
def test_agrees(case, runner):
    out, lse = runner.attend(build(case))
    assert out.dtype == (case.out_dtype or case.dtype)
    assert lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_accurate(out, lse, truths.of(case, runner.cuts_off))


@over(lambda p: True)
def test_same_bits(case, runner):
    """Twice, and whatever the hints; where hints choose how a call is cut, it stays as right."""
    call = build(case)
    first = runner.attend(call)
    assert_same_bits(first, runner.attend(call))
    for q, k in ((0, 0), (2**31 + 5, 2**40)):
        hinted = runner.attend(call, max_seqlen_q=q, max_seqlen_k=k)
        if runner.heeds_hints:
            assert_accurate(*hinted, truths.of(case, runner.cuts_off))
        else:
            assert_same_bits(first, hinted)


@over(lambda p: p.page_size is not None)
def test_page_order(case, runner):
    """The order of a cache's pages changes no bit."""
    moved = dataclasses.replace(case, page_seed=case.page_seed + 1, spare_pages=9)
    assert_same_bits(runner.attend(build(case)), runner.attend(build(moved)))


@over(lambda p: p.dropout_p == 0.0)  # a dropout mask depends on the place in the batch
def test_alone(case, runner):
    """A sequence alone has the bits that it has in its batch."""
    call = build(case)
    with runner.batch_invariant():
        if runner.has_other_bits(case):
            with pytest.raises(NotImplementedError, match="batch_invariant"):
                runner.attend(call)
            return
        out, lse = runner.attend(call)
        assert_accurate(out, lse, truths.of(case, runner.cuts_off))
        bounds = call.args["cu_seqlens_q"].tolist()
        for b in range(len(case.seqs)):
            rows = slice(bounds[b], bounds[b + 1])
            assert_same_bits(runner.alone(call, b), (out[rows], lse[:, rows]))


@over(lambda p: p.dtype.itemsize > 1 and p.kv_dtype is None and p.v_dtype is None)
def test_unseen_memory(case, runner):
    """Memory that no query may see is NaN in every problem, and zero here: no bit changes."""
    call = build(case)
    first = runner.attend(call)
    for name in ("q", "k", "v"):
        call.args[name][call.args[name].isnan()] = 0.0
    assert_same_bits(first, runner.attend(call))


@over(lambda p: p.descale in ("tokens", "columns") and p.page_size is not None)
def test_hidden_scales(case, runner):
    """The scales of a key that a mask hides from all queries may be NaN: no bit changes."""
    case = shorter(case)
    call = build(dataclasses.replace(case, bias="bool"))
    key = 3
    call.args["attn_bias"][..., key] = False
    pages = call.args["block_table"][torch.tensor(case.key_lens) > key, key // case.page_size]
    results = []
    for value in (1.0, float("nan")):
        for name in {"k_descale", "v_descale"} & set(call.args):
            call.args[name][pages.long(), :, key % case.page_size] = value
        results.append(runner.attend(call))
    assert_accurate(*results[0], call.truth(runner.cuts_off))
    assert_same_bits(*results)


@over(lambda p: p.name in WITH_GAPS)
def test_gaps(case, runner):
    """Lengths, bounds, masks, scales and lists may lie with gaps: no bit changes, but on a GPU
    where a mask's keys lie apart, for which the compiler sums in another order.
    """
    call = build(shorter(case))
    gapped = runner.attend(all_with_gaps(call))
    assert_accurate(*gapped, call.truth(runner.cuts_off))
    if runner.device.type == "cuda":
        gapped = runner.attend(all_with_gaps(call, without=("attn_bias",)))
    assert_same_bits(runner.attend(call), gapped)


@over(lambda p: p.dtype.itemsize > 1 and p.page_size is not None)
def test_nan_stays(case, runner):
    """A query that is NaN makes its own row NaN, if it sees a key, and touches no other
    sequence.
    """
    call = build(case)
    out, lse = runner.attend(call)
    call.args["q"][0] = float("nan")
    poisoned, poisoned_lse = runner.attend(call)
    if case.layout is None and not case.softcap:  # a softcap bounds NaN, too
        assert poisoned[0].isnan().all() and poisoned_lse[:, 0].isnan().all()
    n = case.query_lens[0]
    assert_same_bits((poisoned[n:], poisoned_lse[:, n:]), (out[n:], lse[:, n:]))


def test_padding_rows(runner):
    """They are 0, and -inf in softmax_lse, beside sinks too."""
    problem = PROBLEMS["sglang/page1/f16"]
    out, lse = runner.attend(build(dataclasses.replace(problem, padding_rows=2, sinks=True)))
    assert (out[-2:] == 0).all()
    assert (lse[:, -2:] == -INF).all()


def test_inputs_are_only_read(runner):
    call = build(PROBLEMS["sglang/page1/f16"])
    before = {name: t.clone() for name, t in call.args.items() if isinstance(t, torch.Tensor)}
    runner.attend(call)
    for name, tensor in before.items():
        assert_same_bits([tensor], [call.args[name]])


def test_no_sequences(runner):
    """An empty batch has an empty result."""
    problem = dataclasses.replace(PROBLEMS["sglang/page1/f16"], seqs=())
    out, lse = runner.attend(build(problem))
    assert out.shape == (0, problem.num_heads, problem.head_dim)
    assert lse.shape == (problem.num_heads, 0)


@pytest.mark.lacking
def test_refuses_arguments_that_it_lacks(case, runner):
    """By name: it must not answer as if they were not given."""
    name = next(name for name in runner.lacks() if name in case.optional).partition(" of ")[0]
    text = rf"{case.op}\(\): {re.escape(name)} is not supported by the \w+ backend"
    with pytest.raises(NotImplementedError, match=text):
        pytest.fail(f"{case.name}: {runner.attend(build(case))}")


def test_refuses(refusal, runner):
    """What a backend cannot do it refuses by name."""
    name, changes, text = refusal
    problem = dataclasses.replace(PROBLEMS["llama3_8b/mixed/bf16"], **changes)
    with pytest.raises(
        NotImplementedError, match=rf"flash_varlen\(\): not supported by the {text}"
    ):
        pytest.fail(f"{name}: {runner.attend(build(problem))}")
