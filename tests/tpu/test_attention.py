"""What is the TPU's own in attention: either way of the DMAs, pieces of steps, cores, hints, fuzzed
plans. `tests/backends` has the named problems.
"""

import dataclasses
import os

import hypothesis
import pytest
import torch
from same_bits import same_bits

from torch_paged_attn.testing import PROBLEMS, assert_accurate, build
from torch_paged_attn.testing.strategies import problems

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


def over(*names, device_suite=(), thorough=()):
    """The last ones are left to the TPU's own suite, and to `make thorough`."""
    cases = [PROBLEMS[name] for name in names]
    cases += [pytest.param(PROBLEMS[n], marks=pytest.mark.device_suite) for n in device_suite]
    cases += [pytest.param(PROBLEMS[name], marks=pytest.mark.thorough) for name in thorough]
    return pytest.mark.parametrize("problem", cases, ids=[*names, *device_suite, *thorough])


# either way of the DMAs is a program to compile, as are two cores and a cache passed whole
@pytest.mark.device_suite
def test_dmas_may_run_as_they_start(run):
    call = build(PROBLEMS["t5/bias/f32"])
    found = run(call, "eager")
    assert_accurate(*found, call.truth())
    if IS_THOROUGH:
        assert same_bits(run(call, "on_wait"), found)


@over(device_suite=["llama3_8b/decode_b5/bf16"], thorough=["llama3_8b/mixed/bf16"])
def test_a_cache_passed_whole_is_read_where_it_is(problem, run):
    call = build(problem)
    whole = dataclasses.replace(
        call, args=call.args | {"k": torch.stack([call.args["k"], call.args["v"]]), "v": None}
    )
    expected = run(call, "on_wait")
    assert same_bits(run(whole, "eager"), expected)
    if IS_THOROUGH:
        assert same_bits(run(whole, "on_wait"), expected)
        assert same_bits(run(call, "eager"), expected)


@over(device_suite=["blocksparse/batched/f32"])
def test_two_cores_give_the_same_bits(problem, run):
    from torch_paged_attn.backends.tpu.tile_sizes import Config

    config = Config(block_k=256, step_k=128, tile_rows=64)
    call = build(problem)
    cores = dataclasses.replace(config, num_cores=2)
    expected = run(call, "on_wait", config=config)
    assert same_bits(run(call, "eager", config=cores), expected)
    if IS_THOROUGH:
        assert same_bits(run(call, "on_wait", config=cores), expected)
        assert same_bits(run(call, "eager", config=config), expected)


# the first has steps behind and before a window, the second layouts
@over(
    device_suite=["gemma2/window_softcap/bf16", "blocksparse/batched/f32"],
    thorough=["llama3_8b/mixed/bf16"],
)
def test_steps_of_several_pieces_agree_too(problem, run):
    from torch_paged_attn.backends.tpu.tile_sizes import Config

    call = build(problem)
    config = Config(block_k=512, step_k=256, tile_rows=64)
    assert_accurate(*run(call, "on_wait", config=config), call.truth())


@pytest.mark.device_suite  # tests/backends has hints
def test_a_wrong_hint_costs_no_correctness(run):
    # a tile for each query: few of them
    problem = dataclasses.replace(PROBLEMS["llama3_8b/mixed/bf16"], seqs=((9, 70), (1, 140)))
    call = build(problem)
    assert_accurate(*run(call, "on_wait", max_seqlen_q=1), call.truth())


@pytest.mark.device_suite
@pytest.mark.parametrize("keys", [528, pytest.param(512, marks=pytest.mark.thorough)])
def test_a_table_may_end_where_its_last_sequence_does(keys, run):
    """A block of pages ends there, too, or reads on: 512 is the keys of a block."""
    problem = PROBLEMS["llama3_8b/decode_b5/bf16"]
    call = build(dataclasses.replace(problem, seqs=((1, 40), (1, keys - 1)), page_size=16))
    table = call.args["block_table"][:, : keys // 16].contiguous()
    assert_accurate(*run(call, "on_wait", block_table=table.numpy()), call.truth())


@pytest.mark.device_suite
def test_decodes_of_one_stack_agree_by_longer_blocks(run):
    """Two KV heads of groups of four are one stack, whose blocks are of 1024 keys instead of 512
    and are halved twice: contexts that end within several parts of one, and pages so small that
    their copies are started in parts.
    """
    problem = dataclasses.replace(
        PROBLEMS["llama3_8b/decode_b5/bf16"], seqs=((1, 1537), (1, 1000), (1, 257), (1, 0)),
        dtype=torch.float32, page_size=8,
    )  # fmt: skip
    _assert_accurate_in_blocks_of(512, problem, run)


@pytest.mark.device_suite
def test_latent_decodes_agree_by_longer_blocks(run):
    seqs = (1, 1024), (1, 700), (1, 385), (1, 1)
    problem = dataclasses.replace(PROBLEMS["deepseek_mla/decode/bf16"], seqs=seqs)
    _assert_accurate_in_blocks_of(256, problem, run)


def _assert_accurate_in_blocks_of(keys, problem, run):
    from torch_paged_attn.backends.tpu.tile_sizes import Config

    call = build(problem)
    config = Config(block_k=keys, step_k=keys // 2, tile_rows=64)
    assert_accurate(*run(call, "on_wait", config=config), call.truth())


@pytest.mark.device_suite
@pytest.mark.parametrize(
    "op", ["blocksparse", pytest.param("flash_varlen", marks=pytest.mark.thorough)]
)
def test_keys_that_a_bias_hides_are_not_read(op, run):
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
@pytest.mark.device_suite
@hypothesis.settings(
    max_examples=40 if IS_THOROUGH else 2,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(problem=problems())
def test_fuzzed_plans_agree_with_the_reference(problem, run):
    call = build(problem)
    assert_accurate(*run(call, "on_wait"), call.truth())
