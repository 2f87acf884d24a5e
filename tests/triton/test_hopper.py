"""The Hopper kernel: what it leaves to the portable one, what the compiler makes of it and, on a
Hopper chip, its results."""

import dataclasses
import logging
import os

import cross_compile
import pytest
import torch
from covering import covering, every_other, left_out, some
from hopper_calls import HAS_HOPPER, HOPPER, LONG, MIXED, hopper_call, unsupported

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import flash_varlen
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.forward import choices, tiles
from torch_paged_attn.backends.triton.hopper.forward import plan as hopper
from torch_paged_attn.backends.triton.runtime.target import Target, assume
from torch_paged_attn.ops import path
from torch_paged_attn.testing import PROBLEMS, Layout, Problem, assert_accurate, build

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
e4m3, i8 = torch.float8_e4m3fn, torch.int8

PADDED = dict(padding_rows=140)
SHAPES = tuple(
    Problem(f"{name}/{'f16' if dtype == f16 else 'bf16'}", seqs, dtype=dtype, **options)
    for name, seqs, dtype, options in (
        ("packed", MIXED, bf16, dict(head_dim=128, padding_rows=5)),
        ("packed_mha", MIXED, f16, dict(head_dim=128, num_kv_heads=4, causal=False)),
        ("mqa_packed_heads", MIXED, bf16, dict(num_heads=8, num_kv_heads=1, padding_rows=140)),
        ("three_heads_a_group", MIXED, bf16, dict(num_heads=6, head_dim=80)),
        ("five_heads", MIXED, bf16, dict(num_heads=10, head_dim=128, alibi="heads", **PADDED)),
        ("d64", MIXED, bf16, dict(causal=False)),
        ("d64_long", LONG, bf16, {}),
        ("d256", MIXED, bf16, dict(head_dim=256)),
        ("d256_page16_window", MIXED, f16, dict(head_dim=256, page_size=16, window_size_left=70)),
        ("d64_page16", MIXED, bf16, dict(page_size=16, cache_layout="nhd", causal=False)),
        ("page16", MIXED, bf16, dict(head_dim=128, page_size=16, lengths="cu_seqlens_k")),
        ("page128", MIXED, bf16, dict(head_dim=128, page_size=128, cache_layout="interleaved")),
        ("page256", MIXED, f16, dict(head_dim=96, page_size=256, cache_layout="packed_last")),
        ("page544", MIXED, bf16, dict(head_dim=128, page_size=544)),
        ("page48_d256", MIXED, f16, dict(head_dim=256, page_size=48)),
        ("page48_window", MIXED, f16, dict(head_dim=128, page_size=48, window_size_left=70)),
        ("window", MIXED, bf16, dict(head_dim=128, window_size_left=40)),
        ("window_both", MIXED, bf16, dict(causal=False, window_size_left=0, window_size_right=9)),
        ("d64_long_window", LONG, bf16, dict(window_size_left=300, page_size=64)),
        ("sinks", MIXED, bf16, dict(head_dim=128, sinks=True, padding_rows=5)),
        ("sinks_window", LONG, bf16, dict(num_heads=8, sinks=True, window_size_left=127)),
        ("softcap", MIXED, bf16, dict(head_dim=128, softcap=5.0)),
        ("softcap_d256_window", MIXED, bf16, dict(head_dim=256, softcap=50.0, window_size_left=40)),
        ("softcap_small", MIXED, f16, dict(head_dim=128, softcap=50.0, softmax_scale=0.02)),
        ("alibi", MIXED, f16, dict(head_dim=128, alibi="heads", page_size=16)),
        ("alibi_batch", MIXED, bf16, dict(num_heads=8, alibi="batch", causal=False, softcap=5.0)),
        ("d64_long_softcap", LONG, bf16, dict(softcap=5.0, alibi="heads", causal=False)),
        ("d192_v128", MIXED, bf16, dict(head_dim=192, head_dim_v=128)),
        ("d192_v128_page64", LONG, f16, dict(head_dim=192, head_dim_v=128, page_size=64)),
        ("d128_v40", MIXED, bf16, dict(head_dim=128, head_dim_v=40, sinks=True)),
        ("layout", MIXED, bf16, dict(head_dim=128, layout=Layout(heads="all"), padding_rows=140)),
        ("layout_long", LONG, bf16, dict(head_dim=128, layout=Layout(heads="all", density=0.2))),
        ("layout_128", MIXED, f16, dict(head_dim=128, layout=Layout(128, 128, "all"))),
        ("layout_16", MIXED, bf16, dict(head_dim=128, layout=Layout(16, 16, "all", density=0.2))),
        ("layout_16_kv", MIXED, bf16, dict(num_heads=8, layout=Layout(16, 64, "kv"))),
        ("layout_of_many", MIXED, bf16, dict(layout=Layout(64, 32, batched=True), causal=False)),
        ("layout_wide", MIXED, bf16, dict(head_dim=96, layout=Layout(64, 256, "all"))),
        ("layout_high", MIXED, bf16, dict(head_dim=128, layout=Layout(256, 64, "kv"))),
        ("layout_d256", MIXED, bf16, dict(head_dim=256, layout=Layout(64, 128), page_size=32)),
        ("layout_page16", MIXED, f16, dict(head_dim=128, layout=Layout(heads="kv"), page_size=16)),
        ("layout_page256", LONG, bf16, dict(layout=Layout(32, 32), page_size=256, causal=False)),
        (
            "layout_options",
            MIXED,
            bf16,
            dict(layout=Layout(), alibi="heads", softcap=9.0, sinks=True),
        ),
        # of another rank's keys
        (
            "zigzag_f32",
            MIXED,
            bf16,
            dict(k_ranges="shared", out_dtype=f32, head_dim=128, **PADDED),
        ),
        ("f32_v40", MIXED, bf16, dict(head_dim=128, head_dim_v=40, out_dtype=f32, causal=False)),
        (
            "d64_long_f32",
            LONG,
            bf16,
            dict(k_ranges="apart", out_dtype=f32, sinks=True),
        ),
        ("layout_empty", MIXED, bf16, dict(layout=Layout(density=0.0))),
    )
)
# pages smaller than a box
COPIED = tuple(
    Problem(f"copied_{name}", seqs, **options)
    for name, seqs, options in (
        ("page1", MIXED, dict(dtype=bf16, head_dim=128, page_size=1)),
        ("page2", LONG, dict(dtype=f16, page_size=2, window_size_left=300, sinks=True)),
        ("page8", MIXED, dict(dtype=bf16, head_dim=256, page_size=8, causal=False)),
    )
)
over_shapes = pytest.mark.parametrize("problem", SHAPES, ids=[p.name for p in SHAPES])


