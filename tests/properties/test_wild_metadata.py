"""Random integers for metadata: the CPU refuses what the contract does, and never crashes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from served import BACKEND, HAS

import torch_paged_attn
from torch_paged_attn.testing import build
from torch_paged_attn.testing.inputs import hostile_gradients
from torch_paged_attn.testing.strategies import layouts, problems, selected_problems

# values near the edges of what a small call allows, and the worst an int32 can be
WILD = st.one_of(st.integers(-3, 12), st.sampled_from((-(2**31), -(2**31) + 1, 2**31 - 1, 2**30)))
METADATA = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "block_table",
    "k_start",
    "q_position",
    "crow_indices",
    "col_indices",
    "key_indices",
    "num_selected",
)


selects = pytest.mark.skipif(
    not (BACKEND.is_compiled or BACKEND.has("selected_attention")),
    reason=f"the {BACKEND.name} backend has no selected_attention",
)


def outcome(call):
    try:
        call()
    except (ValueError, IndexError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def change(args, data):
    """Write wild numbers into some of the call's metadata."""
    names = [n for n in METADATA if args.get(n) is not None and args[n].numel()]
    for _ in range(data.draw(st.integers(1, 3), "changes")):
        name = data.draw(st.sampled_from(names), "tensor")
        flat = args[name].view(-1)
        flat[data.draw(st.integers(0, flat.numel() - 1), "index")] = data.draw(WILD, "value")


def assert_refused_as_explained(op, args):
    args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | args
    run, explain = (getattr(torch.ops.paged_attn, name) for name in (op, f"{op}_error"))
    assert outcome(lambda: run(**args)) == explain(**args)


@given(problems(st.one_of(st.none(), layouts), optional=HAS), st.data())
def test_attention(problem, data):
    call = build(problem)
    change(call.args, data)
    assert_refused_as_explained(call.op, call.args)


@selects
@given(selected_problems(), st.data())
def test_selected_attention(problem, data):
    """And of `selected_mass`, and of `select_keys` with the same keys."""
    call = build(problem)
    change(call.args, data)
    assert_refused_as_explained(call.op, call.args)
    lse = torch.zeros(problem.num_heads, call.args["q"].shape[0])
    for op, further in (
        ("selected_mass", {"softmax_lse": lse}),
        ("select_keys", {"weights": None, "num_units": 3, "force_last": 1}),
    ):
        names = {x.name for x in getattr(torch.ops.paged_attn, op).default._schema.arguments}
        args = {name: x for name, x in call.args.items() if name in names}
        assert_refused_as_explained(op, args | further)


@selects
@given(selected_problems(trains=True), st.data())
def test_selected_attention_backward(problem, data):
    call = build(problem)
    out, lse = call.run()
    backward = call.backward(*hostile_gradients(call, out, lse), out, lse)
    change(backward.args, data)
    assert_refused_as_explained(backward.op, backward.args)


@pytest.mark.any_isa  # they are looked at before the kernel
@given(
    st.lists(st.one_of(st.integers(-2, 40), st.sampled_from((2**62, -(2**63), 2**31)))),
    st.booleans(),
)
def test_slots(slots, int32):
    dtype = torch.int32 if int32 else torch.int64
    slots = [max(-(2**31), min(s, 2**31 - 1)) for s in slots] if int32 else slots
    key = torch.randn(len(slots), 2, 3)
    cache = torch.full((2, 4, 2, 8, 3), 5.0)
    args = (key, key, cache, torch.tensor(slots, dtype=dtype))
    error = outcome(lambda: torch_paged_attn.reshape_and_cache(*args))
    assert error == torch.ops.paged_attn.reshape_and_cache_error(*args)
    if error:
        assert (cache == 5.0).all()
