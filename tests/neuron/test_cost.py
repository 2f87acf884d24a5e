"""What the kernels' design promises, counted: few bytes, long DMAs, room to double buffer."""

import dataclasses
import functools
import sys
from pathlib import Path

import pytest
from covering import left_out, some

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "neuron"))

import cost

CASES = {problem.name.partition("/")[2]: problem for problem in cost.CASES}
# the design's promises: with `--sample`, of the one that is counted soonest
NAMES = some(("prefill_1024", "chunk_128_of_2048", "decode_b8_ctx1k", "mixed"), "decode_b8_ctx1k")
cost_of = functools.cache(cost.cost_of)


@pytest.mark.parametrize("name", NAMES)
def test_little_is_read_twice_and_in_long_pieces(name):
    counted = cost_of(CASES[name])
    assert counted.short_share <= 0.05
    assert counted.dma_bytes <= 1.15 * counted.least_bytes
    # half of a bank's eight, and two items' keys fit beside what a stack keeps
    assert counted.peak["psum"] <= 8 * 1024 and counted.peak["sbuf"] <= 160 * 1024


@pytest.mark.parametrize("name", NAMES)
def test_no_more_products_than_a_design_that_transposes_by_dma(name):
    """On the third generation, where vLLM's design leaves probabilities to DMA."""
    assert cost_of(CASES[name]).matmuls <= cost.vllm_design(CASES[name]).matmuls


@pytest.mark.parametrize("name", NAMES)
def test_bytes_move_in_pieces_of_2_KiB(name):
    """Tiles of 512 keys, as a prompt of 1024 has them, leave values in pieces of 1 KiB."""
    assert cost_of(CASES[name]).long_share >= (0.85 if name == "prefill_1024" else 0.95)


@pytest.mark.parametrize("name", [NAMES[0], *NAMES[2:]])
def test_less_than_a_mask_from_the_host_and_padded_contexts(name):
    """On the second generation, where either turns probabilities by products."""
    counted, design = cost_of(CASES[name]), cost.vllm_design(CASES[name], generation=2)
    assert counted.dma_bytes < design.dma_bytes and counted.matmuls < design.matmuls


@pytest.mark.device_suite
@pytest.mark.parametrize("problem", cost.BY_TOKEN, ids=lambda problem: problem.name)
def test_scales_by_token_are_read_once(problem):
    counted = cost_of(problem)
    keys = sum(problem.key_lens) * problem.num_kv_heads
    least = 2 * keys * (problem.head_dim + 4)  # bytes, and a float32
    assert least <= counted.dma_bytes <= 1.15 * least
    assert counted.short_share <= 0.05
    assert counted.peak["psum"] <= 8 * 1024 and counted.peak["sbuf"] <= 160 * 1024


# a list for each KV head makes a sequence of each token and head: shorter tables, more often
@pytest.mark.device_suite
@pytest.mark.parametrize(("heads", "long_share"), [("one", 0.95), ("kv", 0.9)])
def test_of_selected_pages_little_more_is_read_than_lists_name(heads, long_share):
    selected = dataclasses.replace(cost.SELECTED.selected, heads=heads)
    problem = dataclasses.replace(cost.SELECTED, selected=selected)
    counted = cost_of(problem)
    row = 2 * problem.head_dim * problem.dtype.itemsize
    keys = len(problem.seqs) * cost.SELECTED_UNITS * problem.page_size
    named = keys * problem.num_kv_heads * row
    assert named <= counted.dma_bytes <= 1.1 * named < counted.kv_bytes / 2
    assert counted.long_share >= long_share
    assert counted.peak["psum"] <= 8 * 1024 and counted.peak["sbuf"] <= 160 * 1024


def shares(name, generation):
    """What a backward costs, and its shares of flash_attn_bwd's bytes, TensorE's instructions and
    columns, VectorE's and ScalarE's instructions."""
    problem = next(p for p in cost.BACKWARD_CASES if p.name == name)
    counted = cost_of(problem, generation, backward=True)
    old = cost.flash_attn_bwd_design(problem)
    elementwise = counted.instructions["vector"] + counted.instructions["scalar"]
    return counted, (
        (counted.dma_bytes + cost.surroundings(problem)) / old.dma_bytes,
        counted.matmuls / old.matmuls,
        counted.columns / old.columns,
        elementwise / old.instructions["vector and scalar"],
    )


@pytest.mark.parametrize(
    ("name", "most"),
    [
        left_out("256, causal", (0.95, 0.5, 0.55, 0.65)),
        left_out("256", (0.95, 0.5, 0.7, 0.55)),
        ("384, causal", (0.95, 0.4, 0.5, 0.5)),
        left_out("384", (0.95, 0.4, 0.75, 0.45)),
        left_out("512, causal", (0.95, 0.4, 0.5, 0.45)),
        left_out("512", (0.95, 0.4, 0.8, 0.35)),
        left_out("2048, causal", (0.6, 0.4, 0.7, 0.35)),
        left_out("2048", (0.6, 0.4, 0.8, 0.3)),
    ],
)
def test_backward_costs_less_than_flash_attn_bwd(name, most):
    problem = next(p for p in cost.BACKWARD_CASES if p.name == name)
    counted, found = shares(name, 3)
    assert all(share <= limit for share, limit in zip(found, most, strict=True)), found
    # what DMA turns instead is at most three times what flash_attn_bwd moves to and from HBM
    assert counted.turned_bytes <= 3 * cost.flash_attn_bwd_design(problem).dma_bytes
    assert counted.peak["psum"] <= 8 * 1024 and counted.peak["sbuf"] <= 160 * 1024


@pytest.mark.parametrize(
    ("name", "most"),
    [
        # rows come as they lie: transpositions that flash_attn_bwd leaves to others
        left_out("256, causal", (0.95, 1.0, 0.9, 1.0)),
        left_out("256", (0.95, 1.2, 1.1, 0.85)),
        ("384, causal", (0.95, 1.0, 0.8, 0.85)),
        left_out("384", (0.95, 1.2, 1.2, 0.7)),
        left_out("512, causal", (0.95, 1.0, 0.85, 0.75)),
        left_out("512", (0.95, 1.1, 1.15, 0.6)),
        left_out("2048, causal", (0.6, 0.8, 0.9, 0.5)),
        left_out("2048", (0.6, 0.8, 1.0, 0.4)),
    ],
)
def test_backward_where_dma_does_not_transpose(name, most):
    _, found = shares(name, 2)
    assert all(share <= limit for share, limit in zip(found, most, strict=True)), found


@pytest.mark.device_suite
def test_cost_follows_the_listed_blocks(monkeypatch):
    from torch_paged_attn.backends.neuron import attention

    monkeypatch.setattr(attention, "UNROLLED", 0)  # a loop leaves out what rounds the items up
    full = dataclasses.replace(
        CASES["blocksparse_4096_quarter"], seqs=((2048, 0),), num_heads=4, num_kv_heads=1
    )
    matmuls = {}
    for density in (0.25, 1.0):
        layout = dataclasses.replace(full.layout, density=density)
        matmuls[density] = cost_of(dataclasses.replace(full, layout=layout)).matmuls
    # tiles are of 512 keys: the shorter lists fill theirs less
    assert matmuls[0.25] < 0.5 * matmuls[1.0]
