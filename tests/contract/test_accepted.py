"""What the public functions take besides an operator's own forms: the same results, by any way."""

import numpy
import pytest
import torch
from right_calls import BASES
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_paged_attn
from torch_paged_attn import attention_call
from torch_paged_attn.ops import accepted

# arguments of the operators that are lengths, page ids or indices
INDICES = [x.name for x in attention_call.arguments("blocksparse") if "int32" in x.shape]
MODES = ["eager", "compiled", "fake"]


def call(base, mode="eager", **changes):
    op, make = BASES[base]
    torch.manual_seed(0)
    given = make() | changes
    function = getattr(torch_paged_attn, op)
    if mode == "compiled":
        torch._dynamo.reset()  # the same function, compiled for each of the calls
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    if mode == "fake":
        with FakeTensorMode() as fakes:
            given = {
                name: fakes.from_tensor(x) if isinstance(x, torch.Tensor) else x
                for name, x in given.items()
            }
            return [x.shape for x in function(**given)]
    return function(**given)


def check_same(base, mode, plain, changes):
    want, got = call(base, mode, **plain), call(base, mode, **changes)
    for a, b in zip(want, got, strict=True):
        assert a == b if mode == "fake" else torch.equal(a, b)


def test_every_index_has_a_form():
    assert set(INDICES) <= set(accepted.FORMS)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", INDICES)
def test_int64_is_cast(name, mode):
    ints = lambda *x: torch.tensor(x, dtype=torch.int32)  # noqa: E731
    base = "paged" if name in ("block_table", "seqused_k") else "packed"
    base = "sparse" if name.endswith("_indices") else base
    plain = {"k_start": {name: ints(0, 3)}, "q_position": {name: ints(2, 1)}}.get(name, {})
    given = plain.get(name, BASES[base][1]().get(name))
    check_same(base, mode, plain, {name: given.long()})


@pytest.mark.parametrize("base", ["packed", "paged", "sparse"])
def test_all_of_them_at_once_and_their_backward(base):
    """Gradients flow as for int32, where a call has any."""
    make = BASES[base][1]
    wide = {n: x.long() for n, x in make().items() if n in INDICES and x is not None}
    check_same(base, "eager", {}, wide)
    if base == "paged":
        return
    found = []
    for changes in ({}, wide):
        torch.manual_seed(0)
        q = make()["q"].requires_grad_()
        call(base, q=q, **changes)[0].sum().backward()
        found.append(q.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 2**32 + 3])
@pytest.mark.parametrize("name", INDICES)
def test_numbers_that_do_not_fit_are_refused(name, value):
    """Not taken modulo 2**32."""
    base = "paged" if name in ("block_table", "seqused_k") else "packed"
    base = "sparse" if name.endswith("_indices") else base
    like = BASES[base][1]().get(name)
    like = torch.zeros(2, dtype=torch.int64) if like is None else like.long()
    like.view(-1)[-1] = value
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        call(base, **{name: like})


def test_in_a_graph_they_become_numbers_that_the_operator_refuses():
    bounds = torch.tensor([0, 3, 2**32 + 7])
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        call("packed", "compiled", cu_seqlens_q=bounds)


@pytest.mark.parametrize("mode", MODES)
def test_a_scale_of_shape_1_is_for_all_heads(mode):
    k = torch.randn(9, 2, 8).to(torch.float8_e4m3fn)
    v = torch.randn(9, 2, 6).to(torch.float8_e4m3fn)
    scale = torch.tensor(0.5)
    plain = {"k": k, "v": v, "k_descale": scale, "v_descale": scale}
    for shape in ((1,), (1, 1)):
        given = {"k_descale": scale.view(shape), "v_descale": scale.view(shape)}
        check_same("packed", mode, plain, plain | given)
    given = {"k_descale": scale.bfloat16(), "v_descale": scale.half().view(1)}
    check_same("packed", mode, plain, plain | given)


