"""What is Neuron's own in attention: loops, programs that share the work, dropout, fuzzed plans.
`tests/backends` has the named problems.
"""

import dataclasses
import functools
import itertools
import os

import hypothesis
import pytest
import torch
from covering import every_row, some
from hypothesis import strategies as st
from same_bits import same_bits

from torch_paged_attn.reference.philox import dropout_keep
from torch_paged_attn.testing import PROBLEMS, Layout, assert_accurate, build
from torch_paged_attn.testing.strategies import layouts, problems

GENERATIONS = [2, 3, 4]
FULL = Layout(16, 16, density=1.0)


@pytest.fixture
def tiles(monkeypatch):
    """The tiles of keys of every list that is laid out, `(tile_k, share)`."""
    from torch_paged_attn.backends.neuron import plan

    seen, make = set(), plan.lay_out

    def spy(work, *rest):
        seen.add((work.tile_k, work.share))
        return make(work, *rest)

    monkeypatch.setattr(plan, "lay_out", spy)
    plan.plan_cache.clear()
    return seen


def over(names, device_suite=()):
    """The last ones are left to Neuron's own suite."""
    cases = [PROBLEMS[name] for name in names]
    cases += [pytest.param(PROBLEMS[n], marks=pytest.mark.device_suite) for n in device_suite]
    return pytest.mark.parametrize("problem", cases, ids=[*names, *device_suite])


def few_heads(problem):
    """Half the heads of a layout for each head, which take turns."""
    if problem.layout is None or problem.layout.heads != "all":
        return problem
    return dataclasses.replace(problem, num_heads=problem.num_heads // 2)


def pairs(bounds):
    return list(itertools.pairwise(bounds.tolist()))


MANY_HEADS = {
    "keys": (3, {"num_kv_heads": 136}),
    # on the second generation each row is a DMA of its own: one sequence
    "results": (2, {"num_kv_heads": 64, "head_dim": 256, "seqs": ((3, 20),)}),
    "tiles of keys": (2, {"num_kv_heads": 32, "head_dim": 512, "kv_dtype": torch.int8}),
    "third generation": (3, {"num_kv_heads": 64, "head_dim": 512, "kv_dtype": torch.int8}),
}
EXAMPLES = hypothesis.settings.default.max_examples
if os.environ.get("HYPOTHESIS_PROFILE") == "thorough":
    MANY_HEADS["stack"] = 2, {"num_kv_heads": 128}


# the quickest stands for all
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name == "tiles of keys" else pytest.mark.device_suite)
        for name in MANY_HEADS
    ],
)
def test_heads_without_room_together_go_one_by_one(name, run):
    """Or in shorter tiles: their keys, what a stack keeps of them, and its results fill SBUF."""
    import nki_emulator

    generation, options = MANY_HEADS[name]
    options = {"num_heads": options["num_kv_heads"], "seqs": ((3, 20), (1, 0)), **options}
    problem = dataclasses.replace(PROBLEMS["llama3_8b/mixed/bf16"], name=name, **options)
    call = build(problem)
    with nki_emulator.emulated(generation):
        found = run(call)
    assert_accurate(*found, call.truth())


@over(
    ["llama3_8b/mixed/bf16", "mpt/alibi_batch/f32"],
    device_suite=["phi3_small/local_strided/bf16", "t5/bias/f32"],
)
def test_dynamic_loop_changes_no_bit(problem, run, machine, monkeypatch):
    from torch_paged_attn.backends.neuron import attention

    call = build(few_heads(problem))
    unrolled = run(call)
    monkeypatch.setattr(attention, "UNROLLED", 0)
    assert same_bits(run(call), unrolled)


LONG = dataclasses.replace(
    PROBLEMS["llama3_8b/mixed/bf16"], num_heads=4, num_kv_heads=2, cache_layout="hnd", page_size=16
)
LONG_TILES = {
    "decodes": {"seqs": ((1, 2040), (1, 1000), (1, 1023))},
    "chunk": {"seqs": ((70, 1950),), "softcap": 20.0},
    "window": {"seqs": ((1, 4090), (5, 4085)), "window_size_left": 2010},
    "eight bits": {"seqs": ((1, 2047), (130, 1900)), "kv_dtype": torch.float8_e4m3fn},
    "float32": {"seqs": ((2, 1022), (1, 900)), "dtype": torch.float32},
    "dropout": {"seqs": ((70, 1950),), "dropout_p": 0.2},
    "blocks": {"seqs": ((64, 1984),), "layout": Layout(64, 64, density=0.9)},
    "bias": {"seqs": ((3, 1020),), "bias": "float"},
}


# all on the third generation; on the others what they transpose and reduce otherwise
@pytest.mark.parametrize(
    "generation, name",
    every_row(3, [*((3, name) for name in LONG_TILES), (2, "decodes"), (4, "decodes")]),
)
def test_long_tiles(name, generation, run, tiles):
    """Tiles of 1024 and 2048 keys, gathered by runs of 8 and 16 tokens of a page."""
    import nki_emulator

    problem = dataclasses.replace(LONG, name=f"long/{name}", **LONG_TILES[name])
    call = build(problem)
    with nki_emulator.emulated(generation):
        found = run(call)
    assert max(tiles)[0] >= 1024
    assert_accurate(*found, call.truth())


