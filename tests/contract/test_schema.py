"""Schemas and kernels fit: every optional argument, given and omitted, arrives where it is read."""

import inspect

import pytest
import torch

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.ops import _library
from torch_paged_attn.testing import Problem, Truth, assert_accurate, build

BASE = Problem("base", ((3, 9), (1, 30), (8, 0)), 4, 2, 16, page_size=4)
TENSORS = {
    "attn_bias": {"bias": "float", "bias_heads": "all"},
    "alibi_slopes": {"alibi": "batch"},
    "sinks": {"sinks": True},
    "q_descale": {"descale": "heads", "dtype": torch.float8_e4m3fn, "out_dtype": torch.float32},
    "k_descale": {"descale": "batch", "kv_dtype": torch.int8},
    "out_scale": {"out_scale": True, "out_dtype": torch.float8_e5m2},
    "rng_state": {"dropout_p": 0.4},
    "softmax_scale": {"softmax_scale": 0.9},
    "causal": {"causal": False},
    "window_size_left": {"window_size_left": 3},
    "window_size_right": {"causal": False, "window_size_right": 2},
    "softcap": {"softcap": 0.7},
    "out_dtype": {"out_dtype": torch.float16},
}


@pytest.mark.parametrize("name", TENSORS)
def test_each_option_changes_the_result_as_the_reference_says(name):
    problem = Problem(**{**vars(BASE), **TENSORS[name]})
    call = build(problem)
    assert call.args[name] is not None
    out, lse = call.run()
    assert_accurate(out, lse, call.truth())
    plain, _ = build(BASE).run()
    assert out.dtype != plain.dtype or not torch.equal(out, plain)


@pytest.mark.parametrize(
    "name", ["flash_varlen", "blocksparse", "reshape_and_cache", "merge_states"]
)
def test_the_public_function_has_the_schemas_arguments(name):
    function = inspect.signature(getattr(torch_paged_attn, name))
    schema = getattr(torch.ops.paged_attn, name).default._schema
    assert list(function.parameters) == [a.name for a in schema.arguments]
    for argument in schema.arguments:
        parameter = function.parameters[argument.name]
        assert (parameter.kind == parameter.KEYWORD_ONLY) == argument.kwarg_only
        if argument.has_default_value():
            assert parameter.default == argument.default_value


@pytest.mark.parametrize("name", _library.OPS)
def test_every_op_has_a_docstring_and_a_twin_that_explains(name):
    packet = name.partition(".")[0]
    assert len(inspect.getdoc(getattr(torch_paged_attn, packet))) > 200
    assert hasattr(torch.ops.paged_attn, name.replace(".", "_") + "_error")


def test_positional_call_through_torch_ops():
    q = torch.randn(5, 2, 8)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    out, lse = torch.ops.paged_attn.flash_varlen(q, q, q, bounds, None, 3, 3, causal=True)
    args = {"q": q, "k": q, "v": q, "cu_seqlens_q": bounds, "causal": True}
    assert_accurate(out, lse, Truth.of(reference.flash_varlen, **args))
