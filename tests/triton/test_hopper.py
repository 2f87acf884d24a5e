"""The Hopper kernel: what it leaves to the portable one, what the compiler makes of it and, on a
Hopper chip, its results."""

import dataclasses
import logging

import cross_compile
import pytest
import torch

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import flash_varlen
from torch_paged_attn.backends.triton.hopper import attention as hopper
from torch_paged_attn.backends.triton.hopper import choices, few_queries, support, tiles
from torch_paged_attn.backends.triton.hopper.shared_memory import fit_stages
from torch_paged_attn.backends.triton.runtime.target import Target, assume
from torch_paged_attn.ops import paths
from torch_paged_attn.testing import PROBLEMS, Layout, Problem, assert_accurate, build

HAS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
HOPPER = Target.of_arch("sm90", 132)
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
e4m3, i8 = torch.float8_e4m3fn, torch.int8

MIXED = ((1, 300), (130, 0), (37, 91), (0, 17), (5, 64), (1, 0), (300, 600), (20, -15))
LONG = ((2100, 0), (2500, 300))
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


def hopper_call(problem, device="cpu", **changes):
    return getattr(AttentionCall, problem.op)(**build(problem).to(device).args | changes)


def unsupported(problem, **changes):
    with assume(HOPPER):
        return support.unsupported(hopper_call(problem, **changes))


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
    for seqs in (((300, 0),), ((513, 90), (290, 0)), ((280, 16),) * 16):
        with assume(HOPPER):
            call = hopper_call(Problem("sizes", seqs, dtype=bf16, **options))
            config, packed_heads = choices.choose_tiles(call)
            scalars = tiles.scalars_of(call, packed_heads)
            described.add((tiles.options_of(call, config, packed_heads), scalars))
            sizes.add(tiles.sizes_of(call, lists_per_head=3))
    assert len(described) == 1
    assert len(sizes) == 3


@pytest.mark.parametrize("name", ["llama3_8b/decode_b5/bf16", "blocksparse/wide_blocks/f16"])
def test_log_names_the_kernel(name, run, device, caplog):
    # a call that no other test makes: what was decided once is not said again
    problem = dataclasses.replace(PROBLEMS[name], num_heads=6, num_kv_heads=3, padding_rows=0)
    call = build(problem).to(device)
    with caplog.at_level(logging.DEBUG, "torch_paged_attn.backends.triton"):
        run(call)
    assert f"{call.op}: the portable kernel, because " in caplog.text


def test_a_path_is_logged_once(run, device, caplog, monkeypatch):
    monkeypatch.setattr(paths, "_announced", set())
    for rows in (3, 5):  # other plans of one path
        problem = dataclasses.replace(PROBLEMS["odd_sizes/f32"], num_heads=6, padding_rows=rows)
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


@over_shapes
def test_compiles_to_products(problem, compiler):
    kernels = compiler.submit(compile_for_hopper, problem).result()
    kernel = next(k for k in kernels if "hopper" in k.name)
    assert kernel.faults("sm90", problem.name) == []
    assert kernel.matrix_instructions > 0
    # one value of two consumers that divide keys
    most = 8 if kernel.name.startswith("_hopper") and problem.name == "page544/bf16" else 0
    assert kernel.spills <= most or not cross_compile.IS_FITTED


def test_copied_rows_compile(compiler):
    kernels = compiler.submit(compile_for_hopper, COPIED[0]).result()
    assert all(k.faults("sm90", COPIED[0].name) == [] for k in kernels)


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


@pytest.mark.parametrize("problem", IN_TURNS, ids=lambda p: p.name)
def test_tiles_in_turns_compile(problem, compiler):
    kernels = compiler.submit(compile_for_hopper, problem, choices.Form(longest=128)).result()
    # no list of tiles
    assert [k.name for k in kernels] == ["_hopper_attention_fwd_kernel"]
    assert kernels[0].faults("sm90", problem.name) == []


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("longest", [1, 128, 300, 512])
@pytest.mark.parametrize("problem", IN_TURNS, ids=lambda p: p.name)
def test_tiles_in_turns(problem, longest):
    """Whatever is said of the longest sequence."""
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
# by machines without a GPU, too
COMPILED = ("guessed_g4_d256_page1", "guessed_g5", "guessed_kv_e4m3")