SHARED = {
    "pairs": ({"seqs": ((1, 300), (70, 30))}, 2),
    "fours": ({"head_dim": 64, "seqs": ((3, 200), (0, 5), (1, 90)), "softcap": 20.0}, 4),
    "eight bits": ({"kv_dtype": torch.float8_e4m3fn, "seqs": ((2, 300), (1, 0))}, 4),
    "window": ({"seqs": ((40, 300),), "window_size_left": 100, "alibi": "heads"}, 2),
    "wide": ({"head_dim": 160, "seqs": ((2, 130),), "sinks": True}, 2),
    "blocks": ({"seqs": ((64, 200),), "layout": Layout(16, 32, density=0.5)}, 2),
    "dropout": ({"seqs": ((30, 60),), "dropout_p": 0.2}, 2),
    "two programs": ({"seqs": ((9, 300),)}, 2),
    "the last page": ({"seqs": ((1, 12),), "spare_pages": 0}, 2),
}


@pytest.mark.parametrize(
    "generation, name",
    every_row(2, [*((3, name) for name in SHARED), (2, "pairs"), (2, "eight bits"), (4, "fours")]),
)
def test_heads_share_a_gather_of_keys(name, generation, run, tiles, monkeypatch):
    """Heads divide the partitions, so that each of them has runs of 8 or 16 tokens of a page."""
    import nki_emulator

    options, share = SHARED[name]
    problem = dataclasses.replace(LONG, num_heads=8, num_kv_heads=4, name=f"shared/{name}")
    call = build(dataclasses.replace(problem, **options))
    if name == "two programs":
        monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    with nki_emulator.emulated(generation):
        found = run(call)
    assert tiles == {(512, share)}
    assert_accurate(*found, call.truth())


@pytest.mark.parametrize("change", [{"num_kv_heads": 1}, {"bias": "bool"}, {"page_size": 4}])
def test_heads_share_nothing_where_they_cannot(change, run, tiles, machine):
    """One head, a bias laid out for unshared keys, pages without longer runs."""
    problem = dataclasses.replace(LONG, seqs=((2, 100),), name="unshared", **change)
    call = build(problem)
    assert_accurate(*run(call), call.truth())
    assert {share for _, share in tiles} == {1}


def test_long_prompts_get_long_tiles_beside_short_ones(run, tiles, machine, monkeypatch):
    """Two lists: of the stacks that fill tiles of 1024 keys, and of the others."""
    from torch_paged_attn.backends.neuron import work_list

    call = build(dataclasses.replace(LONG, name="split", seqs=((1, 1000), (1, 400), (1, 1023))))
    together = run(call)
    assert tiles == {(512, 2)}
    monkeypatch.setattr(work_list, "LAUNCH_COLUMNS", 2048)
    from torch_paged_attn.backends.neuron import plan

    plan.plan_cache.clear()
    tiles.clear()
    apart = run(call)
    assert tiles == {(1024, 1), (512, 2)}
    for found in (together, apart):
        assert_accurate(*found, call.truth())


@pytest.mark.parametrize("machine", GENERATIONS, indirect=True)
def test_a_stack_forgets_the_maxima_of_the_one_before(run, machine):
    """Beside scores of 200, as the first sequence has, exponentials of -200 are 0."""
    problem = dataclasses.replace(PROBLEMS["minilm/packed/f32"], seqs=((3, 0), (3, 0)))
    call = build(problem)
    q, k = call.args["q"], call.args["k"]
    scale = call.args["softmax_scale"] or q.shape[2] ** -0.5
    q.fill_(1.0)
    k.fill_(200.0 / (scale * q.shape[2]))
    k[3:] *= -1
    assert_accurate(*run(call), call.truth())


@pytest.mark.parametrize("machine", some(GENERATIONS, 3), indirect=True)
def test_a_stack_leaves_nan_to_the_one_before(run, machine):
    """Its sums would stay NaN however they are rescaled: 0 * NaN is NaN."""
    call = build(dataclasses.replace(PROBLEMS["minilm/packed/f32"], seqs=((3, 0), (3, 0))))
    out, lse = run(call)
    call.args["q"][:3] = float("nan")
    found, found_lse = run(call)
    assert found[:3].isnan().all()
    assert same_bits([found[3:], found_lse[:, 3:]], [out[3:], lse[:, 3:]])


# the first shares its heads, the others have one, or one at a time: these share their items
@over(
    ["odd_sizes/f32"],
    device_suite=[
        "llama3_8b/mixed/bf16",
        "gpt_oss/sinks_window/bf16",
        "phi3_small/local_strided/bf16",
        "blocksparse/batched/f32",
    ],
)
def test_two_programs_write_apart_in_either_order(problem, run, machine, monkeypatch):
    import nki_emulator

    from torch_paged_attn.backends.neuron import attention

    call = build(few_heads(problem))
    alone = run(call)
    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "2")
    forwards, backwards = (
        functools.partial(nki_emulator.simulate, reverse=reverse) for reverse in (False, True)
    )
    for unrolled, order in itertools.product((2**20, 0), (forwards, backwards)):
        monkeypatch.setattr(attention, "UNROLLED", unrolled)
        monkeypatch.setattr(nki_emulator, "simulate", order)
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


# a plan takes half a second; `make test-neuron-emulated` draws from tests/properties
@pytest.mark.device_suite
@hypothesis.settings(max_examples=EXAMPLES // 3 if EXAMPLES > 100 else 15)
@hypothesis.given(
    problems(st.one_of(st.none(), layouts)),
    st.sampled_from(GENERATIONS),
    st.sampled_from((1, 2)),
    st.booleans(),
)
def test_fuzzed_plans_agree_with_the_reference(problem, generation, programs, is_dynamic):
    from nki_emulator import emulated

    from torch_paged_attn.backends.neuron import BACKEND, attention

    call = build(problem)
    args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | call.args
    with pytest.MonkeyPatch.context() as patch, emulated(generation):
        patch.setenv("NEURON_LOGICAL_NC_CONFIG", str(programs))
        patch.setattr(attention, "UNROLLED", 0 if is_dynamic else 2**20)
        assert_accurate(*BACKEND.function(call.op)(**args), call.truth())
