"""The Hopper kernels of the backward: what they leave to the portable ones, and what the compiler
makes of them. Their results are a matter of the conformance suite, on a Hopper chip."""

import dataclasses
import os

import cross_compile
import pytest
import torch
from covering import left_out
from hopper_calls import HOPPER, LONG, MIXED

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.backward import plan as hopper
from torch_paged_attn.backends.triton.hopper.support import width_of
from torch_paged_attn.backends.triton.runtime.target import Target, assume
from torch_paged_attn.backends.triton.tuning.hopper import choose_one_pass_config
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.testing import Layout, Problem, build

bf16, f16 = torch.bfloat16, torch.float16

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"

# keys that no query sees, queries that see no key, padding rows
HIDDEN = ((400, -150), (70, 0), (130, -100), (0, 40), (5, 300))

SHAPES = {
    p.name: p
    for p in (
        Problem(f"{name}/{'f16' if dtype == f16 else 'bf16'}", seqs, dtype=dtype, **options)
        for name, seqs, dtype, options in (
            ("d128", MIXED, bf16, dict(head_dim=128, padding_rows=5)),
            ("d128_mha", MIXED, f16, dict(head_dim=128, num_kv_heads=4, causal=False)),
            ("d128_long", LONG, bf16, dict(head_dim=128, num_heads=8)),
            ("d128_window", LONG, bf16, dict(head_dim=128, window_size_left=70)),
            ("d128_hidden", HIDDEN, bf16, dict(head_dim=128, padding_rows=140)),
            ("d128_softcap", MIXED, bf16, dict(head_dim=128, softcap=5.0)),
            ("d128_alibi", MIXED, bf16, dict(head_dim=128, alibi="heads")),
            ("d128_v40", MIXED, bf16, dict(head_dim=128, head_dim_v=72, sinks=True)),
            ("d80", MIXED, bf16, dict(num_heads=6, head_dim=80)),
            ("d64", MIXED, bf16, {}),
            ("d64_full", LONG, f16, dict(num_heads=8, causal=False)),
            (
                "d64_hidden",
                HIDDEN,
                bf16,
                dict(window_size_left=33, window_size_right=5, causal=False),
            ),
            (
                "d64_options",
                MIXED,
                bf16,
                dict(num_heads=8, alibi="batch", causal=False, softcap=5.0, sinks=True),
            ),
            ("d32", MIXED, bf16, dict(head_dim=32)),
            ("d256", MIXED, bf16, dict(head_dim=256)),
            ("d256_options", MIXED, f16, dict(head_dim=256, softcap=50.0, window_size_left=40)),
            ("d192_v128", MIXED, bf16, dict(head_dim=192, head_dim_v=128)),
            ("d192_v128_full", LONG, bf16, dict(head_dim=192, head_dim_v=128, causal=False)),
            (
                "d192_v128_options",
                MIXED,
                bf16,
                dict(head_dim=192, head_dim_v=128, softcap=5.0, sinks=True, window_size_left=70),
            ),
            ("d192_v128_alibi", MIXED, bf16, dict(head_dim=192, head_dim_v=128, alibi="batch")),
            ("d160_v128", MIXED, bf16, dict(head_dim=160, head_dim_v=128)),
        )
    )
}

# calls, and how dQ is added up: not at all, as deterministic calls do, or as `sums.py` has it
NONE, BY_BOX, BY_LANE = 0, 1, 2
WAYS = [(name, NONE) for name in SHAPES] + [
    (name, sums) for name in SHAPES for sums in (BY_BOX, BY_LANE) if SHAPES[name].head_dim <= 128
]
# of these the keys' kernel spills less than others may
NARROWER_VALUES = "d192_v128", "d160_v128"
# those with the most in their registers; with `--sample`, two kernels that compute 96 of 128
# columns, by two products, and one pass, which computes all
FEW = [
    ("d80/bf16", NONE),
    ("d128/bf16", BY_BOX),
    left_out("d128/bf16", NONE),
    left_out("d192_v128/bf16", NONE),
]


