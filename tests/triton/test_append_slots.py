"""Slots of new tokens: the kernel computes what torch's operators do, to the last bit."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torch_paged_attn.ops.append_slots import append_slots, fake, with_torch_operators

LARGEST = 2**31 - 1


def int32(values, *shape):
    return torch.tensor(values, dtype=torch.int32).view(*shape or (-1,))


@st.composite
def calls(draw):
    """Arguments as plain numbers: lengths, the table's rows, bounds or None, page size, tokens."""
    batch, max_pages = draw(st.sampled_from((0, 1, 3, 130))), draw(st.integers(0, 4))
    page_size = draw(st.sampled_from((0, 1, 3, 16, 2**20)))
    capacity = max_pages * page_size
    lengths = st.one_of(
        st.integers(0, capacity + 3), st.sampled_from((-(2**31), -2, -1, 0, LARGEST - 300))
    )
    pages = st.one_of(st.integers(0, 9), st.sampled_from((-(2**31), -1, LARGEST)))
    seqlens = draw(st.lists(lengths, min_size=batch, max_size=batch))
    row = draw(st.lists(pages, min_size=max_pages, max_size=max_pages))
    table = [[page + b if 0 <= page < 9 else page for page in row] for b in range(batch)]
    if draw(st.booleans()):
        return seqlens, table, None, page_size, batch * draw(st.integers(0, 5))
    counts = draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch))
    bounds = [sum(counts[:b]) for b in range(batch + 1)]
    return seqlens, table, bounds, page_size, bounds[-1] + draw(st.integers(0, 3))


@given(call=calls(), is_strided=st.booleans())
def test_the_kernel_is_what_torch_operators_compute(kernels, device, call, is_strided):
    seqlens, table, bounds, page_size, num_tokens = call
    width = len(table[0]) if table else 2
    tensors = [
        int32(seqlens),
        int32(table, len(seqlens), width),
        None if bounds is None else int32(bounds),
    ]
    if is_strided:
        tensors = [x if x is None else torch.stack([x, x], -1)[..., 1] for x in tensors]
    want = with_torch_operators(*tensors, page_size, num_tokens)
    on_device = [x if x is None else x.to(device) for x in tensors]
    got = kernels.append_slots(*on_device, page_size, num_tokens)
    for a, b, like in zip(want, got, fake(*tensors, page_size, num_tokens), strict=True):
        assert torch.equal(a, b.cpu())
        assert a.dtype == b.dtype == like.dtype and a.shape == like.shape


def by_position(seqlens, table, counts, page_size):
    """The definition, token by token."""
    slots = []
    for length, row, count in zip(seqlens, table, counts, strict=True):
        for position in range(length, length + count):
            entry, offset = divmod(position, page_size)
            is_there = length >= 0 and entry < len(row)
            slots.append(row[entry] * page_size + offset if is_there else -1)
    after = [n + count if n >= 0 else 0 for n, count in zip(seqlens, counts, strict=True)]
    return slots, after


@pytest.fixture(params=["kernel", "torch"])
def function(request, kernels):
    return kernels.append_slots if request.param == "kernel" else append_slots


@pytest.mark.parametrize("counts", [[2, 2, 2, 2], [3, 0, 1, 5]], ids=["equal", "ragged"])
def test_slots_of_each_token(function, device, counts):
    seqlens, table = [3, 0, -1, 6], [[4, 9], [0, 2], [7, 7], [5, -1]]
    bounds = [sum(counts[:b]) for b in range(5)] if len(set(counts)) > 1 else None
    padding = 0 if bounds is None else 2
    slots, after = function(
        int32(seqlens).to(device),
        int32(table).view(4, 2).to(device),
        bounds and int32(bounds).to(device),
        4,
        sum(counts) + padding,
    )
    want, lengths = by_position(seqlens, table, counts, 4)
    assert slots.tolist() == want + [-1] * padding
    assert after.tolist() == lengths


def test_slots_are_64_bit(function, device):
    page, page_size = 2**22 - 1, 2**10
    for bounds in (None, int32([0, 1]).to(device)):
        slots, _ = function(
            int32([5]).to(device), int32([[page]], 1, 1).to(device), bounds, page_size, 1
        )
        assert slots.tolist() == [page * page_size + 5]


WRONG = {
    "table": (
        lambda a: a | {"block_table": a["block_table"].long()},
        r"block_table to be int32 .*, got int64",
    ),
    "lengths": (
        lambda a: a | {"cache_seqlens": a["cache_seqlens"][:1]},
        "cache_seqlens to be .* got shape",
    ),
    "bounds": (
        lambda a: a | {"cu_seqlens_k_new": int32([0, 1])},
        "cu_seqlens_k_new to be .* got shape",
    ),
    "tokens": (lambda a: a | {"num_tokens": 3}, "num_tokens to be a multiple of batch = 2, got 3"),
    "device": (
        lambda a: a | {"block_table": a["block_table"].to("meta")},
        "block_table to be on cpu, as the first tensor, got meta",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_kernel_can_take_is_refused(name, kernels):
    change, text = WRONG[name]
    arguments = {
        "cache_seqlens": int32([1, 2]),
        "block_table": int32([[1], [2]], 2, 1),
        "cu_seqlens_k_new": None,
        "page_size": 4,
        "num_tokens": 2,
    }
    for function in (kernels.append_slots, with_torch_operators, fake):
        with pytest.raises(ValueError, match=rf"append_slots\(\): expected {text}"):
            function(*change(arguments).values())


def test_gpus_get_the_kernel_and_nothing_stops_at_autograd(kernels):
    module = sys.modules["torch_paged_attn.ops.append_slots"]
    assert module._gpu_kernel() is kernels.append_slots
    for key in ("CUDA", "CompositeExplicitAutograd", "Autograd"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key("paged_attn::append_slots", key)
    # other devices compute it with torch operators
    slots, after = append_slots(
        int32([1, 2]).to("meta"), int32([[1], [2]], 2, 1).to("meta"), None, 4, 2
    )
    assert slots.shape == after.shape == (2,)


def test_the_operator_is_one_node_of_a_graph(device):
    arguments = int32([1, 2]).to(device), int32([[1], [2]], 2, 1).to(device), None, 4, 2
    torch.library.opcheck(torch.ops.paged_attn.append_slots.default, arguments)
    program = torch.export.export(Slots(), arguments[:2])
    called = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert torch.ops.paged_attn.append_slots.default in called
    assert torch.equal(program.module()(*arguments[:2])[0], append_slots(*arguments)[0])


class Slots(torch.nn.Module):
    def forward(self, cache_seqlens, block_table):
        return append_slots(cache_seqlens, block_table, None, 4, 2)
