"""Latent attention on Hopper: which calls its kernel takes, what the compiler makes of it, how
parts are added up and, on a Hopper chip, its results."""

import dataclasses

import cross_compile
import pytest
import torch
from hopper_calls import HAS_HOPPER, HOPPER

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.mla import plan as mla
from torch_paged_attn.backends.triton.hopper.mla import work as mla_work
from torch_paged_attn.backends.triton.hopper.mla.arguments import MlaPointers
from torch_paged_attn.backends.triton.hopper.mla.combine import _hopper_mla_combine_kernel
from torch_paged_attn.backends.triton.runtime.launch import dependent_launch
from torch_paged_attn.backends.triton.runtime.target import Target, assume
from torch_paged_attn.testing import PROBLEMS, Problem, Truth, assert_accurate, build

bf16, f16, i8 = torch.bfloat16, torch.float16, torch.int8
e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2

# around the ends of blocks and pairs of blocks; without keys; with more queries than keys
EDGES = ((1, 0), (1, 62), (1, 63), (1, 64), (2, 64), (1, 127), (1, 128), (0, 50), (1, -1), (3, -1))
FEW_EDGES = ((1, 62), (1, 63), (2, 127), (0, 50), (2, -1))
LONG = ((1, 1500), (2, 100), (1, 700), (1, 0))
SHAPES = tuple(
    Problem(name, seqs, heads, 1, 576, 512, cache_layout="mla", **({"dtype": bf16} | options))
    for name, seqs, heads, options in (
        ("h16_page64", EDGES, 16, dict(page_size=64)),
        ("h128_page16", FEW_EDGES, 128, dict(page_size=16, dtype=f16)),
        ("h128_packed", FEW_EDGES, 128, {}),
        ("h16_long_page128", LONG, 16, dict(page_size=128)),
        ("h70_long", LONG, 70, dict(page_size=64, padding_rows=3)),
        ("h20_full", EDGES, 20, dict(page_size=32, causal=False, lengths="cu_seqlens_k")),
        ("h40_long_page48", LONG, 40, dict(page_size=48)),
        ("h1_guessed", ((5, 300), (8, 700)), 1, dict(page_size=64)),
        ("one_long", ((1, 2600),), 70, dict(page_size=16)),
    )
)
IN_8_BITS = tuple(
    Problem(name, seqs, heads, 1, 576, 512, cache_layout="mla", **({"dtype": bf16} | options))
    for name, seqs, heads, options in (
        ("e4m3_h16_page64", EDGES, 16, dict(kv_dtype=e4m3, page_size=64, descale="batch")),
        ("int8_h16_page16", FEW_EDGES, 16, dict(kv_dtype=i8, page_size=16, descale="heads")),
        ("e4m3_h16_long", LONG, 16, dict(kv_dtype=e4m3, page_size=64)),
        (
            "e5m2_h16_page32",
            LONG,
            16,
            dict(kv_dtype=e5m2, page_size=32, dtype=f16, descale="scalar"),
        ),
        ("e4m3_h16_page16_one", ((1, 5000),), 16, dict(kv_dtype=e4m3, page_size=16)),
        ("e4m3_h32_page64", EDGES, 32, dict(kv_dtype=e4m3, page_size=64, descale="batch")),
        (
            "int8_h16_2_tokens",
            ((2, 700), (2, 127), (2, 0), (1, 300)),
            16,
            dict(kv_dtype=i8, page_size=16, descale="batch"),
        ),
        (
            "e4m3_h70_page128",
            LONG,
            70,
            dict(kv_dtype=e4m3, page_size=128, descale="batch", padding_rows=3),
        ),
        ("e4m3_h128_packed", FEW_EDGES, 128, dict(kv_dtype=e4m3, dtype=f16, descale="heads")),
        (
            "e4m3_h20_full",
            EDGES,
            20,
            dict(kv_dtype=e4m3, page_size=32, causal=False, lengths="cu_seqlens_k"),
        ),
        (
            "int8_h128_2_tokens",
            ((2, 700), (2, 127), (1, 300)),
            128,
            dict(kv_dtype=i8, page_size=64, descale="batch"),
        ),
    )
)
over_shapes = pytest.mark.parametrize(
    "problem", SHAPES + IN_8_BITS, ids=[p.name for p in SHAPES + IN_8_BITS]
)


