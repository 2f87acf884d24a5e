"""The Hopper kernel with 8-bit keys and values, and with float8 queries or 16-bit ones."""

import dataclasses

import cross_compile
import pytest
import torch
from covering import left_out
from hopper_calls import HAS_HOPPER, HOPPER, LONG, MIXED, hopper_call, unsupported

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import flash_varlen
from torch_paged_attn.backends.triton.hopper.forward import plan as hopper
from torch_paged_attn.backends.triton.runtime.target import assume
from torch_paged_attn.testing import Problem, assert_accurate, build

bf16, f16, i8 = torch.bfloat16, torch.float16, torch.int8
e4m3, e5m2, i4 = torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8

FLOAT8 = dict(dtype=e4m3, out_dtype=bf16, descale="batch")
TO_FLOAT16 = FLOAT8 | dict(out_dtype=f16, descale="heads")
TOKENS = dict(dtype=bf16, descale="tokens")
MANY = ((70, 131000), (3, 60000))
SHAPES = tuple(
    Problem(name, seqs, **(dict(head_dim=128) | kinds | options))
    for name, seqs, kinds, options in (
        ("e4m3", MIXED, FLOAT8, dict(padding_rows=5)),
        ("e4m3_long", LONG, TO_FLOAT16, dict(num_heads=8, causal=False)),
        ("e4m3_page16", MIXED, FLOAT8, dict(page_size=16, cache_layout="nhd")),
        ("e4m3_page48_d96", MIXED, TO_FLOAT16, dict(page_size=48, head_dim=96)),
        ("e4m3_page256_window", LONG, FLOAT8, dict(page_size=256, window_size_left=300)),
        ("e4m3_window", MIXED, FLOAT8, dict(window_size_left=40, sinks=True)),
        ("e4m3_softcap", MIXED, FLOAT8, dict(softcap=5.0, causal=False, window_size_right=9)),
        ("e4m3_d64", LONG, FLOAT8, dict(head_dim=64, num_heads=14)),
        ("e4m3_d256", MIXED, TO_FLOAT16, dict(head_dim=256, page_size=64)),
        ("e4m3_d192_v128", MIXED, FLOAT8, dict(head_dim=192, head_dim_v=128)),
        ("e4m3_many_keys", MANY, FLOAT8, dict(num_heads=2, num_kv_heads=1)),
        ("e4m3_no_descale", MIXED, FLOAT8, dict(descale="")),
        ("e4m3_page1", MIXED, FLOAT8, dict(page_size=1)),
        ("kv_int8_page1", MIXED, {}, dict(dtype=bf16, kv_dtype=i8, descale="heads", page_size=1)),
        ("kv_e5m2_page4_d64", LONG, {}, dict(dtype=f16, kv_dtype=e5m2, page_size=4, head_dim=64)),
        ("kv_e4m3", MIXED, {}, dict(dtype=bf16, kv_dtype=e4m3, descale="batch", padding_rows=5)),
        ("kv_int8_page16", LONG, {}, dict(dtype=bf16, kv_dtype=i8, descale="heads", page_size=16)),
        ("kv_e5m2_d64", LONG, {}, dict(dtype=f16, kv_dtype=e5m2, descale="scalar", head_dim=64)),
        ("kv_e4m3_d256", MIXED, {}, dict(dtype=f16, kv_dtype=e4m3, page_size=32, head_dim=256)),
        (
            "kv_e4m3_window",
            LONG,
            {},
            dict(dtype=bf16, kv_dtype=e4m3, window_size_left=300, page_size=64, sinks=True),
        ),
        (
            "kv_e4m3_many_keys",
            MANY,
            {},
            dict(dtype=bf16, kv_dtype=e4m3, num_heads=2, num_kv_heads=1, descale="heads"),
        ),
        ("tokens_int8", LONG, TOKENS, dict(kv_dtype=i8, page_size=16)),
        ("tokens_int8_packed", MIXED, TOKENS, dict(kv_dtype=i8, softcap=5.0, causal=False)),
        (
            "tokens_int8_page80_nhd",
            MIXED,
            TOKENS,
            dict(kv_dtype=i8, page_size=80, cache_layout="nhd"),
        ),
        ("tokens_int8_d256", MIXED, TOKENS, dict(kv_dtype=i8, page_size=64, head_dim=256)),
        ("tokens_e4m3_page1", MIXED, TOKENS, dict(kv_dtype=e4m3, page_size=1)),
        ("tokens_e5m2_d64", LONG, TOKENS, dict(kv_dtype=e5m2, page_size=16, head_dim=64)),
        ("tokens_int4", LONG, TOKENS, dict(kv_dtype=i4, page_size=16)),
        ("tokens_int4_packed_d64", MIXED, TOKENS, dict(kv_dtype=i4, head_dim=64)),
        (
            "tokens_int4_window",
            LONG,
            TOKENS,
            dict(kv_dtype=i4, page_size=64, window_size_left=300, sinks=True),
        ),
    )
)
over_shapes = pytest.mark.parametrize("problem", SHAPES, ids=[p.name for p in SHAPES])
BY_NAME = {p.name: p for p in SHAPES}