def hopper_call(problem, **changes):
    """A call whose values do not matter."""
    forward = getattr(AttentionCall, problem.op)(**build(problem).args | changes)
    out, lse = forward.new_results()
    return BackwardCall(forward, dout=out, dlse=lse, out=out, softmax_lse=lse)


def unsupported(problem, **changes):
    with assume(HOPPER):
        return hopper.unsupported(hopper_call(problem, **changes))


@pytest.mark.parametrize("problem", SHAPES.values(), ids=SHAPES)
def test_supported(problem):
    assert unsupported(problem) is None


@pytest.mark.parametrize(
    "changes, word",
    [
        (dict(attn_bias=torch.zeros(1)), "attn_bias"),
        (dict(dropout_p=0.1), "dropout_p"),
        (dict(q=torch.zeros(4, 4, 128)), "float32"),
        (dict(q=torch.zeros(0, 4, 128).bfloat16()), "queries"),
        (dict(q=torch.zeros(4, 4, 132).bfloat16()[..., 4:]), "aligned"),
        (dict(v=torch.zeros(4, 2, 64).bfloat16()), "head_dim_v"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_unsupported(changes, word):
    assert word in unsupported(SHAPES["d128/bf16"], **changes)


def test_unsupported_layouts_and_chips():
    assert "layouts" in unsupported(Problem("layout", MIXED, dtype=bf16, layout=Layout()))
    with assume(Target.of_arch("sm100", 148)):
        assert "Hopper" in hopper.unsupported(hopper_call(SHAPES["d64/bf16"]))


def compile_for_hopper(name, sums):
    """The kernels of a launch, compiled in another process."""
    call = hopper_call(SHAPES[name], deterministic=sums == NONE)
    configs = None
    if sums != NONE:
        width = width_of(call.forward.head_dim)
        config = choose_one_pass_config(width, 1 << 20, has_window=False)
        configs = hopper.Configs(dataclasses.replace(config, DQ_SUMS=sums), None)
    cross_compile.CALLS["hopper"] = lambda: lambda: hopper.differentiate(call, configs)
    return cross_compile.compile_call("sm90", "hopper")


@pytest.mark.parametrize(
    "name, sums",
    WAYS if IS_THOROUGH else FEW,
)
def test_compiles_to_products(name, sums, compiler):
    found = compiler.submit(compile_for_hopper, name, sums).result()
    kernels = {k.name: k for k in found if "hopper" in k.name}
    keys = kernels.pop("_hopper_backward_keys_kernel")
    assert list(kernels) == ["_hopper_backward_queries_kernel"] * (sums == NONE)
    for kernel in (keys, *kernels.values()):
        assert kernel.faults("sm90", name) == []
        assert kernel.matrix_instructions > 0
    if name.startswith(NARROWER_VALUES):
        assert keys.spills <= 128


@pytest.mark.parametrize(
    "name, changes, sums",
    [
        ("d128_long/bf16", {}, NONE),
        ("d128_long/bf16", dict(deterministic=False), BY_BOX),
        ("d128/bf16", dict(deterministic=False), NONE),
        ("d128_window/bf16", dict(deterministic=False), NONE),
        ("d64/bf16", dict(deterministic=False), BY_LANE),
        ("d256/bf16", dict(deterministic=False), NONE),
    ],
)
def test_one_pass_where_it_is_faster(name, changes, sums, monkeypatch):
    # the suite has tensors filled with NaN by it
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    configs = hopper.choose_configs(hopper_call(SHAPES[name], **changes))
    assert sums == configs.keys.DQ_SUMS
    assert (configs.queries is None) == (sums != NONE)


def test_one_pass_makes_all_three(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    call = hopper_call(SHAPES["d64/bf16"], deterministic=False)
    call.output_mask = True, False, False, False, False
    assert hopper.choose_configs(call).queries is not None
