"""Batches of long and short sequences."""

import pytest
import torch
from hopper_calls import HAS_HOPPER, HOPPER, hopper_call

from torch_paged_attn.backends.triton.dispatch import kernels
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.forward import choices, tiles
from torch_paged_attn.backends.triton.hopper.forward import plan as hopper
from torch_paged_attn.backends.triton.runtime.target import assume
from torch_paged_attn.testing import Problem, assert_accurate, build

bf16, f16 = torch.bfloat16, torch.float16

STEP = ((1, 300), (130, 0), (1, 511), (37, 91), (0, 17), (5, 64), (1, 0), (300, 600), (20, -15))
DECODES = ((1, 70), (1, 900), (1, 33), (1, 64))
# few tiles over many keys, which are cut into pieces
FEW = ((70, 5000), (1, 3000), (2, 4500))
PROBLEMS = tuple(
    Problem(f"{name}/{'f16' if dtype == f16 else 'bf16'}", seqs, dtype=dtype, **options)
    for name, seqs, dtype, options in (
        ("g4", STEP, bf16, dict(num_heads=8, head_dim=128, page_size=16, padding_rows=70)),
        ("g1_page64", STEP, f16, dict(num_kv_heads=4, head_dim=128, page_size=64)),
        ("g7", STEP, bf16, dict(num_heads=14, head_dim=128, page_size=32, sinks=True)),
        ("g8_d64", STEP * 3, bf16, dict(num_heads=16, head_dim=64, page_size=16, softcap=9.0)),
        ("d256", STEP, bf16, dict(num_heads=4, head_dim=256, page_size=128)),
        ("window", STEP, bf16, dict(num_heads=8, head_dim=128, page_size=16, window_size_left=40)),
        ("full", STEP, bf16, dict(num_heads=8, head_dim=128, page_size=16, causal=False)),
        ("decodes_alone", DECODES, bf16, dict(num_heads=8, head_dim=128, page_size=16)),
        ("few", FEW, bf16, dict(num_heads=8, head_dim=128, page_size=16, padding_rows=3)),
        ("few_g1", FEW, bf16, dict(num_kv_heads=4, head_dim=64, page_size=16, sinks=True)),
        ("page1", STEP, bf16, dict(num_heads=8, head_dim=128, page_size=1, padding_rows=70)),
        (
            "page2_window",
            STEP,
            bf16,
            dict(num_heads=8, head_dim=64, page_size=2, window_size_left=40),
        ),
        ("few_page1", FEW, bf16, dict(num_heads=8, head_dim=128, page_size=1)),
        ("few_g5", FEW, bf16, dict(num_heads=10, head_dim=128, page_size=64, sinks=True)),
        ("few_d256", FEW, bf16, dict(num_heads=4, head_dim=256, page_size=8)),
        ("few_full", FEW, f16, dict(num_heads=8, head_dim=128, page_size=128, causal=False)),
    )
)


def tensors_of(call):
    return tuple(call.given_tensors().values())


# tiles of a list whose keys are cut, and tiles without a list: of all problems
KINDS = "cut low", "numbered low"
# larger tiles, without a list or with keys that are divided in equal shares: of some problems
LARGE = {
    "numbered divided": ("g7", "page1", "few_g1"),
    "numbered three": ("page1", "page2_window", "few_g1"),
    "dealt tall": ("g4", "g7", "d256", "page1", "few", "few_g1", "few_page1", "few_g5", "few_d256"),
    "dealt three": ("page1", "page2_window", "few_g1", "few_page1"),
}


def kinds() -> list[tuple[str, Problem]]:
    found = [(kind, problem) for problem in PROBLEMS for kind in KINDS]
    of_name = {problem.name.partition("/")[0]: problem for problem in PROBLEMS}
    return found + [(kind, of_name[name]) for kind, names in LARGE.items() for name in names]


def plan_of(kind, call):
    return hopper.plan_attention(call, form=kernels.named(kind).form)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kind, problem", kinds(), ids=lambda x: getattr(x, "name", x))
def test_agrees_with_the_reference(problem, kind):
    call = hopper_call(problem, "cuda")
    assert support.unsupported(call) is None
    truth = build(problem).truth()
    plan = plan_of(kind, call)
    first = plan(tensors_of(call), None)
    assert_accurate(*first, truth)
    tensors = tensors_of(call)
    addresses = [x.data_ptr() for x in tensors]
    for _ in range(3):
        again = plan(tensors, addresses)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("kind, problem", kinds(), ids=lambda x: getattr(x, "name", x))
def test_these_ways_have_tiles(problem, kind):
    with assume(HOPPER):
        call = hopper_call(problem)
        assert choices.unsupported_tiles(call, kernels.named(kind).form) is None


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("problem", PROBLEMS[-3:], ids=lambda p: p.name)
def test_pieces_of_one_sequence(problem):
    """Hopper's kernel alone, which cuts the keys of a tile."""
    problem = Problem(
        problem.name, problem.seqs[:1], problem.num_heads, problem.num_kv_heads, problem.head_dim,
        dtype=problem.dtype, page_size=problem.page_size, causal=problem.causal,
        sinks=problem.sinks,
    )  # fmt: skip
    call = hopper_call(problem, "cuda")
    form = choices.Form(is_cut=True, tiles="low")
    assert tiles.options_of(call, *choices.choose_tiles(call, form), form).MOST_PARTS > 0
    first = hopper.attend(call, form=form)
    assert_accurate(*first, build(problem).truth())
    again = hopper.attend(call, form=form)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kind", [*KINDS, "dealt tall"])
def test_lengths_change_between_replays(kind):
    """A captured step does whatever the lengths are when it is replayed."""
    problem = Problem(
        "graph", ((1, 700), (90, 400), (1, 20), (8, 600)), 8, 2, 128, dtype=bf16, page_size=16
    )
    call = hopper_call(problem, "cuda")
    plan, tensors = plan_of(kind, call), tensors_of(call)
    plan(tensors, None)
    addresses = [x.data_ptr() for x in tensors]
    plan(tensors, addresses)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # calls after one another: the next ones must not overtake
        results = [plan(tensors, addresses) for _ in range(5)]
    for seqs in ((1, 91, 92, 100), (40, 41, 99, 100), (1, 2, 3, 4)):
        call.cu_seqlens_q.copy_(torch.tensor([0, *seqs], dtype=torch.int32))
        graph.replay()
        expected = plan(tensors, addresses)
        for found in results:
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("hint", [0, 1, 5, 16, 300, 2**31 + 5])
def test_a_wrong_hint_costs_no_correctness(hint, run):
    call = build(PROBLEMS[0])
    assert_accurate(*run(call.to("cuda"), max_seqlen_q=hint, max_seqlen_k=hint), call.truth())