@pytest.mark.parametrize("kind", ["listed", "dealt", "numbered"])
@pytest.mark.parametrize("problem", GUESSED, ids=lambda p: p.name)
def test_guessed_tokens(problem, kind, compiler):
    """Few queries of a sequence, in the rows of one consumer."""
    form = choices.Form(is_guessed=True, is_dealt=kind == "dealt", is_numbered=kind == "numbered")
    with assume(HOPPER):
        call = hopper_call(problem, max_seqlen_k=64 if kind == "numbered" else 2**17)
        assert flash_varlen.kernels_of(call, 8)[0] == "hopper"
        found = flash_varlen.form_of(call, 8)
        # the others differ by how many keys there are; windows show few
        is_uncut = found.is_numbered
        assert found == choices.Form(is_guessed=True, is_dealt=found.is_dealt, is_numbered=is_uncut)
        assert is_uncut is few_queries.is_uncut(call)
        if kind == "numbered":
            assert is_uncut
    if not HAS_HOPPER:
        if problem.name in COMPILED and kind == "dealt":
            kernels = compiler.submit(compile_for_hopper, problem, form).result()
            assert all(k.faults("sm90", problem.name) == [] for k in kernels)
        return
    call = hopper_call(problem, "cuda")
    first = hopper.attend(call, form=form)
    assert_accurate(*first, build(problem).truth())
    again = hopper.attend(call, form=form)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_many_keys_are_dealt_out():
    """Of few queries, by what is said of the longest sequence's keys; of decodes, where a group is
    no power of two."""
    wide = Problem("wide", ((1, 60),) * 3, 40, 8, dtype=bf16, page_size=64)
    table = torch.zeros(3, 1024, dtype=torch.int32)
    with assume(HOPPER):
        for heads, kernels in ((40, "hopper"), (32, "portable")):
            call = hopper_call(dataclasses.replace(wide, num_heads=heads), block_table=table)
            assert flash_varlen.kernels_of(call, 1)[0] == kernels
        call = hopper_call(wide, block_table=table)
        assert flash_varlen.form_of(call, 1) == choices.Form(is_guessed=True, is_dealt=True)
        call = hopper_call(wide, block_table=table, max_seqlen_k=512)
        assert flash_varlen.kernels_of(call, 1)[0] == "portable"


@pytest.mark.parametrize(
    "batch, queries, keys, heads, kernels",
    [
        # decodes of eight heads that share keys, or of wide ones
        (17, 1, 131072, (8, 1, 128), "dealt"),
        (17, 1, 131072, (4, 1, 128), "portable"),
        (17, 1, 0, (8, 1, 128), "portable"),
        (17, 1, 4096, (8, 1, 128), "portable"),
        (33, 1, 4096, (8, 1, 128), "dealt"),
        (90, 1, 131072, (8, 1, 128), "portable"),
        (16, 1, 512, (8, 4, 256), "numbered"),
        (16, 1, 2048, (8, 4, 256), "portable"),
        # guessed tokens of few rows
        (7, 2, 2048, (40, 8, 128), "numbered"),
        (3, 2, 2048, (40, 8, 128), "dealt"),
        (7, 2, 512, (40, 8, 128), "portable"),
        (90, 2, 2048, (40, 8, 128), "portable"),
        (19, 4, 2048, (8, 4, 256), "listed"),
        # of many rows: by keys, but not where each tile has few
        (4, 8, 8192, (8, 1, 128), "listed"),
        (69, 4, 2048, (32, 32, 128), "numbered"),
        (15, 4, 4096, (32, 32, 128), "dealt"),
        (69, 4, 4096, (32, 32, 128), "listed"),  # many tiles
        (87, 8, 1024, (32, 32, 128), "numbered"),
        (2, 7, 2048, (28, 4, 128), "dealt"),  # few keys, few tiles
        (11, 1, 1024, (64, 8, 128), "numbered"),
        (11, 1, 2048, (64, 8, 128), "numbered"),
        (11, 1, 4096, (64, 8, 128), "portable"),
        (11, 1, 1024, (32, 8, 128), "numbered"),
        (11, 1, 512, (32, 8, 128), "portable"),
        (11, 1, 512, (64, 8, 128), "numbered"),
        (11, 1, 512, (56, 8, 128), "portable"),
        (20, 1, 2048, (64, 8, 128), "portable"),
        # wide heads
        (4, 3, 8192, (8, 4, 256), "listed"),
        (4, 3, 1024, (8, 4, 256), "portable"),
        (2, 8, 1024, (8, 4, 256), "listed"),
        (2, 8, 512, (8, 4, 256), "numbered"),
    ],
)
def test_who_takes_few_queries(batch, queries, keys, heads, kernels):
    """As figures of an H200 say: benchmarks/notes/gpu.md."""
    assert taken_by(batch, queries, keys, heads) == kernels


