"""The ops on TPU over the named problems: right, without a race, and with every wait done."""

import dataclasses
import os

import hypothesis
import pytest
import torch

from torch_paged_attn.testing import PROBLEMS, assert_accurate, build
from torch_paged_attn.testing.strategies import problems

# A case is seconds of compiling: these are the ones whose way through the kernels is their own.
# The others differ in strides, which JAX arrays do not have, or in what is the same one step later.
NAMES = (
    "minilm/packed/f32",
    "llama3_8b/decode_b5/bf16",
    "llama3_8b/mixed/bf16",
    "llama3_8b/mixed/f16",
    "llama3_8b/mixed/kv_e4m3",
    "llama3_8b/mixed/kv_int8",
    "llama3_8b/prefill/e4m3",
    "llama3_8b/speculative/bf16",
    "gemma2/window_softcap/bf16",
    "gpt_oss/sinks_window/bf16",
    "mpt/alibi_batch/f32",
    "deepseek_mla/decode/bf16",
    "sglang/page1/f16",
    "training/dropout/f32",
    "more_queries_than_keys/f32",
    "odd_sizes/f32",
    "phi3_small/local_strided/bf16",
    "blocksparse/shared_layout/f32",
    "blocksparse/batched/f32",
    "blocksparse/wide_blocks/f16",
)

# one launch and two, and what fetches more than keys
BOTH_MODES = ("llama3_8b/decode_b5/bf16", "t5/bias/f32", "blocksparse/batched/f32")


def over(names):
    return pytest.mark.parametrize("problem", [PROBLEMS[n] for n in names], ids=list(names))


def same_bits(one, other):
    pairs = zip(one, other, strict=True)
    return all(torch.equal(*(t.contiguous().view(torch.uint8) for t in pair)) for pair in pairs)


@over(NAMES)
def test_agrees_with_the_reference(problem, run):
    call = build(problem)
    out, lse = run(call, "on_wait")
    assert out.dtype == (problem.out_dtype or problem.dtype) and lse.dtype == torch.float32
    assert_accurate(out, lse, call.truth())


@over(BOTH_MODES)
def test_either_way_of_the_dmas_gives_the_same_bits(problem, run):
    call = build(problem)
    assert same_bits(run(call, "on_wait"), run(call, "eager"))


@over(["llama3_8b/mixed/bf16", "gemma2/window_softcap/bf16", "blocksparse/batched/f32"])
def test_steps_of_several_pieces_agree_too(problem, run):
    from torch_paged_attn.backends.tpu.config import Config

    call = build(problem)
    config = Config(block_k=512, step_k=256, tile_rows=64)
    assert_accurate(*run(call, "on_wait", config=config), call.truth())


@over(["blocksparse/batched/f32"])
def test_two_cores_give_the_same_bits(problem, run):
    from torch_paged_attn.backends.tpu.config import Config

    config = Config(block_k=256, step_k=128, tile_rows=64)
    call = build(problem)
    cores = dataclasses.replace(config, num_cores=2)
    assert same_bits(run(call, "on_wait", config=config), run(call, "on_wait", config=cores))


@over(["llama3_8b/decode_b5/bf16"])
def test_order_of_pages_changes_no_bit(problem, run):
    moved = dataclasses.replace(problem, page_seed=problem.page_seed + 1, spare_pages=9)
    assert same_bits(run(build(problem), "on_wait"), run(build(moved), "on_wait"))


def test_sequence_alone_equals_itself_in_the_batch(run):
    call = build(PROBLEMS["llama3_8b/mixed/bf16"])
    out, lse = run(call, "on_wait")
    bounds = call.args["cu_seqlens_q"].tolist()
    rows = slice(bounds[2], bounds[3])
    alone = run(call.alone(2), "on_wait", max_seqlen_q=call.args["q"].shape[0])
    assert same_bits(alone, (out[rows], lse[:, rows]))


def test_a_wrong_hint_costs_no_correctness(run):
    call = build(PROBLEMS["llama3_8b/mixed/bf16"])
    assert_accurate(*run(call, "on_wait", max_seqlen_q=1), call.truth())


def test_a_cache_passed_whole_is_read_where_it_is(run):
    call = build(PROBLEMS["llama3_8b/mixed/bf16"])
    whole = dataclasses.replace(
        call, args=call.args | {"k": torch.stack([call.args["k"], call.args["v"]]), "v": None}
    )
    assert same_bits(run(whole, "on_wait"), run(call, "on_wait"))


def test_a_nan_of_one_sequence_stays_there(run):
    call = build(PROBLEMS["llama3_8b/mixed/f32"])
    out, lse = run(call, "on_wait")
    call.args["q"][0] = float("nan")
    poisoned, poisoned_lse = run(call, "on_wait")
    assert poisoned[0].isnan().all() and poisoned_lse[:, 0].isnan().all()
    assert same_bits((poisoned[1:], poisoned_lse[:, 1:]), (out[1:], lse[:, 1:]))


@pytest.mark.parametrize("op", ["flash_varlen", "blocksparse"])
def test_nobody_reads_the_keys_that_a_bias_hides(op, run):
    layout = {"layout": PROBLEMS["blocksparse/batched/f32"].layout} if op == "blocksparse" else {}
    problem = dataclasses.replace(
        PROBLEMS["llama3_8b/mixed/f32"], seqs=((37, 91), (1, 140)), bias="bool", **layout
    )
    call = build(problem)
    call.args["attn_bias"][..., 64:80] = False
    size = problem.page_size
    pages = call.args["block_table"][:, 64 // size : 80 // size].long()
    call.args["k"][pages] = call.args["v"][pages] = float("nan")
    assert_accurate(*run(call, "on_wait"), call.truth())


# every plan is compiled: seconds, half a minute with dropout
@hypothesis.settings(
    max_examples=40 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 3,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(problem=problems())
def test_fuzzed_plans_agree_with_the_reference(problem, run):
    call = build(problem)
    assert_accurate(*run(call, "on_wait"), call.truth())
