"""Batches of long and short sequences: which kernel does what, and the results of both together."""

import dataclasses
import itertools

import cross_compile
import pytest
import torch
from covering import left_out
from hopper_calls import HAS_HOPPER, HOPPER, hopper_call

from torch_paged_attn.backends.triton import flash_varlen, mixed
from torch_paged_attn.backends.triton.hopper import attention as hopper
from torch_paged_attn.backends.triton.hopper import choices, support, tiles
from torch_paged_attn.backends.triton.portable import attention as portable
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


@pytest.mark.parametrize(
    "seqs, longest, expected",
    [
        (STEP, 0, True),
        (STEP, 300, True),
        (STEP, 16, False),  # as the caller says
        (DECODES, 0, False),
        (((1, 70),), 0, False),
        (((600, 0), (700, 0)), 0, False),
        (((70, 9), (1, 9)), 0, False),  # nothing to share out
        (((70, 3000), (1, 900)), 0, False),  # two are Hopper's alone,
        (((1, 900),) * 4, 0, False),
        (((3, 900), (1, 900)), 0, True),  # unless they have few queries
    ],
)
def test_which_calls_are_mixed(seqs, longest, expected):
    problem = Problem("p", seqs, 8, 2, 128, dtype=bf16, page_size=16)
    with assume(HOPPER):
        assert mixed.is_mixed(hopper_call(problem), longest) is expected


@pytest.mark.parametrize(
    ("longest_keys", "keys"), [(16384, 128), left_out(8192, 64), left_out(1 << 17, 64)]
)
def test_few_long_decodes_beside_a_chunk(longest_keys, keys):
    """Tiles of chunks, if the caller says that contexts are long; a table as wide as engines have
    them says nothing."""
    seqs = ((1, 9000),) * 15 + ((600, 9000),)
    problem = Problem("p", seqs, 28, 4, 128, dtype=bf16, page_size=16)
    with assume(HOPPER):
        table = torch.zeros(16, 1 << 13, dtype=torch.int32)
        call = hopper_call(problem, block_table=table, max_seqlen_k=longest_keys)
        form = flash_varlen.form_of(call, 0)
        assert flash_varlen.kernels_of(call)[0] == "hopper" and form == choices.Form(is_mixed=True)
        config, heads = choices.choose_tiles(call, form)
        assert (heads, config.BLOCK_N, config.SPLITS_KEYS) == (7, keys, keys == 64)


SHORT_STEP = ((1, 20), (1, 9), (1, 15), (1, 16), (1, 7), (300, 6))


@pytest.mark.parametrize(
    "options, longest_keys, expected",
    [
        (dict(), 900, (128, 8, 64, 2)),
        (dict(), 2048, (128, 8, 64, 2)),
        (dict(seqs=((500, 0), *SHORT_STEP)), 900, (128, 8, 64, 2)),  # more rows
        (dict(), 2049, None),  # tiles may have to be cut
        (dict(), 0, None),  # no hint
        (dict(seqs=SHORT_STEP[:5] * 40 + SHORT_STEP[5:]), 900, None),  # a tile for each decode
        (dict(seqs=SHORT_STEP[:5] * 15 + SHORT_STEP[5:]), 900, (128, 8, 64, 2)),
        (dict(seqs=((900, 0), *SHORT_STEP)), 900, None),  # products are most of it
        (dict(window_size_left=127), 0, (128, 8, 64, 1)),
        (dict(window_size_left=127, seqs=((900, 0), *SHORT_STEP)), 0, (128, 8, 64, 1)),
        (dict(window_size_left=4095), 0, None),
        (dict(num_heads=56), 900, (128, 7, 64, 2)),
        (dict(num_heads=56, seqs=((500, 0), *SHORT_STEP)), 900, (128, 7, 64, 2)),
        (dict(num_heads=40), 900, (128, 5, 64, 2)),
        (dict(num_heads=40, seqs=((900, 0), *SHORT_STEP)), 900, (128, 5, 64, 2)),
        (dict(page_size=1), 900, (128, 8, 128, 1)),
        (dict(page_size=1, seqs=SHORT_STEP[:5] * 5 + SHORT_STEP[5:]), 900, None),
        (dict(page_size=1, seqs=SHORT_STEP * 3), 900, (128, 8, 64, 3)),  # more rows
        (dict(head_dim=64), 900, (64, 8, 128, 2)),
        (dict(head_dim=64, window_size_left=127), 900, (64, 8, 64, 1)),
        (dict(head_dim=64, window_size_left=127, seqs=((999, 0), *SHORT_STEP)), 0, (64, 8, 64, 2)),
        (dict(head_dim=64, window_size_left=127, kv_dtype=torch.int8), 900, (64, 8, 128, 2)),
        (dict(head_dim=64, kv_dtype=torch.int8), 900, (64, 8, 128, 2)),
        (dict(head_dim=64, kv_dtype=torch.int8), 4096, None),
        (dict(kv_dtype=torch.int8), 900, (128, 8, 64, 1)),
        (dict(kv_dtype=torch.int8), 2048, None),
        (dict(kv_dtype=torch.int8, window_size_left=127), 2048, (128, 8, 64, 1)),
        (dict(num_heads=16, head_dim=256, kv_dtype=torch.int8), 900, (256, 2, 64, 1)),
        (dict(num_heads=16, head_dim=256), 900, (256, 2, 64, 1)),
    ],
)  # fmt: skip
def test_which_batches_need_no_list(options, longest_keys, expected):
    """By the hint of the longest sequence's keys: heads of a tile, its keys, and consumers."""
    plain = dict(seqs=SHORT_STEP, num_heads=64, num_kv_heads=8, head_dim=128, page_size=16)
    problem = Problem("p", **plain | options, dtype=bf16)
    with assume(HOPPER):
        call = dataclasses.replace(hopper_call(problem), max_seqlen_k=longest_keys)
        # a table as wide as engines have them
        table = call.block_table.new_zeros(call.batch, 1 << 13)
        call = dataclasses.replace(call, block_table=table)
        kernels, _ = flash_varlen.kernels_of(call)
        form = flash_varlen.form_of(call, 0)
        assert form.is_numbered is (expected is not None)
        # a list of tiles, or two kernels
        is_narrow = call.head_dim == 64 and "kv_dtype" in options
        is_alone = call.window_size_left not in choices.SMALL and not is_narrow
        assert (kernels == "hopper") is (is_alone or form.is_numbered)
        if expected is not None:
            config, heads = choices.choose_tiles(call, form)
            assert form == choices.Form(is_numbered=True)
            found = support.width_of(call.head_dim), heads, config.BLOCK_N, config.CONSUMERS
            assert found == expected


