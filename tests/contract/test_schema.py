"""Schemas and kernels fit: every optional argument, given and omitted, arrives where it is read."""

import inspect
import re
import typing

import pytest
import torch

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.attention_call import AttentionCall, arguments, tensor_names
from torch_paged_attn.backends.cpu import BACKEND
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops import _library, paths, signature
from torch_paged_attn.testing import EXTENDED, Problem, Truth, assert_accurate, build

BASE = Problem("base", ((3, 9), (1, 30), (8, 0)), 4, 2, 16, page_size=4)
# of every optional argument but the lengths, which all problems have: what needs it. What is not
# here is given by a problem of EXTENDED
OPTIONS = {
    "attn_bias": {"bias": "float", "bias_heads": "all"},
    "alibi_slopes": {"alibi": "batch"},
    "sinks": {"sinks": True},
    "q_descale": {"descale": "heads", "dtype": torch.float8_e4m3fn, "out_dtype": torch.float32},
    "k_descale": {"descale": "batch", "kv_dtype": torch.int8},
    "v_descale": {"descale": "scalar", "kv_dtype": torch.float8_e5m2},
    "out_scale": {"out_scale": True, "out_dtype": torch.float8_e5m2},
    "rng_state": {"dropout_p": 0.4},
    "softmax_scale": {"softmax_scale": 0.9},
    "causal": {"causal": False},
    "window_size_left": {"window_size_left": 3},
    "window_size_right": {"causal": False, "window_size_right": 2},
    "softcap": {"softcap": 0.7},
    "dropout_p": {"dropout_p": 0.1},
    "out_dtype": {"out_dtype": torch.float16},
    "k_start": {"k_ranges": "shared", "page_size": None},
    "key_ranks": {"key_ranks": 3, "q_positions": (27, 90, 0)},
    "key_rank": {"key_ranks": 2, "key_rank": 1, "q_positions": (18, 60, 0)},
    "key_interleave": {"key_ranks": 2, "key_interleave": 4, "q_positions": (18, 60, 0)},
}


LENGTHS = {"cu_seqlens_k", "seqused_k", "block_table"}
OF_THE_BACKWARD = {"deterministic"}
# of how a result is computed, not of what it is
OF_BITS = {"batch_invariant"}


def options():
    listed = (x for x in arguments("flash_varlen")[4:] if not x.is_hint)
    return [x.name for x in listed if x.name not in LENGTHS | OF_THE_BACKWARD | OF_BITS]


@pytest.mark.parametrize("name", options())
def test_each_option_changes_the_result_as_the_reference_says(name):
    if name in OPTIONS:
        problem, without = Problem(**{**vars(BASE), **OPTIONS[name]}), build(BASE)
    else:
        problem = next(x for x in EXTENDED.values() if name in x.optional)
        without = build(problem)
        del without.args[name]
    call = build(problem)
    assert call.args[name] is not None
    if problem.optional & set(BACKEND.lacks):
        with pytest.raises(NotImplementedError, match="is not supported by the cpu backend"):
            call.run()
        return
    out, lse = call.run()
    assert_accurate(out, lse, call.truth())
    plain, _ = without.run()
    assert out.dtype != plain.dtype or not torch.equal(out, plain)


@pytest.mark.parametrize(
    "name", [name for name in torch_paged_attn.ops.__all__ if name in _library.OPS]
)
def test_the_public_function_has_the_schemas_arguments(name):
    function = inspect.signature(getattr(torch_paged_attn, name))
    schema = getattr(torch.ops.paged_attn, name).default._schema
    # by name only: of the list form, and what asks for another overload
    others = ("merge_states", "out_dtype"), ("reshape_and_cache", "quantize")
    more = [n for n in function.parameters if (name, n) in others]
    assert list(function.parameters) == [a.name for a in schema.arguments] + more
    for argument in schema.arguments:
        parameter = function.parameters[argument.name]
        assert (parameter.kind == parameter.KEYWORD_ONLY) == argument.kwarg_only
        if argument.has_default_value():
            default = parameter.default
            default = list(default) if isinstance(default, tuple) else default
            assert default == argument.default_value


