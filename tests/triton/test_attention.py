"""`flash_varlen` and `blocksparse` in Triton over the named problems and over fuzzed plans."""

import dataclasses
import os

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from torch_paged_attn import environment
from torch_paged_attn.ops.checks import QUANTISED
from torch_paged_attn.testing import PROBLEMS, assert_accurate, build
from torch_paged_attn.testing.strategies import layouts, problems

HAS_GPU = torch.cuda.is_available()

# fuzzed plans, in parts that several processes share: on a GPU nearly every plan compiles a kernel
PARTS, PLANS = (10, 10) if HAS_GPU else (1, 8)

# what the interpreter runs in minutes: one problem for each thing a kernel must know
FEW = (
    "llama3_8b/prefill_ragged/bf16",
    "llama3_8b/decode_b5/bf16",
    "llama3_8b/mixed/kv_e4m3",
    "llama3_8b/mixed/kv_int8",
    "llama3_8b/prefill/out_e4m3",
    "llama3_8b/speculative/bf16",
    "mistral/window_both/f32",
    "gpt_oss/sinks_window/bf16",
    "mpt/alibi_batch/f32",
    "sglang/page1/f16",
    "training/dropout/f32",
    "more_queries_than_keys/f32",
    "odd_sizes/f32",
    "deepseek_mla/decode/bf16",
    "blocksparse/shared_layout/f32",
    "blocksparse/batched/f32",
)
NAMES = tuple(PROBLEMS) if HAS_GPU or "PAGED_ATTN_ALL_PROBLEMS" in os.environ else FEW


def over(names):
    return pytest.mark.parametrize("problem", [PROBLEMS[n] for n in names], ids=list(names))


def same_bits(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(*(t.contiguous().view(torch.uint8) for t in pair)) for pair in pairs)


@over(NAMES)
def test_agrees_with_the_reference(problem, run, device):
    call = build(problem)
    out, lse = run(call.to(device))
    assert out.dtype == (problem.out_dtype or problem.dtype) and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_accurate(out, lse, call.truth())


DECODE = PROBLEMS["llama3_8b/decode_b5/bf16"]


@pytest.mark.parametrize("kv_dtype", QUANTISED, ids=str)
@pytest.mark.parametrize("exponent", [-40, 0, 40])
def test_decode_reads_pairs_of_8_bit_numbers(exponent, kv_dtype, run, device):
    """Also for queries beyond the range of the products' float16."""
    problem = dataclasses.replace(DECODE, kv_dtype=kv_dtype, descale="heads")
    call = build(problem)
    call.args["q"] *= 2.0**exponent
    call.args["softmax_scale"] = 2.0**-exponent * problem.head_dim**-0.5
    assert_accurate(*run(call.to(device)), call.truth())


@over(NAMES if HAS_GPU else ("llama3_8b/decode_b5/bf16", "blocksparse/batched/f32"))
def test_same_call_same_bits_whatever_the_hints(problem, run, device):
    call = build(problem).to(device)
    first = run(call)
    assert same_bits(first, run(call))
    assert same_bits(first, run(call, max_seqlen_q=2**31 + 5, max_seqlen_k=2**40))


@over([n for n in NAMES if PROBLEMS[n].page_size] if HAS_GPU else ("sglang/page1/f16",))
def test_order_of_pages_changes_no_bit(problem, run, device):
    moved = dataclasses.replace(problem, page_seed=problem.page_seed + 1, spare_pages=9)
    assert same_bits(run(build(problem).to(device)), run(build(moved).to(device)))


@over(
    [n for n in NAMES if not PROBLEMS[n].dropout_p] if HAS_GPU else ("gpt_oss/sinks_window/bf16",)
)
def test_batch_invariant_sequence_alone_equals_itself(problem, run, device, monkeypatch):
    monkeypatch.setattr(environment, "BATCH_INVARIANT", True)
    call = build(problem)
    out, lse = run(call.to(device))
    assert_accurate(out, lse, call.truth())
    bounds = call.args["cu_seqlens_q"].tolist()
    for b in range(len(problem.seqs)):
        rows = slice(bounds[b], bounds[b + 1])
        assert same_bits(run(call.alone(b).to(device)), (out[rows], lse[:, rows]))


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("layout", [st.none(), layouts], ids=["flash_varlen", "blocksparse"])
def test_fuzzed_plans_agree_with_the_reference(layout, part, run, device):
    """Every option mixed. On a GPU there is no time to shrink them."""
    phases = [hypothesis.Phase.generate] if HAS_GPU else list(hypothesis.Phase)

    @hypothesis.seed(part)
    @hypothesis.settings(
        max_examples=PLANS, derandomize=False, database=None, deadline=None, phases=phases
    )
    @hypothesis.given(problems(layout))
    def check(problem):
        call = build(problem)
        assert_accurate(*run(call.to(device)), call.truth())

    check()