@pytest.mark.parametrize("queries, expected", [(300, (5, 1)), (9000, (1, 2))])
def test_heads_and_consumers_of_a_tile(queries, expected):
    """All heads of a group, and one consumer, where rows are few."""
    problem = Problem("p", ((queries, 0), *DECODES), 40, 8, 128, dtype=bf16, page_size=16)
    with assume(HOPPER):
        call = hopper_call(problem)
        config, heads = choices.choose_tiles(call, mixed.form_of(call))
        assert (heads, config.CONSUMERS) == expected


@pytest.mark.parametrize(
    "problem",
    [PROBLEMS[0], left_out(PROBLEMS[1]), pytest.param(PROBLEMS[2], marks=pytest.mark.thorough)],
    ids=lambda p: p.name,
)
def test_short_sequences_and_padding_alone(problem, device):
    """The portable kernel's share: the rows of long sequences are not its own."""
    call = hopper_call(problem, device)
    limit = 16
    out, lse = (torch.full_like(x, 7.0) for x in call.new_results())
    tile_list = torch.tensor([0, 0, limit], dtype=torch.int32, device=device)
    start = portable.plan_beside(call)
    start(tensors_of(call), None, out, lse, tile_list)
    truth = build(problem).truth()
    bounds = call.cu_seqlens_q.tolist()
    for begin, end in itertools.pairwise(bounds):
        if end - begin > limit:
            assert (out[begin:end] == 7.0).all()
            assert (lse[:, begin:end] == 7.0).all()
            # as if they were right
            out[begin:end] = truth.out[begin:end].to(out)
            lse[:, begin:end] = truth.softmax_lse[:, begin:end].to(lse)
    assert_accurate(out, lse, truth)


def compile_both(problem):
    call = hopper_call(problem)
    cross_compile.CALLS["mixed"] = lambda: (
        lambda: mixed.plan_attention(call)(tensors_of(call), None)
    )
    return cross_compile.compile_call("sm90", "mixed")


@pytest.mark.parametrize("problem", [PROBLEMS[0], PROBLEMS[4]], ids=lambda p: p.name)
def test_compiles(problem, compiler):
    kernels = compiler.submit(compile_both, problem).result()
    names = ["_tile_order_kernel", "_hopper_attention_fwd_kernel", "_attention_fwd_kernel"]
    assert [kernel.name for kernel in kernels] == names
    for kernel in kernels:
        assert kernel.faults("sm90", problem.name) == []


def plan_numbered(call):
    """Hopper's kernel alone, without a list of tiles."""
    return hopper.plan_attention(call, form=choices.Form(is_numbered=True))


PLANS = {"both": mixed.plan_attention, "numbered": plan_numbered}


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: p.name)
def test_agrees_with_the_reference(problem, kind):
    call = hopper_call(problem, "cuda")
    assert support.unsupported(call) is None
    truth = build(problem).truth()
    plan = PLANS[kind](call)
    first = plan(tensors_of(call), None)
    assert_accurate(*first, truth)
    tensors = tensors_of(call)
    addresses = [x.data_ptr() for x in tensors]
    for _ in range(3):
        again = plan(tensors, addresses)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


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
    assert tiles.options_of(call, *choices.choose_tiles(call)).MOST_PARTS > 0
    first = hopper.attend(call)
    assert_accurate(*first, build(problem).truth())
    again = hopper.attend(call)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("kind", PLANS)
def test_lengths_change_between_replays(kind):
    """A captured step does whatever the lengths are when it is replayed."""
    problem = Problem(
        "graph", ((1, 700), (90, 400), (1, 20), (8, 600)), 8, 2, 128, dtype=bf16, page_size=16
    )
    call = hopper_call(problem, "cuda")
    plan, tensors = PLANS[kind](call), tensors_of(call)
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
