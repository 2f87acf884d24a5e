"""Wrong calls: each has its named error, eagerly and (where metadata says it) under FakeTensor."""

import inspect
import re

import pytest
import torch
from right_calls import BASES, cached
from torch._subclasses.fake_tensor import FakeTensorMode
from wrong_calls import STATIC as ALL_STATIC
from wrong_calls import VALUES as ALL_VALUES

import torch_paged_attn
from torch_paged_attn.attention_call import arguments
from torch_paged_attn.ops.kinds import FOREIGN

STATIC, VALUES = ([x for x in cases if x[0] in BASES] for cases in (ALL_STATIC, ALL_VALUES))


def overload(name):
    packet, _, over = name.partition(".")
    return getattr(getattr(torch.ops.paged_attn, packet), over or "default")


def public(op):
    """The function of the package that calls an op, hints left to it."""
    packet, _, split = op.partition(".")

    def call(**args):
        if split:
            args["kv_cache"] = args.pop("k_cache"), args.pop("v_cache")
        if split == "quantize":
            args["quantize"] = True
        hints = ("max_seqlen_q", "max_seqlen_k")
        given = {name: value for name, value in args.items() if name not in hints}
        return getattr(torch_paged_attn, packet)(**given)

    return call


def raises(op, args, error, text, function=overload):
    """The error, its exact type, and its text after the op's name."""
    with pytest.raises(error) as caught:
        function(op)(**args)
    assert caught.type is error
    message = str(caught.value)
    assert re.match(rf"{op.partition('.')[0]}\(\): expected .* to be .*, got ", message), message
    pattern = ".*".join(map(re.escape, text.split(" ... ")))
    assert re.search(pattern, message), message
    return message


def tensors_of(args):
    return [name for name, value in args.items() if isinstance(value, torch.Tensor)]


def ids(cases):
    return [f"{base}-{'-'.join(changes)}-{i}" for i, (base, changes, *_) in enumerate(cases)]


@pytest.mark.parametrize("base", BASES)
def test_the_calls_that_the_table_changes_are_right(base):
    op, make = BASES[base]
    overload(op)(**make())


@pytest.mark.parametrize("base, changes, text", STATIC, ids=ids(STATIC))
def test_metadata(base, changes, text):
    op, make = BASES[base]
    args = make() | changes
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    eager = raises(op, args, ValueError, text)
    for name, tensor in before.items():
        assert torch.equal(args[name], tensor), f"{name} changed"
    with FakeTensorMode() as mode:
        fakes = {
            k: mode.from_tensor(v) if isinstance(v, torch.Tensor) else v for k, v in args.items()
        }
        assert raises(op, fakes, ValueError, text) == eager


@pytest.mark.parametrize("base, changes, error, text", VALUES, ids=ids(VALUES))
def test_values(base, changes, error, text):
    op, make = BASES[base]
    args = make() | changes
    before = {k: v.clone() for k, v in args.items() if isinstance(v, torch.Tensor)}
    with torch.inference_mode():
        raises(op, args, error, text)
    for name, tensor in before.items():
        assert torch.equal(args[name], tensor), f"{name} changed"


@pytest.mark.parametrize("base", BASES)
def test_every_tensor_must_be_on_the_first_tensors_device(base):
    op, make = BASES[base]
    args = make()
    _, *others = tensors_of(args)
    for name in others:
        moved = {**args, name: args[name].to("meta")}
        raises(
            op,
            moved,
            ValueError,
            f"expected {name} to be on cpu, as the first tensor, got meta",
        )


@pytest.mark.parametrize("function", [overload, public])
@pytest.mark.parametrize("base", BASES)
def test_a_tensor_without_dimensions(base, function):
    op, make = BASES[base]
    for name in tensors_of(args := make()):
        scalar = {**args, name: args[name].flatten()[0]}
        raises(op, scalar, ValueError, f"expected {name} to be ... got shape ()", function)


@pytest.mark.parametrize("function", [overload, public])
@pytest.mark.parametrize("base", BASES)
def test_none_for_a_required_tensor(base, function):
    op, make = BASES[base]
    required = [a.name for a in overload(op)._schema.arguments if str(a.type) == "Tensor"]
    for name in required:
        if (name, function) != ("kv_cache", public):
            raises(
                op,
                {**make(), name: None},
                ValueError,
                f"expected {name} to be ... got None",
                function,
            )