@pytest.mark.parametrize(
    "batch, queries, keys, heads, kernels",
    [
        (9, 3, 512, (32, 8, 128), "numbered"),
        (9, 3, 1024, (32, 8, 128), "portable"),  # of few rows
        (9, 3, 512, (32, 32, 128), "portable"),
        (37, 7, 512, (16, 4, 128), "numbered"),
        (4, 8, 4096, (8, 1, 128), "dealt"),
        (4, 8, 1024, (8, 1, 128), "listed"),
    ],
)
def test_who_takes_few_queries_in_8_bits(batch, queries, keys, heads, kernels):
    assert taken_by(batch, queries, keys, heads, kv_dtype=e4m3) == kernels


def taken_by(batch, queries, keys, heads, **options):
    """The kernel of few queries whose longest sequence has so many keys, and its form."""
    seqs = ((queries, 60),) * batch
    problem = Problem("few", seqs, *heads, dtype=bf16, page_size=64, **options)
    table = torch.zeros(batch, 2048, dtype=torch.int32)
    with assume(HOPPER):
        call = hopper_call(problem, block_table=table, max_seqlen_k=keys)
        found = flash_varlen.kernels_of(call, queries)[0]
        if found == "hopper":
            form = flash_varlen.form_of(call, queries)
            assert form.is_guessed
            found = "dealt" if form.is_dealt else "numbered" if form.is_numbered else "listed"
        return found


@pytest.mark.parametrize(
    "seqs, options, longest, kernels",
    [
        (((128, 0),) * 512, dict(num_kv_heads=4), 128, "hopper"),
        (((40, 0),) * 512, dict(num_kv_heads=4), 40, "portable"),  # few rows in a tile
        (((40, 0),) * 512, dict(num_heads=8, head_dim=128), 40, "hopper"),  # which heads fill
        (((50, 0),) * 9, dict(num_heads=8, head_dim=128), 50, "portable"),  # few tiles
        (((480, 0),) * 4, dict(num_heads=12, num_kv_heads=12), 480, "hopper"),  # longer sequences
    ],
)
def test_short_sequences(seqs, options, longest, kernels):
    problem = Problem("short", seqs, dtype=bf16, causal=False, **options)
    with assume(HOPPER):
        call = hopper_call(problem)
        assert flash_varlen.in_turns(call, longest) == longest
        assert flash_varlen.kernels_of(call, longest)[0] == kernels
        for other in (0, 600):
            assert flash_varlen.in_turns(call, other) == 0
        paged = hopper_call(dataclasses.replace(problem, seqs=seqs[:5], page_size=16))
        assert flash_varlen.in_turns(paged, longest) == 0


@pytest.mark.parametrize("options", [dict(num_heads=8, head_dim=128), dict(num_heads=12)])
def test_few_short_sequences(options):
    """A list of few tiles, of one consumer each."""
    problem = Problem("few", ((300, 0), (80, 0)) * 3, dtype=bf16, causal=False, **options)
    form = choices.Form(are_few=True)
    with assume(HOPPER):
        call = hopper_call(problem)
        assert flash_varlen.kernels_of(call, 300)[0] == "hopper"
        assert flash_varlen.form_of(call, 300) == form
        assert choices.choose_tiles(call, form)[0].CONSUMERS == 1
        assert flash_varlen.form_of(call, 600) == choices.Form()
    if HAS_HOPPER:
        call = hopper_call(problem, "cuda")
        assert_accurate(*hopper.attend(call, form=form), build(problem).truth())