def call_of(problem, device="cpu", **changes):
    return AttentionCall.flash_varlen(**build(problem).to(device).args | changes)


def unsupported(problem, **changes):
    with assume(HOPPER):
        return mla.unsupported(call_of(problem, **changes))


@over_shapes
def test_supported(problem):
    assert unsupported(problem) is None
    call = call_of(problem)
    assert call.k.data_ptr() == call.v.data_ptr()


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(sinks=torch.zeros(16)), "sinks"),
        (dict(alibi_slopes=torch.zeros(16)), "alibi_slopes"),
        (dict(attn_bias=torch.zeros(1)), "attn_bias"),
        (dict(softcap=1.0), "softcap"),
        (dict(window_size_left=9), "windows"),
        (dict(out_dtype=torch.float32), "out_dtype"),
        (dict(softmax_scale=-1.0), "softmax_scale"),
        (dict(q=torch.zeros(9, 16, 64, dtype=bf16)), "no latent"),
        (dict(q_position=torch.zeros(1, dtype=torch.int32)), "q_position"),
        (dict(k_descale=torch.ones(())), "k_descale"),
        (dict(q=torch.zeros(9, 16, 576)), "float32"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported(changes, word):
    assert word in unsupported(SHAPES[0], **changes)


def test_unprofitable():
    """What was not timed beside the portable kernel is left to it."""
    long = Problem("timed", ((1, 600), (2, 30)), 16, 1, 576, 512, dtype=bf16, page_size=64)
    with assume(HOPPER):
        for changes, word in (
            (dict(), None),
            (dict(seqs=((3, 600), (2, 30))), "queries"),
            (dict(num_heads=8), "rows"),
            (dict(seqs=((1, 200), (2, 30))), "keys"),
        ):
            reason = mla.unprofitable(call_of(dataclasses.replace(long, **changes)))
            assert reason is None if word is None else word in reason


def test_unsupported_caches():
    assert "page_size" in unsupported(dataclasses.replace(SHAPES[0], page_size=8))
    assert "lie" in unsupported(dataclasses.replace(SHAPES[0], cache_layout="hnd"))
    with assume(Target.of_arch("sm100", 148)):
        assert "Hopper" in mla.unsupported(call_of(SHAPES[0]))


def test_values_elsewhere_are_left_to_the_other_kernel():
    call = call_of(SHAPES[0])
    q, k, v = call.q, call.k, torch.empty_like(call.k)[..., :512].copy_(call.v)
    with assume(HOPPER):
        assert mla.unsupported(dataclasses.replace(call, v=v)) is None
        plan = mla.plan_attention(call, lambda tensors, addresses: (tensors, addresses))
    assert plan((q, k, v), None) == ((q, k, v), None)


@pytest.mark.parametrize(
    "batch, queries, heads, programs",
    [(32, 1, 128, 128), (128, 1, 128, 128), (1, 1, 128, 132), (32, 1, 16, 128), (7, 1, 64, 126)],
)
def test_programs_end_together(batch, queries, heads, programs):
    problem = Problem("even", ((queries, 9),) * batch, heads, 1, 576, 512, dtype=bf16, page_size=64)
    call = call_of(dataclasses.replace(problem, cache_layout="mla"))
    with assume(HOPPER):
        assert mla_work.programs_of(call, mla_work.options_of(call)) == programs


def _sums(call, b, rows, first, stop):
    """Sums of values, references in base two, and sums of weights of a sequence's rows (tokens,
    heads) over keys `first` to `stop`."""
    key_len, page = int(call.seqused_k[b]), call.page_size
    key = torch.arange(first, min(stop, key_len))
    k = call.k[call.block_table[b][key // page].long(), 0, key % page].float()
    query_len = int(call.cu_seqlens_q[b + 1] - call.cu_seqlens_q[b])
    scores = (
        call.q[int(call.cu_seqlens_q[b]) + rows].float() @ k.mT * call.scale / 0.6931471805599453
    )
    seen = key <= (key_len - query_len + rows)[:, None]
    scores = scores.masked_fill(~seen[:, None, :], float("-inf"))
    none = torch.full((*scores.shape[:2], 1), float("-inf"))
    m = torch.cat([scores, none], -1).amax(-1)
    weights = torch.exp2(scores - m.nan_to_num(neginf=0.0)[..., None])
    return weights @ k[:, :512], m, weights.sum(-1)


def _leave_parts(call, options, programs):
    """What the programs of a launch leave, found as they find it: parts, and whole tiles."""
    out, lse = call.new_results()
    groups = programs // options.HEAD_TILES
    parts = torch.full((2 * programs, 64, 512), float("nan"))
    stats = torch.full((2 * programs, 2, 64), float("nan"))
    units = []
    for b, (start, stop) in enumerate(
        zip(call.cu_seqlens_q[:-1], call.cu_seqlens_q[1:], strict=True)
    ):
        pairs = max(-(-int(call.seqused_k[b]) // 128), 1)
        for token in range(0, int(stop - start), options.TOKENS):
            rows = torch.arange(token, min(token + options.TOKENS, int(stop - start)))
            units += [(b, rows, pair, pairs) for pair in range(pairs)]
    groups = min(groups, len(units))
    for group in range(groups):
        own = units[len(units) * group // groups : len(units) * (group + 1) // groups]
        while own:
            b, rows, first, pairs = own[0]
            count = min(pairs - first, len(own))
            acc, m, total = _sums(call, b, rows, 128 * first, 128 * (first + count))
            own = own[count:]
            at = int(call.cu_seqlens_q[b]) + rows
            if count == pairs:
                out[at] = (acc / total[..., None]).nan_to_num(0.0).to(out.dtype)
                lse[:, at] = (m * 0.6931471805599453 + total.log()).mT
                continue
            for head in range(call.num_heads):
                part = (
                    2 * group + (first == 0)
                ) * options.HEAD_TILES + head // options.PACKED_HEADS
                row = torch.arange(len(rows)) * options.PACKED_HEADS + head % options.PACKED_HEADS
                parts[part, row] = acc[:, head]
                stats[part, :, row] = torch.stack((m[:, head], total[:, head]))
    return torch.cat((parts.flatten(), stats.flatten())), out, lse


@pytest.mark.parametrize(
    "heads, programs", [(3, 1), (3, 6), (3, 132), pytest.param(70, 24, marks=pytest.mark.thorough)]
)
def test_parts_are_added_up(heads, programs, device):
    seqs = ((1, 500), (2, 130), (0, 5), (1, 0), (3, -1), (1, -1), (2, 200))
    problem = Problem("parts", seqs, heads, 1, 576, 512, dtype=bf16, page_size=16)
    problem = dataclasses.replace(problem, cache_layout="mla")
    call, options = call_of(problem), mla_work.options_of(call_of(problem))
    parts, out, lse = _leave_parts(call, options, programs)
    parts, out, lse = (x.to(device) for x in (parts, out, lse))
    lengths = (call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k)
    lengths = [x if x is None else x.to(device) for x in lengths]
    pointers = MlaPointers(lse, *lengths, None, parts)
    _hopper_mla_combine_kernel[(call.total_q, -(-heads // 16), 2)](
        out, pointers, **mla_work.sizes_of(call)._asdict(), num_heads=heads, programs=programs,
        OPTIONS=options, SHARES=(16, 2, 256), **dependent_launch(False),
    )  # fmt: skip
    assert_accurate(out, lse, build(problem).truth())


def compile_latent(problem):
    """The kernels of a launch, compiled in another process."""
    call = call_of(problem)
    tensors = tuple(call.given_tensors().values())
    cross_compile.CALLS["latent"] = lambda: lambda: mla.plan_attention(call, None)(tensors, None)
    return cross_compile.compile_call("sm90", "latent")


@pytest.mark.parametrize("problem", SHAPES[:1], ids=lambda p: p.name)
def test_compiles_to_products(problem, compiler):
    kernels = compiler.submit(compile_latent, problem).result()
    kernel = next(k for k in kernels if k.name == "_hopper_mla_fwd_kernel")
    assert kernel.faults("sm90", problem.name) == []
    # three times scores of 576 columns, four times values of 64 keys: the first pair's are apart
    assert kernel.matrix_instructions >= 2 * 36 + 4 * 4
    assert kernel.spills == 0 or not cross_compile.IS_FITTED


@pytest.mark.parametrize("heads", [16, pytest.param(32, marks=pytest.mark.thorough), 128])
def test_keys_of_8_bits_compile_to_products(heads, compiler):
    """Operands of rows come from `ldmatrix` and conversions in registers; two programs, or one of
    two consumers, fit into a multiprocessor's shared memory."""
    problem = dataclasses.replace(IN_8_BITS[0], num_heads=heads, seqs=((1, 600), (1, 90)))
    kernels = compiler.submit(compile_latent, problem).result()
    kernel = next(k for k in kernels if k.name == "_hopper_mla_fwd_kernel")
    assert kernel.faults("sm90", problem.name) == []
    assert kernel.spills == 0 or heads > 32 or not cross_compile.IS_FITTED
    form = mla_work.form_of(call_of(problem))
    # of each consumer, 36 products for scores and 32 for values
    assert kernel.matrix_instructions == 68 * form.consumers
    # a program has 1 KB beside what it asks for
    assert form.programs * (kernel.shared + 1024) <= 233472


@pytest.mark.parametrize(
    "heads, tokens, form",
    [
        (12, 1, mla_work.FORMS[16]),
        (16, 1, mla_work.FORMS[16]),
        (16, 2, mla_work.FORMS[32]),
        (128, 1, mla_work.OF_MANY_ROWS),
    ],
)
def test_forms_of_keys_of_8_bits(heads, tokens, form):
    """The smallest tile that holds a sequence's rows; several tiles for many."""
    problem = dataclasses.replace(IN_8_BITS[2], num_heads=heads, seqs=((tokens, 600),) * 3)
    assert mla_work.form_of(call_of(problem)) == form


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize(
    "problem", [*SHAPES, *IN_8_BITS, PROBLEMS["deepseek_mla/decode/bf16"]], ids=lambda p: p.name
)
def test_agrees_with_the_reference(problem):
    args = build(problem).to("cuda").args
    assert mla.unsupported(AttentionCall.flash_varlen(**args)) is None
    call = AttentionCall.flash_varlen(**args)
    plan = mla.plan_attention(call, None)
    tensors = tuple(call.given_tensors().values())
    first = plan(tensors, None)
    assert_accurate(*first, build(problem).truth())
    second = plan(tensors, [x.data_ptr() for x in tensors])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("factor", [-1.0, 0.0, 1e-30])
def test_descales_of_any_sign_and_size(factor):
    call = build(IN_8_BITS[0])
    call.args["k_descale"] = call.args["k_descale"] * factor
    moved = AttentionCall.flash_varlen(**call.to("cuda").args)
    results = mla.plan_attention(moved, None)(tuple(moved.given_tensors().values()), None)
    assert_accurate(*results, call.truth())


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
def test_rows_whose_maxima_grow_are_rescaled():
    """In every block, other rows find scores far above those before."""
    call = build(dataclasses.replace(SHAPES[2], num_heads=16, seqs=((1, 1100), (2, 1500)))).to(
        "cuda"
    )
    k = call.args["k"]
    k.mul_(torch.linspace(0.05, 9.0, len(k), dtype=k.dtype, device=k.device)[:, None, None])
    call.args["v"] = k[..., :512]
    call = AttentionCall.flash_varlen(**call.args)
    plan = mla.plan_attention(call, None)
    tensors = tuple(call.given_tensors().values())
    on_cpu = {n: x.cpu() if isinstance(x, torch.Tensor) else x for n, x in call.given().items()}
    from torch_paged_attn import reference

    assert_accurate(*plan(tensors, None), Truth.of(reference.flash_varlen, **on_cpu))