def test_every_op_registers_itself():
    """`define` and `public` keep the lists; the two that are written out name the same ops."""
    assert set(torch_paged_attn.ops.__all__) == set(paths.PUBLIC) <= set(torch_paged_attn.__all__)
    packets = {name.partition(".")[0] for name in _library.OPS}
    assert packets == set(paths.PUBLIC) and set(paths.CALLS) <= packets


BACKWARDS = ["flash_varlen_backward", "blocksparse_backward"]


@pytest.mark.parametrize("name", ["flash_varlen", "blocksparse", *BACKWARDS])
def test_the_public_function_tells_all_about_its_arguments(name):
    function = getattr(torch_paged_attn, name)
    documented = inspect.getdoc(function)
    hints = typing.get_type_hints(function)
    for argument in signature.arguments(name):
        assert argument.name in documented and argument.meaning in " ".join(documented.split())
        wanted = argument.type | None if argument.is_hint else argument.type
        assert hints[argument.name] == wanted
    assert "{arguments}" not in documented
    results = 5 if name in BACKWARDS else 2
    assert hints["return"] == tuple[(torch.Tensor,) * results]


def test_a_call_by_position_is_the_call_by_name():
    listed = arguments("blocksparse")
    positional = [x.name for x in listed if not x.keyword_only]
    options = {x.name: f"given {x.name}" for x in listed if x.keyword_only}
    calls = [
        AttentionCall.blocksparse(*positional, **options),
        AttentionCall.blocksparse(**{name: name for name in positional}, **options),
    ]
    for call in calls:
        assert list(call.tensors().items()) == [(n, n) for n in call.tensors()]
        assert set(call.tensors()) == set(tensor_names("blocksparse"))
        assert (call.causal, call.layout.q_block_size) == ("given causal", "given q_block_size")
        assert call.max_seqlen_k == "max_seqlen_k"
    assert AttentionCall.blocksparse(*positional).causal is True
    assert AttentionCall.flash_varlen(*positional[:4]).causal is False
    with pytest.raises(ValueError):
        AttentionCall.blocksparse(*positional, *options, "one too many")


def test_a_backward_by_position_is_the_call_by_name():
    listed = signature.arguments("blocksparse_backward")
    positional = [x.name for x in listed if not x.keyword_only]
    options = {x.name: f"given {x.name}" for x in listed if x.keyword_only}
    calls = [
        BackwardCall.blocksparse(*positional, **options),
        BackwardCall.blocksparse(**{name: name for name in positional}, **options),
    ]
    for call in calls:
        assert list(call.tensors().items()) == [(n, n) for n in call.tensors()]
        assert list(call.tensors()) == [x.name for x in listed if x.is_tensor]
        assert call.forward.given()["crow_indices"] == "crow_indices"
        assert call.forward.layout.q_block_size == "given q_block_size"
        assert call.output_mask == "given output_mask"
        assert call.forward.block_table is None
    assert BackwardCall.flash_varlen(*positional[:5], *positional[7:12]).forward.causal is False


@pytest.mark.parametrize("name", _library.OPS)
def test_every_op_has_a_docstring_and_a_twin_that_explains(name):
    packet = name.partition(".")[0]
    function = getattr(torch_paged_attn, packet)
    documented = inspect.getdoc(function)
    # a summary, the arguments, and the errors: its own, or those of the op that it is like
    assert documented.index("\nArgs:\n") > 40
    assert "\nRaises:\n" in documented or re.search(r"\b[Ee]rrors\b", documented)
    for argument in inspect.signature(function).parameters:
        assert re.search(rf"\b{argument}\b", documented), argument
    assert hasattr(torch.ops.paged_attn, name.replace(".", "_") + "_error")


def test_positional_call_through_torch_ops():
    q = torch.randn(5, 2, 8)
    bounds = torch.tensor([0, 2, 5], dtype=torch.int32)
    out, lse = torch.ops.paged_attn.flash_varlen(q, q, q, bounds, None, 3, 3, causal=True)
    args = {"q": q, "k": q, "v": q, "cu_seqlens_q": bounds, "causal": True}
    assert_accurate(out, lse, Truth.of(reference.flash_varlen, **args))