needs_hopper = pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")


@over_shapes
def test_supported(problem):
    assert unsupported(problem) is None


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(alibi="heads"), "alibi_slopes"),
        (dict(dtype=e5m2), "e5m2"),
        (dict(kv_dtype=e5m2), "e5m2"),
        (dict(out_dtype=e4m3), "out_dtype"),
        (dict(dtype=torch.float32, kv_dtype=e4m3), "float32"),
        (dict(head_dim=72), "aligned"),
        (dict(kv_dtype=i4, dtype=bf16, descale="heads"), "by token"),
        (dict(kv_dtype=i8, dtype=f16, descale="tokens"), "float16"),
        # scales beside rows: these are apart by no multiple of 16 bytes
        (
            dict(kv_dtype=i8, dtype=bf16, descale="tokens", page_size=16, cache_layout="rows"),
            "aligned",
        ),
    ],
    ids=str,
)
def test_unsupported(changes, word):
    assert word in unsupported(dataclasses.replace(SHAPES[0], **changes))


# whose keys a call of many queries copies in 16 bits
COPIED = ("tokens_int8", "tokens_int4")


@pytest.mark.parametrize(
    "seqs, kernels", [(((3000, 0),), "hopper"), (((1, 3000),) * 40, "portable")]
)
@pytest.mark.parametrize("name", ["e4m3_page16", "kv_int8_page16", "tokens_int8", "tokens_int4"])
def test_prefill_takes_this_kernel(name, seqs, kernels):
    problem = dataclasses.replace(BY_NAME[name], seqs=seqs, num_heads=8)
    with assume(HOPPER):
        found = flash_varlen.choose(hopper_call(problem), max(x for x, _ in seqs)).kernel
    assert found == (
        f"{kernels} and portable" if name in COPIED and kernels == "hopper" else kernels
    )


def compile_for_hopper(problem):
    """The kernels of a launch, compiled in another process."""
    call = hopper_call(problem)
    cross_compile.CALLS["hopper"] = lambda: lambda: hopper.attend(call)
    return cross_compile.compile_call("sm90", "hopper")


# keys that are converted are those of drafts in test_hopper.py, too
@pytest.mark.parametrize("name", ["e4m3_page16", left_out("kv_e4m3_d256")])
def test_compiles_to_products(name, compiler):
    kernels = compiler.submit(compile_for_hopper, BY_NAME[name]).result()
    kernel = next(k for k in kernels if "hopper" in k.name)
    assert kernel.faults("sm90", name) == []
    assert kernel.matrix_instructions > 0


@needs_hopper
@over_shapes
def test_agrees_with_the_reference(problem):
    call = hopper_call(problem, "cuda")
    first = hopper.attend(call)
    assert_accurate(*first, build(problem).truth(cuts_off=True))
    second = hopper.attend(call)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@needs_hopper
@pytest.mark.parametrize("factor", [-1.0, 0.0, 1e-30])
@pytest.mark.parametrize("name", ["e4m3_window", "kv_e4m3", "e4m3_softcap", "e4m3_d256"])
def test_descales_of_any_sign_and_size(name, factor):
    call = build(BY_NAME[name])
    call.args["k_descale"] = call.args["k_descale"] * factor
    if call.args["k_descale"].dim() > 0:
        call.args["k_descale"][..., 0] *= -1.0
    moved = AttentionCall.flash_varlen(**call.to("cuda").args)
    assert_accurate(*hopper.attend(moved), call.truth(cuts_off=True))


@needs_hopper
@pytest.mark.parametrize("name", ["e4m3", "kv_e4m3"])
def test_every_byte_of_float8(name):
    """The largest numbers, the smallest and zeros of either sign; a NaN stays in its sequence."""
    call = build(BY_NAME[name])
    every = torch.arange(256, dtype=torch.uint8)
    finite = every[every & 0x7F != 0x7F]
    stored = call.args["v"].view(torch.uint8).view(-1)
    stored.copy_(finite.repeat(len(stored) // len(finite) + 1)[: len(stored)])
    results = hopper.attend(AttentionCall.flash_varlen(**call.to("cuda").args))
    assert_accurate(*results, call.truth(cuts_off=True))
    # the first key of a sequence, which all of its queries see
    call.args["v"].view(torch.uint8)[call.args["cu_seqlens_k"][1]] = 0x7F
    out, _ = hopper.attend(AttentionCall.flash_varlen(**call.to("cuda").args))
    start, stop = call.args["cu_seqlens_q"][1:3].tolist()
    assert out[start:stop].isnan().all()
    assert not out[:start].isnan().any() and not out[stop:].isnan().any()
