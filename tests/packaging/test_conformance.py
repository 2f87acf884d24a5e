"""`python -m torch_paged_attn conformance` reports what is right, wrong, refused and failed."""

import json
import logging
from pathlib import Path

import pytest
import torch

import torch_paged_attn
from torch_paged_attn import _conformance as conformance
from torch_paged_attn import explain
from torch_paged_attn._conformance import TESTS
from torch_paged_attn.ops import path
from torch_paged_attn.ops.backend import Backend, backends

ROOT = Path(torch_paged_attn.__file__).parents[1]
CASE = "attention/llama3_8b/decode_b5/bf16"
EXPERIMENTAL = {"sm90:132": False, "sm80:108": True, "sm120:188": True, "gfx942:304": True}


def test_report_of_a_cpu(run, tmp_path):
    file = tmp_path / "report.json"
    only = "*/llama3_8b/prefill_ragged/bf16"
    status, out, errors = run("conformance", "--device", "cpu", "--only", only, "--out", str(file))
    assert status == 0, errors
    known = json.loads(file.read_text())
    assert known["backend"] == "cpu" and known["counts"]["right"] == known["cases"] == 2
    assert known["packages"]["torch"] == torch.__version__
    assert known["device"]["instruction_set"] in known["device"]["instruction_sets"]
    assert {x["result"] for x in known["results"].values()} == {"right"}
    assert "2 right, 0 wrong" in out.splitlines()[-1]


def test_the_package_is_enough(programs):
    """What the installed package lacks, hypothesis among it, is not imported."""
    program = "import sys; from torch_paged_attn import _conformance; print(*sys.modules)"
    found = set(programs.run(program, str(ROOT)).split())
    assert "torch_paged_attn._conformance" in found
    assert not {"hypothesis", "pytest", "jax", "triton", "transformers"} & found


def judged(monkeypatch, tmp_path, function):
    """The report of one problem whose calls have these results, and whether all is well."""
    monkeypatch.setattr("torch_paged_attn.testing.inputs.Call.run", function)
    is_well = conformance.run("cpu", CASE, tmp_path / "report.json")
    return json.loads((tmp_path / "report.json").read_text())["results"][CASE], is_well


def raises(error):
    def run(call, **changes):
        raise error

    return run


@pytest.mark.parametrize(
    ("function", "result"),
    [
        (raises(NotImplementedError("no such option")), "refused"),
        (raises(RuntimeError("the device failed")), "error"),
        (lambda call: [torch.zeros(5, 32, 128, dtype=torch.bfloat16), torch.zeros(32, 5)], "wrong"),
    ],
    ids=["refused", "error", "wrong"],
)
def test_other_results(monkeypatch, tmp_path, function, result):
    found, is_well = judged(monkeypatch, tmp_path, function)
    assert found["result"] == result and found["text"] and not is_well


def test_other_bits_the_second_time(monkeypatch, tmp_path):
    right, times = conformance.build(TESTS["attention"][0][CASE.partition("/")[2]]), []
    out, lse = right.run()

    def drifts(call):
        times.append(1)
        return out + 1e-3 * (len(times) > 1), lse

    found, is_well = judged(monkeypatch, tmp_path, drifts)
    assert found["result"] == "wrong" and "other bits" in found["text"] and not is_well


@pytest.mark.parametrize(
    ("options", "text"),
    [(("--only", "nothing"), "attention, gradients"), (("--device", "mps"), "no backend")],
)
def test_no_report(run, options, text):
    status, _, errors = run("conformance", *options)
    assert status == 2 and text in errors and "Traceback" not in errors


@pytest.mark.parametrize("target", EXPERIMENTAL)
def test_what_is_experimental(target):
    tiers = {backend.name: backend.untested(target) for backend in backends()}
    assert tiers["cpu"] is None and tiers["tpu"] and tiers["neuron"]
    assert bool(tiers["triton"]) == EXPERIMENTAL[target]
    q, bounds = torch.randn(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)
    found = explain("flash_varlen", q, q, q, bounds, target=target)
    for name, reason in tiers.items():
        if found.paths[name].kernel is not None:
            assert found.paths[name].details.get("experimental") == reason
    assert EXPERIMENTAL[target] == (f"experimental: {tiers['triton']}" in str(found))


def test_experimental_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(path, "_announced", set())
    with caplog.at_level(logging.INFO, "torch_paged_attn"):
        path.announce_experimental("cpu", None)
        for _ in range(2):
            path.announce_experimental("new", Backend().untested())
    assert len(caplog.records) == 1 and "new backend is experimental" in caplog.text


def test_arm_is_experimental(monkeypatch):
    cpu = next(backend for backend in backends() if backend.name == "cpu")
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    assert cpu.untested() is not None