@pytest.mark.parametrize("base", BASES)
def test_a_list_for_a_tensor(base):
    op, make = BASES[base]
    for name in tensors_of(args := make()):
        wrong = {**args, name: args[name].tolist()}
        if name != "kv_cache":
            text = f"expected {name} to be a tensor, got list"
            raises(op, wrong, TypeError, text, public)
        # the operator itself leaves it to torch
        with pytest.raises(RuntimeError, match=rf"for argument '{name}' but .* type 'list'"):
            overload(op)(**wrong)


@pytest.mark.parametrize(
    "base, name, value, text",
    [
        ("packed", "sinks", [1.0], "a tensor, got list"),
        ("packed", "causal", "yes", "True or False, got str"),
        ("packed", "softcap", "30", "a number, got str"),
        ("packed", "window_size_left", 1.5, "an integer, got float"),
        ("packed", "out_dtype", "float16", "a dtype, got str"),
        ("sparse", "q_block_size", "16", "an integer, got str"),
        ("cached", "k_scale", 2.0, "a tensor, got float"),
        ("split", "v_cache", 3, "a tensor, got int"),
        ("states", "out_a", 3, "a tensor, got int"),
    ],
)
def test_an_argument_of_the_wrong_type(base, name, value, text):
    op, make = BASES[base]
    raises(op, make() | {name: value}, TypeError, f"expected {name} to be {text}", public)


@pytest.mark.parametrize("function", ["flash_varlen_backward", "merge_states_backward"])
def test_a_gradient_of_the_wrong_type(function):
    parameters = inspect.signature(getattr(torch_paged_attn, function)).parameters.values()
    args = {x.name: torch.ones(1, 1, 8) for x in parameters if x.default is x.empty}
    text = "expected dout to be a tensor ... got list"
    raises(function, args | {"dout": [0.0]}, TypeError, text, public)


@pytest.mark.parametrize(
    "cache", [None, (), "kv", [1, 2, 3], 7.0], ids=["none", "empty", "text", "three", "number"]
)
def test_what_is_neither_a_cache_nor_a_pair(cache):
    args = cached() | {"kv_cache": cache}
    raises("reshape_and_cache", args, ValueError, "expected kv_cache to be a tensor, or", public)


OUT, LSE = torch.randn(3, 2, 4), torch.randn(2, 3)


@pytest.mark.parametrize(
    "outs, lses, options, text",
    [
        ([OUT, OUT], [LSE], {}, "expected lses to be 2 tensors, as many as outs, got 1"),
        ([OUT[0]], [LSE], {}, "expected outs[0] to be (total_q ... got shape (2, 4)"),
        (
            [OUT, OUT[:2]],
            [LSE] * 2,
            {},
            "expected outs[1] to be outs[0]'s shape = (3, 2, 4) ... got shape (2, 2, 4)",
        ),
        ([OUT, OUT.half()], [LSE] * 2, {}, "expected outs[1] to be float32 ... got float16"),
        ([OUT.double()], [LSE], {}, "expected outs[0] to be ... got float64"),
        ([OUT, OUT], [LSE, LSE.T], {}, "expected lses[1] to be ... got shape (3, 2)"),
        ([OUT, OUT], [LSE, LSE.half()], {}, "expected lses[1] to be ... got float16"),
        ([OUT, OUT.to("meta")], [LSE] * 2, {}, "expected outs[1] to be ... got meta"),
        ([OUT], [LSE], {"out_dtype": torch.int8}, "expected out_dtype to be ... got int8"),
    ],
)
def test_lists_of_parts(outs, lses, options, text):
    eager = raises("merge_states.list", {"outs": outs, "lses": lses} | options, ValueError, text)
    with FakeTensorMode() as mode:
        fakes = {"outs": [mode.from_tensor(x) for x in outs]}
        fakes |= {"lses": [mode.from_tensor(x) for x in lses]} | options
        assert raises("merge_states.list", fakes, ValueError, text) == eager


