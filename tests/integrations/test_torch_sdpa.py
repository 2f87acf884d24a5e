"""F.scaled_dot_product_attention on CPUs: ours where the table says so, else PyTorch's own bits."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
)

from torch_paged_attn import _processor, flash_varlen
from torch_paged_attn.integrations import torch_sdpa
from torch_paged_attn.testing import assert_as_right_as

NAME = "PAGED_ATTN_SDPA"
PROCESSOR = _processor.family()


def cell(kind, keys, ratio, dtype="float32", head_dim=64, group_size=1):
    return {
        "kind": kind,
        "keys": keys,
        "ratio": ratio,
        "dtype": dtype,
        "head_dim": head_dim,
        "group_size": group_size,
    }


# ahead in decode, behind in prefill, and ahead in encoders of one length
CELLS = [
    *(cell("decode", n, 2.0, group_size=g) for n in (8, 64) for g in (1, 4)),
    *(cell("prefill", n, 0.9) for n in (8, 64)),
    cell("encoder", 8, 1.5),
    cell("encoder", 64, 1.0),
]


@pytest.fixture
def activated(tmp_path, monkeypatch):
    table = tmp_path / "table.json"
    table.write_text(json.dumps({"processors": {PROCESSOR: {"cells": CELLS}}}))
    monkeypatch.setattr(torch_sdpa, "TABLE", table)
    taken = []

    def attend(*args):
        taken.append(args)
        return stock(*args)

    stock = torch_sdpa.attend
    monkeypatch.setattr(torch_sdpa, "attend", attend)
    activate_flash_attention_impl(NAME)
    yield taken
    restore_flash_attention_impl()


def tensors(queries, keys, heads=8, kv_heads=8, dim=64, dtype=torch.float32, batch=2):
    generator = torch.Generator().manual_seed(0)

    def random(heads, length):
        x = torch.randn(batch, length, heads, dim, generator=generator).to(dtype)
        return x.transpose(1, 2)

    return random(heads, queries), random(kv_heads, keys), random(kv_heads, keys)


def by_hand(q, k, v, **options):
    """The same attention by `flash_varlen`, sequence by sequence."""
    found = []
    for query, key, value in zip(q, k, v, strict=True):
        starts = [torch.tensor([0, x.shape[1]], dtype=torch.int32) for x in (query, key)]
        rows = (x.transpose(0, 1) for x in (query, key, value))
        found.append(flash_varlen(*rows, *starts, **options)[0].transpose(0, 1))
    return torch.stack(found)


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("heads_first", [False, True])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_calls_that_are_faster_are_ours(activated, kv_heads, heads_first, scale):
    q, k, v = tensors(1, 40, kv_heads=kv_heads)
    if heads_first:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=kv_heads < 8)
    assert len(activated) == 1
    assert torch.equal(out, by_hand(q, k, v, softmax_scale=scale))
    assert out.stride() == torch.empty_like(q).stride()


OTHERS = {
    "slower": (tensors(16, 16), {"is_causal": True}),
    "slower beside": (tensors(16, 16), {}),
    "shorter than the table": (tensors(1, 7), {}),
    "longer than the table": (tensors(1, 65), {}),
    "another head": (tensors(1, 40, dim=32), {}),
    "another dtype": (tensors(1, 40, dtype=torch.bfloat16), {}),
    "float64": (tensors(1, 40, dtype=torch.float64), {}),
    "few heads": (tensors(1, 40, heads=1, kv_heads=1), {}),
    "a group outside": (tensors(1, 40, kv_heads=1), {"enable_gqa": True}),
    "aligned at the first key": (tensors(1, 40), {"is_causal": True}),
    "a chunk": (tensors(4, 40), {}),
    "a mask": (tensors(1, 40), {"attn_mask": torch.zeros(1, 40)}),
    "nothing": (tensors(1, 40, batch=0), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_all_other_calls_are_pytorchs(activated, name):
    (q, k, v), options = OTHERS[name]
    got = F.scaled_dot_product_attention(q, k, v, **options)
    assert not activated
    restore_flash_attention_impl()
    assert torch.equal(got, F.scaled_dot_product_attention(q, k, v, **options))
    activate_flash_attention_impl(NAME)


def test_dropout_is_pytorchs(activated):
    q, k, v = tensors(1, 40)
    args = q, k, v, 0.5, False
    with pytest.raises(RuntimeError) as ours:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args)
    restore_flash_attention_impl()
    with pytest.raises(RuntimeError) as theirs:
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*args)
    assert str(ours.value) == str(theirs.value) and not activated
    activate_flash_attention_impl(NAME)


def test_gradients_are_pytorchs(activated):
    q, k, v = (x.clone().requires_grad_() for x in tensors(8, 8))
    weight = torch.randn(q.shape, generator=torch.Generator().manual_seed(1))
    out = F.scaled_dot_product_attention(q, k, v)
    assert len(activated) == 1
    got = torch.autograd.grad((out * weight).sum(), (q, k, v))
    truth = [x.detach().double().requires_grad_() for x in (q, k, v)]
    wanted = torch.autograd.grad(
        (F.scaled_dot_product_attention(*truth) * weight.double()).sum(), truth
    )
    restore_flash_attention_impl()
    stock = torch.autograd.grad((F.scaled_dot_product_attention(q, k, v) * weight).sum(), (q, k, v))
    activate_flash_attention_impl(NAME)
    for ours, theirs, exact in zip(got, stock, wanted, strict=True):
        assert_as_right_as(ours, exact, theirs)


def test_compiled(activated):
    q, k, v = tensors(1, 40, kv_heads=2)

    def step(q, k, v):
        return F.scaled_dot_product_attention(q * 1.0, k, v, enable_gqa=True).relu()

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    got = compiled(q, k, v)
    assert activated and torch.equal(got, by_hand(q, k, v).relu())


def test_restore_brings_the_kernel_back(activated):
    assert current_flash_attention_impl() == NAME
    restore_flash_attention_impl()
    q, k, v = tensors(1, 40)
    expected = F.scaled_dot_product_attention(q, k, v)
    assert not activated and current_flash_attention_impl() is None
    activate_flash_attention_impl(NAME)
    F.scaled_dot_product_attention(q, k, v)
    restore_flash_attention_impl()
    assert len(activated) == 1
    assert torch.equal(F.scaled_dot_product_attention(q, k, v), expected)
    activate_flash_attention_impl(NAME)


def test_a_processor_without_a_table_changes_nothing(activated):
    assert not torch_sdpa.Table.of("z80").ratios


def test_the_table_that_is_shipped_is_sound():
    tables = json.loads(torch_sdpa.TABLE.read_text())["processors"]
    for table in tables.values():
        assert table["cells"] and isinstance(table["is_quiet"], bool)
        kinds = {(x["dtype"], x["kind"], x["head_dim"], x["group_size"]) for x in table["cells"]}
        for dtype, kind, _, _ in kinds:
            # neighbours in two directions are looked up together
            dims = {x[2] for x in kinds if x[:2] == (dtype, kind)}
            groups = {x[3] for x in kinds if x[:2] == (dtype, kind)}
            assert {(dtype, kind, d, g) for d in dims for g in groups} <= kinds