def chunks(seqs, heads=(32, 8, 128), page_size=16, reach=0, **options):
    """A call of chunks of prompts whose table has room for 131,072 keys."""
    problem = Problem("chunks", seqs, *heads, dtype=bf16, page_size=page_size, **options)
    table = torch.zeros(len(seqs), 2**17 // page_size, dtype=torch.int32)
    return hopper_call(problem, block_table=table, max_seqlen_k=reach)


@pytest.mark.parametrize(
    "queries, heads, reach, is_numbered, is_sorted",
    [
        (1008, (32, 32, 128), 2048, True, True),
        (1008, (32, 32, 128), 4096, False, False),  # its keys do not stay in the cache
        (1008, (32, 8, 128), 4096, False, True),  # better cut, as far as is known
        (260, (32, 8, 128), 1024, True, True),  # few rows
        (490, (64, 8, 128), 4096, False, True),
        (243, (40, 8, 128), 512, True, True),
        (1008, (32, 32, 128), 0, False, False),  # nobody says anything
        (4000, (32, 8, 128), 2048, False, False),  # many tiles
    ],
)
def test_which_chunks_are_numbered(queries, heads, reach, is_numbered, is_sorted):
    with assume(HOPPER):
        call = chunks(((queries, 90),), heads, reach=reach)
        form = flash_varlen.form_of(call, 0)
        config, packed = choices.choose_tiles(call, form)
        assert form == choices.Form(is_numbered=is_numbered)
        heads_at_once = tiles.scalars_of(call, packed).heads_per_unit * packed
        assert heads_at_once == (call.num_heads if is_sorted else call.group_size)
        assert tiles.options_of(call, config, packed, form).IS_LISTED is not is_numbered


@pytest.mark.parametrize(
    "seqs, heads, reach, consumers",
    [
        (((381, 8500),), (8, 4, 256), 16384, 2),
        (((482, 4000),), (8, 4, 256), 8192, 1),
        (((219, 1867),), (32, 32, 128), 4096, 2),  # few rows: these divide the keys
        (((243, 70),), (40, 8, 128), 512, 2),
        (((653, 70),), (40, 8, 128), 512, 2),  # more rows
        (((219, 1867),), (8, 8, 128), 4096, 2),
        (((115, 14735),), (8, 4, 256), 16384, 1),  # so few that keys are what there is to share
        (((1775, 27000),) * 4, (64, 8, 64), 32768, 3),
        (((1775, 2000),) * 4, (64, 8, 64), 4096, 2),
    ],
)
def test_consumers_of_chunks(seqs, heads, reach, consumers):
    with assume(HOPPER):
        config = choices.choose_tiles(chunks(seqs, heads, reach=reach))[0]
    has_few_rows = seqs[0][0] * heads[0] <= 132 * 80 and heads[2] == 128
    assert consumers == config.CONSUMERS and config.SPLITS_KEYS is has_few_rows


def test_stages_of_divided_keys_are_even():
    """A stage that both consumers waited for in turns would be passed by who is ahead."""
    with assume(HOPPER):
        for page_size, width in ((1, 64), (1, 128), (16, 64), (16, 128)):
            call = chunks(((90, 400),), (8, 2, width), page_size=page_size, reach=512)
            config, packed = choices.choose_tiles(call)
            options = tiles.options_of(call, config, packed)
            assert config.SPLITS_KEYS and options.KV_STAGES % options.CONSUMERS == 0
            assert options.ROW_GROUPS == 1 and options.CONSUMERS == 2
            fitted = fit_stages(options._replace(KV_STAGES=8), 2, 2)
            assert fitted.KV_STAGES < 8 and fitted.KV_STAGES % 2 == 0  # there is no room for more


@pytest.mark.parametrize("group, tokens", [(5, 12), (7, 9), (3, 21), (6, 10), (8, 8)])
def test_tokens_of_a_group_fill_a_tile(group, tokens):
    """Boxes of so many tokens and heads; what Triton compiles for has 64 rows."""
    with assume(HOPPER):
        call = chunks(((90, 90),), (4 * group, 4, 128), reach=512)
        config, packed = choices.choose_tiles(call)
        options = tiles.options_of(call, config, packed)
        assert (packed, options.TOKENS) == (group, tokens)
        boxes = tiles.boxes_of(call, call.new_results()[0], options)
    for box in (boxes[0], boxes[3]):
        tensor_map = box.at(16)
        filled = getattr(tensor_map, "filled", tuple(tensor_map.block_shape))
        assert filled == (1, 1, tokens, group, 128)
        assert torch.Size(tensor_map.block_shape).numel() == 64 * 128


def test_heads_of_any_width_are_batch_invariant():
    for dim in (64, 96, 128, 256):
        problem = Problem("wide", MIXED, 8, 2, dim, dtype=bf16, page_size=16, batch_invariant=True)
        with assume(HOPPER):
            assert flash_varlen.kernels_of(hopper_call(problem))[0] == "hopper"
            call = hopper_call(dataclasses.replace(problem, num_heads=14))
            assert flash_varlen.kernels_of(call)[0] == "portable"


@pytest.mark.parametrize(
    "hints, is_packed, said",
    [
        ((5, 900), False, 5),
        ((65, 900), False, 0),
        ((5, 7), True, 7),
        ((130, 90), True, 192),
        ((90, 512), True, 512),
        ((90, 513), True, 0),
        ((torch.tensor(5), 5), True, 0),
    ],
)
def test_what_is_said_of_the_longest_sequence(hints, is_packed, said):
    assert flash_varlen.said_of_longest(*hints, is_packed) == said


@pytest.mark.parametrize(
    "keys, is_packed, said",
    [
        (900, False, 1024),
        (1024, False, 1024),
        (1025, False, 2048),
        (7, False, 512),
        (10**6, False, 131072),
        (0, False, 0),
        (900, True, 0),
        (torch.tensor(900), False, 0),
    ],
)
def test_what_is_said_of_its_keys(keys, is_packed, said):
    assert flash_varlen.said_of_reach(keys, is_packed) == said


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
