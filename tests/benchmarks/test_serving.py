"""Serving steps: what is drawn, what they are compared with, and how figures are reported."""

import dataclasses
import json

import attention
import pytest
import serving
import serving_report
import torch
from draws import HEADS, KINDS, MOST_BYTES, PAGES, Step, draw_steps

import torch_paged_attn


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(serving, "DEVICE", "cpu")
    monkeypatch.setattr(attention, "DEVICE", "cpu")
    yield
    serving.pool.cache_clear()


def test_a_seed_says_what_is_drawn():
    steps = draw_steps(3, 200)
    assert steps == draw_steps(3, 250)[:200]
    assert steps != draw_steps(4, 200)
    assert {step.kind for step in steps} == set(KINDS)
    assert {step.page_size for step in steps} == {0, *PAGES}
    paged = [step for step in steps if step.page_size]
    assert {(s.num_heads, s.num_kv_heads, s.head_dim) for s in paged} == set(HEADS)
    for step in steps:
        assert step.bytes <= MOST_BYTES * 1.01
        assert all(1 <= q <= n for q, n in zip(step.queries, step.keys, strict=True))
        assert step.page_size == 0 or max(step.keys) <= step.table_width


def test_kinds():
    for step in draw_steps(5, 150):
        uniform = len(set(step.queries)) == 1
        if step.kind == "decode":
            assert set(step.queries) == {1}
        elif step.kind == "speculation":
            assert max(step.queries) <= 8
        elif step.kind == "mixed":
            assert step.queries.count(1) >= 8 and not uniform
        elif step.kind == "encoder":
            assert step.queries == step.keys and not step.causal
        else:
            assert min(step.queries) >= 64


def test_work():
    step = Step("decode", 8, 2, 64, (1, 1), (100, 300), 16, 512)
    assert step.bytes == 400 * 2 * 2 * 64 * 2
    assert step.flops == 4 * 8 * 64 * 400
    assert dataclasses.replace(step, window=63).flops == 4 * 8 * 64 * 128
    causal = dataclasses.replace(step, queries=(5, 4), keys=(5, 4))
    assert causal.flops == 4 * 8 * 64 * (15 + 10)


STEPS = (
    Step("mixed", 8, 2, 64, (1, 5, 40, 1), (70, 5, 100, 33), 16, 128),
    Step("mixed", 8, 2, 64, (1, 33), (70, 90), 1, 128, window=20, sinks=True),
    Step("decode", 4, 4, 32, (1, 1), (70, 129), 544, 1088, "float16", "float16"),
    Step("decode", 8, 1, 64, (1, 1), (70, 90), 16, 128, kv_dtype="float8_e4m3fn"),
    Step("encoder", 4, 4, 64, (30, 30), (30, 30), causal=False),
)


@pytest.mark.parametrize("step", STEPS, ids=str)
def test_the_formula_is_the_operators(step, monkeypatch):
    """On the CPU's own kernels: tables, lengths and the formula belong together."""
    monkeypatch.setattr(serving, "flash_varlen", by_name)
    b = serving.Batch(step, 2, 8 << 20)
    rows, heads, want = serving.some_rows(b)
    got = torch.cat([serving.ours(b, 0)[r, heads] for r in rows])
    attention.check({"ours": attention.relative_error(got, want)})
    other = torch.cat([serving.ours(b, 1)[r, heads] for r in rows])
    assert attention.relative_error(other, want) > 0.1, "a call has keys of its own"


def by_name(*args, **options):
    """The public function, of the operator's arguments."""
    names = torch_paged_attn.attention_call.tensor_names("flash_varlen")
    given = dict(zip(names[5:], args[7:], strict=False))
    return torch_paged_attn.flash_varlen(*args[:5], **given, **options)


def row(kind, ours, **peers):
    figures = {"ours": ours, **peers}
    shown = {"kernel": "portable", "refused peers": {}}
    return {"problem": f"{kind} {ours}", "kind": kind, "figures": figures, **shown}


def test_report(tmp_path):
    rows = [row("decode", 10.0, FA3=9.0), row("mixed", 10.0, FA3=40.0, FA2=16.0)]
    rows += [row("decode", 5.0), {"problem": "bad", "kind": "mixed", "refused": "wrong"}]
    machine = dict.fromkeys(("gpu", "torch", "triton", "date", "commit"), "-")
    document = {"machine": machine, "seed": 4, "rows": rows}
    assert serving_report.ratio(rows[0]) == 0.9
    assert serving_report.ratio(rows[1]) == 1.6
    assert serving_report.ratio(rows[2]) is None
    text = serving_report.summary(document).splitlines()
    assert "2 draws, geometric mean 1.200, least 0.90, 50% below 0.95" in text[1]
    assert "1 refused, 1 without a peer" in text[4]
    assert text[5].startswith(" 0.90 decode 10.0")
    tables = serving_report.markdown(document)
    assert "| all | 2 | 1.200 | 0.90 | 50% | 0 |" in tables
    assert "Without a figure of ours: bad." in tables
    assert json.loads(serving_report.compact(document)) == document
    serving_report.draw(document, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 1000