def test_a_cache_scale_of_shape_1():
    found = []
    for scale in (torch.tensor(0.5), torch.tensor([0.5])):
        torch.manual_seed(0)
        cache = torch.zeros(2, 5, 2, 4, 8, dtype=torch.int8)
        given = BASES["cached"][1]() | {"kv_cache": cache, "k_scale": scale, "v_scale": scale}
        torch_paged_attn.reshape_and_cache(**given)
        found.append(cache)
    assert torch.equal(*found)
    assert found[0].any()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["sinks", "alibi_slopes"])
def test_sinks_and_slopes_of_16_bits(name, dtype, mode):
    """As a module holds them after `module.bfloat16()`."""
    module = torch.nn.Module()
    module.register_buffer("x", torch.tensor([0.5, 1.0, -2.0, 3.0]))
    check_same("packed", mode, {name: module.x}, {name: module.to(dtype).x})


def test_sinks_of_16_bits_have_a_gradient():
    sinks = torch.tensor([0.5, 1.0, -2.0, 3.0])
    grads = []
    for given in (sinks.clone(), sinks.bfloat16()):
        call("packed", sinks=given.requires_grad_())[0].sum().backward()
        grads.append(given.grad)
    assert grads[1].dtype == torch.bfloat16
    assert torch.equal(grads[0].bfloat16(), grads[1])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", [(7, 5), (1, 5), (1, 1, 5), (4, 1, 5), (4, 1, 1)])
def test_a_bias_broadcasts_over_heads_queries_and_keys(shape, mode):
    bias = torch.randn(shape)
    whole = bias if bias.dim() == 3 else bias[None]
    whole = whole.expand(-1, 7, 5).contiguous()
    check_same("packed", mode, {"attn_bias": whole}, {"attn_bias": bias})


@pytest.mark.parametrize("name", ["paged", "sparse"])
@pytest.mark.parametrize("shape", [(7, 1), (4, 7, 1), (4, 1, 1)])
def test_a_bias_of_one_column_is_for_all_keys(shape, name):
    bias = torch.randn(shape)
    queries = BASES[name][1]()["q"].shape[0]
    bias = bias[..., :1, :].expand(*bias.shape[:-2], queries, 1) if queries != 7 else bias
    whole = (bias if bias.dim() == 3 else bias[None]).expand(-1, queries, 64).contiguous()
    check_same(name, "eager", {"attn_bias": whole}, {"attn_bias": bias})


def test_a_bias_of_one_column_hides_rows_and_weighs_sinks():
    """It changes what is not a matter of keys alone."""
    seen = torch.tensor([True, False, True, True, True, True, True])[:, None]
    out = call("packed", attn_bias=seen)[0]
    assert not out[1].any() and out[0].any()
    sinks = torch.zeros(4)
    for bias in (torch.zeros(7, 1), torch.full((7, 1), 3.0)):
        whole = bias[None].expand(4, 7, 5).contiguous()
        got, want = (call("packed", attn_bias=x, sinks=sinks) for x in (bias, whole))
        assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_the_gradient_of_a_broadcast_bias_is_a_sum():
    bias = torch.randn(4, 1, 5, requires_grad=True)
    whole = bias.detach().expand(-1, 7, -1).contiguous().requires_grad_()
    for given in (bias, whole):
        call("packed", attn_bias=given)[0].sum().backward()
    assert torch.equal(bias.grad, whole.grad.sum(1, keepdim=True))


@pytest.mark.parametrize("name", ["window_size_left", "window_size_right"])
def test_a_negative_window_is_unbounded(name):
    for window in (-5, numpy.int64(-5)):
        check_same("packed", "eager", {name: -1}, {name: window})


def test_what_the_operator_takes_is_passed_on_as_it_is():
    args = tuple(BASES["packed"][1]().values())
    op = torch.ops.paged_attn.flash_varlen.default
    given = (*args, None, None)
    options = {"causal": True, "softcap": 1.0}
    found, found_options = accepted.as_accepted(accepted.operator_of(op), given, options)
    assert found is given
    assert found_options is options