def test_parts_of_the_wrong_type():
    with pytest.raises(TypeError, match=r"expected outs\[1\] to be a tensor, got int"):
        torch_paged_attn.merge_states([OUT, 3], [LSE, LSE])
    with pytest.raises(TypeError, match=r"expected lses\[0\] to be a tensor, got None"):
        torch_paged_attn.merge_states([OUT, OUT], [None, LSE])
    with pytest.raises(TypeError, match="expected lses to be a list or a tuple, got Tensor"):
        torch_paged_attn.merge_states([OUT], LSE)


def test_no_parts():
    with pytest.raises(ValueError, match="expected outs to be at least one tensor, got no tensors"):
        torch_paged_attn.merge_states([], [])


def test_a_name_that_no_argument_has():
    call = BASES["packed"][1]()
    for function in (torch_paged_attn.flash_varlen, torch_paged_attn.flash_varlen_backward):
        if function is torch_paged_attn.flash_varlen_backward:
            out, lse = torch_paged_attn.flash_varlen(**call)
            call |= {"dout": out, "dlse": None, "out": out, "softmax_lse": lse}
        with pytest.raises(TypeError, match=r"\(\) got an unexpected keyword argument 'zzz'$"):
            function(**call, zzz=None)
    text = r"^flash_varlen_backward\(\) got .* 'causl'; did you mean causal\?$"
    with pytest.raises(TypeError, match=text):
        torch_paged_attn.flash_varlen_backward(**call, causl=True)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("causl", "causal"),
        ("scale", "softmax_scale"),
        ("is_causal", "causal"),
        ("window_size", "window_size_left and window_size_right"),
        ("dropout", "dropout_p"),
        ("block_tables", "block_table"),
        ("kv_scale", "k_descale and v_descale"),
    ],
)
def test_a_name_of_another_library(name, ours):
    with pytest.raises(
        TypeError, match=rf"^flash_varlen\(\) got .* '{name}'; did you mean {ours}\?$"
    ):
        torch_paged_attn.flash_varlen(**BASES["packed"][1](), **{name: 1})


@pytest.mark.parametrize("name", FOREIGN)
def test_names_of_other_libraries_are_not_ours(name):
    ours = {x.name for op in ("flash_varlen", "blocksparse") for x in arguments(op)}
    assert name not in ours and set(FOREIGN[name].split(" and ")) <= ours


@pytest.mark.parametrize("base", ["packed", "sparse"])
def test_a_tensor_given_twice(base):
    op, make = BASES[base]
    args = make()
    names = [a.name for a in overload(op)._schema.arguments if not a.kwarg_only]
    names = names[: names.index("sinks") + 1]
    sizes = {name: size for name, size in args.items() if name not in names}
    given = [args.get(name) for name in names]
    function = getattr(torch_paged_attn, op)
    function(*given, out_dtype=torch.float16, **sizes)
    with pytest.raises(TypeError, match="got multiple values for argument 'attn_bias'"):
        function(*given, attn_bias=None, **sizes)


@pytest.mark.parametrize(
    "scales",
    [
        {"softmax_scale": 2.0**126},
        {"softmax_scale": -(2.0**126), "softcap": 1.0},
        {"softcap": 2.0**126},
        {"softcap": 2.0**-126},
    ],
    ids=["scale", "scale_softcap", "softcap", "small_softcap"],
)
def test_the_largest_scales_give_numbers(scales):
    args = BASES["packed"][1]()
    args |= {name: args[name] * 0.01 for name in "qk"}
    out, lse = torch_paged_attn.flash_varlen(**args, **scales)
    assert out.isfinite().all() and lse.isfinite().all()


def test_a_cache_that_would_need_a_gradient_is_refused():
    args = cached()
    args["key"].requires_grad_()
    before = args["kv_cache"].clone()
    with pytest.raises(
        NotImplementedError, match="key requires grad, and the operator has no gradient: call"
    ):
        overload("reshape_and_cache")(**args)
    assert torch.equal(args["kv_cache"], before)


def test_writing_a_cache_moves_its_version():
    args = cached()
    version = args["kv_cache"]._version
    torch_paged_attn.reshape_and_cache(**args)
    assert args["kv_cache"]._version > version