@over_shapes
def test_supported(problem):
    assert unsupported(problem) is None


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(attn_bias=torch.zeros(1)), "attn_bias"),
        (dict(k_descale=torch.ones(())), "k_descale"),
        (dict(dropout_p=0.1), "dropout_p"),
        (dict(q_position=torch.zeros(8, dtype=torch.int32)), "q_position"),
        (dict(out_dtype=torch.float16), "out_dtype"),
        (dict(softmax_scale=0.0), "softmax_scale"),
        (dict(q=torch.zeros(4, 4, 64)), "float32"),
        (dict(q=torch.zeros(4, 4, 36).bfloat16()), "head_dim"),
        (dict(v=torch.zeros(4, 2, 256).bfloat16()), "head_dim_v"),
        (dict(q=torch.zeros(4, 4, 132).bfloat16()[..., 4:]), "aligned"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported(changes, word):
    assert word in unsupported(SHAPES[0], **changes)


@pytest.mark.parametrize("window", [dict(window_size_left=9), dict(window_size_right=9)], ids=str)
def test_unsupported_windows_beside_a_layout(window):
    assert "window" in unsupported(SHAPES[-1], causal=False, **window)


def test_unsupported_places_beside_a_layout():
    assert "k_start" in unsupported(SHAPES[-1], k_start=torch.zeros(len(MIXED), dtype=torch.int32))


def test_unsupported_pages_and_chips():
    assert "page_size" in unsupported(dataclasses.replace(SHAPES[0], page_size=24))
    wide = dataclasses.replace(SHAPES[0], page_size=48, head_dim=256, window_size_left=70)
    assert unsupported(wide) is None
    with assume(Target.of_arch("sm100", 148)):
        assert "Hopper" in support.unsupported(hopper_call(SHAPES[0]))


@pytest.mark.parametrize("options", [dict(page_size=16), dict(layout=Layout(heads="all"))], ids=str)
def test_sizes_are_no_part_of_the_description(options):
    """A launch cache keeps kernel and scalars for calls that differ in sizes and memory only."""
    described, sizes = set(), set()
    for seqs in (((300, 900),), ((513, 990), (290, 900)), ((280, 916),) * 16):
        with assume(HOPPER):
            call = hopper_call(Problem("sizes", seqs, dtype=bf16, **options))
            config, packed_heads = choices.choose_tiles(call)
            scalars = tiles.scalars_of(call)
            compiled = tiles.options_of(call, config, packed_heads)
            described.add((compiled, scalars))
            sizes.add(tiles.sizes_of(call, compiled, 3, packed_heads))
    assert len(described) == 1
    assert len(sizes) == 3


@pytest.mark.parametrize(
    "name",
    [
        "llama3_8b/decode_b5/bf16",
        pytest.param("blocksparse/wide_blocks/f16", marks=pytest.mark.thorough),
    ],
)
def test_log_names_the_kernel(name, run, device, caplog):
    # a call that no other test makes: what was decided once is not said again
    problem = dataclasses.replace(PROBLEMS[name], num_heads=6, num_kv_heads=3, padding_rows=0)
    call = build(problem).to(device)
    with caplog.at_level(logging.DEBUG, "torch_paged_attn.backends.triton"):
        run(call)
    assert f"{call.op}: the portable kernel, because " in caplog.text


def test_a_path_is_logged_once(run, device, caplog, monkeypatch):
    monkeypatch.setattr(path, "_announced", set())
    for rows in (3, 5):  # other plans of one path
        changes = {"num_heads": 6, "padding_rows": rows, "seqs": ((3, 9), (1, 4))}
        problem = dataclasses.replace(PROBLEMS["odd_sizes/f32"], **changes)
        with caplog.at_level(logging.INFO, "torch_paged_attn"):
            run(build(problem).to(device))
    said = [x.getMessage() for x in caplog.records if x.name == "torch_paged_attn"]
    assert len(said) == 1 and said[0].startswith("paged_attn::flash_varlen: triton, portable")


def test_log_counts_the_launches_of_a_cache_write(kernels, device, caplog):
    for tokens, launches in ((2, "one launch"), (1100, "two launches")):
        new, cache = torch.zeros(2, tokens, 1, 8), torch.zeros(2, 70, 1, 16, 8)
        with caplog.at_level(logging.DEBUG, "torch_paged_attn.backends.triton"):
            slots = torch.arange(tokens, device=device)
            kernels.reshape_and_cache(*new.to(device), cache.to(device), slots)
        assert f"reshape_and_cache: {launches} for {tokens} tokens" in caplog.text


def compile_for_hopper(problem, form=choices.FORM):
    """The kernels of a launch, compiled in another process."""
    call = hopper_call(problem)
    cross_compile.CALLS["hopper"] = lambda: lambda: hopper.attend(call, form=form)
    return cross_compile.compile_call("sm90", "hopper")


def assert_agrees(problem, form):
    """On a Hopper GPU, results are right, and the same bits twice."""
    if HAS_HOPPER:
        call = hopper_call(problem, "cuda")
        first = hopper.attend(call, form=form)
        assert_accurate(*first, build(problem).truth())
        again = hopper.attend(call, form=form)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def assert_compiles(problem, form, compiler):
    """The kernels of a launch in this form compile without a fault, to matrix instructions."""
    kernels = compiler.submit(compile_for_hopper, problem, form).result()
    assert all(k.faults("sm90", problem.name) == [] for k in kernels)
    assert any(k.matrix_instructions > 0 for k in kernels)


# with `--sample`, boxes of pages, small tiles, lists of blocks, and packed keys with results in
# float32; slopes, sinks and windows' left sides are those of `test_pieces_compile_to_products`
SAMPLED = "page16/bf16", "softcap_small/f16", "layout_16/bf16", "zigzag_f32/bf16"


@pytest.mark.parametrize(
    "problem",
    SHAPES if IS_THOROUGH else [x if x.name in SAMPLED else left_out(x) for x in covering(SHAPES)],
    ids=lambda p: p.name,
)
def test_compiles_to_products(problem, compiler):
    kernels = compiler.submit(compile_for_hopper, problem).result()
    kernel = next(k for k in kernels if "hopper" in k.name)
    assert kernel.faults("sm90", problem.name) == []
    assert kernel.matrix_instructions > 0
    assert kernel.spills == 0 or not cross_compile.IS_FITTED


@pytest.mark.device_suite  # `make test` compiles copied rows in tiles of drafts
def test_copied_rows_compile(compiler):
    assert_compiles(COPIED[0], choices.FORM, compiler)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("problem", [*SHAPES, *COPIED, *PROBLEMS.values()], ids=lambda p: p.name)
def test_agrees_with_the_reference(problem):
    call = hopper_call(problem, "cuda")
    if support.unsupported(call) is not None:
        pytest.skip("left to the portable kernel")
    first = hopper.attend(call)
    assert_accurate(*first, build(problem).truth(cuts_off=True))
    second = hopper.attend(call)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


SHORT = ((0, 0), (70, 0), (1, 0), (300, 0), (33, 0), (0, 0), (128, 0))
IN_TURNS = tuple(
    Problem(f"turns_{name}", seqs, dtype=bf16, causal=False, **options)
    for name, seqs, options in (
        ("d64", SHORT, dict(num_kv_heads=4, padding_rows=5)),
        ("d64_even", ((90, 0),) * 7, dict(num_kv_heads=4)),
        ("g4", SHORT * 20, dict(num_heads=8, head_dim=128, padding_rows=140)),
        ("g7", SHORT, dict(num_heads=14, head_dim=128)),
        ("g5_shorter", ((9, 0), (30, 0), (1, 0)) * 9, dict(num_heads=10, padding_rows=5)),
        ("keys", ((70, 30), (3, -2), (200, 0), (9, 90)), dict(lengths="cu_seqlens_k")),
    )
)


@pytest.mark.parametrize("problem", some(IN_TURNS, IN_TURNS[3]), ids=lambda p: p.name)
def test_tiles_in_turns_compile(problem, compiler):
    kernels = compiler.submit(compile_for_hopper, problem, choices.Form(longest=128)).result()
    # no list of tiles
    assert [k.name for k in kernels] == ["_hopper_attention_fwd_kernel"]
    assert kernels[0].faults("sm90", problem.name) == []


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("longest", [1, 128, 300, 512])
@pytest.mark.parametrize("problem", IN_TURNS, ids=lambda p: p.name)
def test_tiles_in_turns(problem, longest):
    """Whatever the hint of the longest sequence."""
    call = hopper_call(problem, "cuda")
    first = hopper.attend(call, form=choices.Form(longest=longest))
    assert_accurate(*first, build(problem).truth())
    again = hopper.attend(call, form=choices.Form(longest=longest))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


OF_8_BITS = dict(head_dim=128, page_size=16)
WIDE = dict(num_heads=16, head_dim=128, causal=False, window_size_right=5)
FEW = ((5, 900), (8, 3000), (1, 70), (0, 9), (3, -1), (8, 0))
GUESSED = tuple(
    Problem(f"guessed_{name}", seqs, dtype=bf16, **options)
    for name, seqs, options in (
        ("g4", FEW * 3, dict(num_heads=8, head_dim=128, page_size=16, padding_rows=9)),
        ("g8_d64", FEW, dict(num_heads=8, num_kv_heads=1, page_size=64, sinks=True)),
        ("g4_d256", FEW, dict(num_heads=4, num_kv_heads=1, head_dim=256, page_size=16)),
        ("g4_d256_page1", FEW, dict(num_heads=8, head_dim=256, page_size=1)),
        ("page1", FEW, dict(num_heads=8, head_dim=128, page_size=1, window_size_left=1200)),
        ("softcap", FEW, dict(num_heads=8, head_dim=128, page_size=32, softcap=9.0)),
        # rows of a token that no head has
        ("g7", FEW, dict(num_heads=14, head_dim=128, page_size=64, sinks=True, padding_rows=9)),
        ("g5", FEW, dict(num_heads=10, head_dim=128, page_size=544, sinks=True, alibi="batch")),
        ("g3_d256", FEW, dict(num_heads=6, head_dim=256, page_size=32, window_size_left=99)),
        ("kv_e4m3", FEW, dict(num_heads=16, kv_dtype=e4m3, descale="heads", **OF_8_BITS)),
        ("kv_e4m3_page1", FEW, dict(num_heads=16, kv_dtype=e4m3, **OF_8_BITS | dict(page_size=1))),
        ("kv_int8_g7", FEW, dict(num_heads=14, kv_dtype=i8, descale="batch", **OF_8_BITS)),
        ("kv_e4m3_d256", FEW, dict(num_heads=6, kv_dtype=e4m3, **OF_8_BITS | dict(head_dim=256))),
        # more sequences than are looked at at a time; all alike; more queries than was said
        ("many", ((3, 40), (0, 0), (3, 700)) * 100, dict(num_heads=16, head_dim=128, page_size=32)),
        ("alike", ((4, 1020),) * 33, dict(num_heads=16, head_dim=128, page_size=64)),
        ("longer", ((70, 300), (5, 900), (300, 0)), dict(num_heads=10, page_size=64)),
        ("longer_window", ((70, 600), (40, 9)), dict(page_size=16, window_size_left=99, **WIDE)),
    )
)
KINDS = ("listed", "listed other", "dealt", "dealt other", "numbered", "numbered other")


def form_of(problem, kind):
    """A form for few queries of a sequence, in the rows of one consumer. The other tiles: two
    consumers divide the keys, those of 8-bit keys are large."""
    is_dealt, is_numbered, is_other = (kind.count(x) > 0 for x in ("dealt", "numbered", "other"))
    other = "divided" if problem.kv_dtype is None else "low large"
    call = hopper_call(problem, max_seqlen_k=64)
    assert flash_varlen.unsupported_on_hopper(call) is None
    has_other = choices.unsupported_tiles(call, choices.Form(tiles=other)) is None
    choice = flash_varlen.choose(call, 8)
    assert choice.way is not None or "longer" in problem.name
    return choices.Form(
        is_cut=True,
        is_dealt=is_dealt,
        is_numbered=is_numbered,
        tiles=other if is_other and has_other else "low",
    )


@pytest.mark.parametrize("kind", every_other(KINDS))
@pytest.mark.parametrize("problem", GUESSED, ids=lambda p: p.name)
def test_draft_tokens(problem, kind):
    with assume(HOPPER):
        form = form_of(problem, kind)
    assert_agrees(problem, form)


# With `--sample`: copied rows and the widest heads, and keys that are converted. Boxes of an odd
# number of heads are those of `test_tiles_in_turns_compile`
@pytest.mark.parametrize("kind", some(("dealt", "listed other"), "dealt"))
@pytest.mark.parametrize(
    "name",
    some(("g4_d256_page1", "g5", "kv_e4m3"), "g4_d256_page1", "kv_e4m3"),
)
def test_draft_tokens_compile_to_products(name, kind, compiler):
    problem = next(x for x in GUESSED if x.name == f"guessed_{name}")
    with assume(HOPPER):
        form = form_of(problem, kind)
    assert_compiles(problem, form, compiler)


# few tiles whose keys are cut, of chunks and of a mixed batch
CHUNK, MIXED_CUT = ((100, 6000), (70, 300)), ((1, 3000), (1, 40), (200, 5000), (1, 0), (1, 900))
OPTIONS = dict(sinks=True, window_size_left=2500)
CUT_BY_DEFAULT = dict(num_heads=8, num_kv_heads=1, head_dim=128, dtype=bf16)
CUT = tuple(
    Problem(f"cut_{name}", seqs, **CUT_BY_DEFAULT | options)
    for name, seqs, options in (
        ("page64", CHUNK, dict(page_size=64, sinks=True, padding_rows=9)),
        ("page1", CHUNK, dict(page_size=1, softcap=9.0)),
        ("g4_d64", CHUNK, dict(num_kv_heads=2, head_dim=64, page_size=16)),
        ("g7_window", CHUNK, dict(num_heads=7, page_size=544, window_size_left=2500)),
        ("g2_d256", CHUNK, dict(num_heads=2, head_dim=256, page_size=16)),
        ("kv_e4m3", CHUNK, dict(kv_dtype=e4m3, descale="heads", page_size=16)),
        ("mixed", MIXED_CUT, dict(page_size=64, padding_rows=9)),
        ("mixed_d64", MIXED_CUT, dict(head_dim=64, page_size=544, alibi="heads", **OPTIONS)),
        ("mixed_d256", MIXED_CUT, dict(head_dim=256, page_size=32)),
        ("mixed_kv_int8", MIXED_CUT, dict(kv_dtype=i8, descale="batch", page_size=16)),
    )
)


def form_of_pieces(problem):
    return choices.Form(is_cut="mixed" in problem.name)


@pytest.mark.parametrize("problem", CUT, ids=lambda p: p.name)
def test_pieces_are_added_up_by_all(problem):
    form = form_of_pieces(problem)
    with assume(HOPPER):
        call = hopper_call(problem)
        config, packed_heads = choices.choose_tiles(call, form)
        assert tiles.options_of(call, config, packed_heads, form).MERGED_COLUMNS > 0
    assert_agrees(problem, form)


# with `--sample`, the one of the most options, which no other kernel here has
@pytest.mark.parametrize(
    "name", some(("cut_mixed", "cut_g4_d64", "cut_mixed_d64"), "cut_mixed_d64")
)
def test_pieces_compile_to_products(name, compiler):
    problem = next(x for x in CUT if x.name == name)
    assert_compiles(problem, form_of_pieces(problem), compiler)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_whose_maxima_grow_are_rescaled(head_dim):
    """Keys grow towards the first, which the kernel reads last: in every tile, other rows find
    scores far above those before."""
    call = build(Problem("growing", LONG, head_dim=head_dim, dtype=bf16, sinks=True))
    k = call.args["k"]
    k.mul_(torch.linspace(9.0, 0.05, len(k), dtype=k.dtype)[:, None, None])
    args = call.to("cuda").args
    assert_accurate(*hopper.attend(AttentionCall.flash_varlen(**args)), call.truth())
