"""`python -m torch_paged_attn` finds what is wrong, and --check says so by its exit status."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_paged_attn
from torch_paged_attn import _doctor, environment
from torch_paged_attn.backends import cpu
from torch_paged_attn.integrations import _versions

ROOT = Path(torch_paged_attn.__file__).parents[1]
AMX = {"amx_tile", "amx_bf16"}

# a vLLM whose CUSTOM another package has taken, or none has
VLLM = """
class Custom:
    owner = {owner!r}
    def is_overridden(self): return self.owner is not None
    def get_path(self): return self.owner
class AttentionBackendEnum:
    CUSTOM = Custom()
print("vLLM logs to stdout")
"""


@pytest.fixture(scope="module")
def sound():
    return _doctor.report()


def test_a_sound_machine_has_no_problem(sound):
    assert sound["problems"] == []
    found = sound["devices"]["cpu"]
    assert found["self_test"]["error"] is None
    assert found["instruction_set"] in found["instruction_sets"]
    assert sound["flash_attention_impl"] is None and "PAGED_ATTN" in sound["flash_attention_impls"]
    text = _doctor.printed(sound)
    assert "self-test: passed" in text and "problem" not in text
    assert text.startswith(f"torch_paged_attn {torch_paged_attn.__version__} is ready: cpu by cpu")
    assert found["self_test"]["milliseconds"] < 5000  # of a call of microseconds, on a busy machine


def test_the_self_test_is_quick(programs):
    """Its call takes milliseconds, and the comparison imports nothing that takes seconds."""
    program = """
import sys
from torch_paged_attn import _doctor
before = set(sys.modules)
print(_doctor.self_test("cpu")["milliseconds"])
print(*sorted({"sympy", "jax", "triton", "transformers", "hypothesis"} & set(sys.modules) - before))
"""
    milliseconds, slow = programs.run(program, str(ROOT)).split("\n")[:2]
    assert float(milliseconds) < 5000 and not slow, slow


def test_a_reader_may_stop_after_the_verdict():
    command = f"{sys.executable} -m torch_paged_attn | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=env)
    assert "is ready" in done.stdout and not done.stderr


def test_check_fails_without_kernels(tmp_path, run):
    status, out, _ = run("--check", "--json", PAGED_ATTN_LIBRARY=str(tmp_path / "none.so"))
    known = json.loads(out)
    assert status == 1 and "PAGED_ATTN_LIBRARY names" in known["problems"][0]
    assert _doctor.printed(known).startswith("torch_paged_attn 0.1.0 is not ready: PAGED_ATTN_LIB")


def test_a_package_without_kernels_says_how_it_was_installed(tmp_path, monkeypatch):
    monkeypatch.delenv("PAGED_ATTN_LIBRARY", raising=False)
    monkeypatch.setattr(environment, "LIBRARY", tmp_path / "none.so")
    reason = cpu._load.__wrapped__()
    assert "installed with PAGED_ATTN_BUILD_CPP=0" in reason and "pip install ." in reason


def test_an_instruction_set_that_is_not_here_is_a_problem_and_no_traceback(run):
    status, out, errors = run("--check", PAGED_ATTN_CPU_ISA="z80")
    assert status == 1 and not errors, errors
    assert "is not ready: paged_attn: PAGED_ATTN_CPU_ISA=z80 is not" in out


def test_the_self_test_finds_a_wrong_kernel(monkeypatch):
    op = torch_paged_attn.flash_varlen

    def wrong(*args, **options):
        out, lse = op(*args, **options)
        return out * 1.02, lse

    monkeypatch.setattr(torch_paged_attn, "flash_varlen", wrong)
    known = _doctor.report()
    assert "the self-test of cpu failed: AssertionError" in known["problems"][0]


def test_a_stub_of_neurons_packages_is_named(tmp_path, monkeypatch):
    metadata = tmp_path / "nki-0.0.1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: nki\nVersion: 0.0.1\n")
    (tmp_path / "nki.py").write_text("raise ImportError('WRONG PACKAGE')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nki", raising=False)
    [said] = _doctor.neuron_stubs()
    assert "nki 0.0.1 does not import (WRONG PACKAGE): PyPI has stubs" in said


@pytest.mark.parametrize(
    ("flags", "isa", "missing", "said"),
    [
        (AMX, "amx", {}, None),
        ({"avx512f"}, "avx512bf16", {"amx": "it has none"}, None),
        (AMX, "avx512", {}, "PAGED_ATTN_CPU_ISA=avx512 asks for avx512"),
        (AMX, "avx512bf16", {"amx": "Linux keeps tiles"}, "is not used: Linux keeps tiles"),
    ],
)
def test_amx_that_is_not_used(flags, isa, missing, said):
    reason = _doctor.why_no_amx(flags, isa, missing, "avx512")
    assert reason is None if said is None else said in reason


def test_versions_are_compared(monkeypatch):
    assert _versions.compared("torch", "2.13.0+cpu") == "tested"
    assert _versions.compared("torch", "2.15.3") == "tested"
    older, newer = _versions.compared("torch", "2.9.1"), _versions.compared("torch", "2.16.0")
    assert "torch 2.9.1 is older than the 2.11 " in older and "newer than the 2.15 " in newer
    found = {"transformers": "5.3.0", "diffusers": "0.50.0"}
    monkeypatch.setattr(_versions, "installed", found.get)
    known = _doctor.report()
    assert [x.partition(" is ")[0] for x in known["problems"]] == ["transformers 5.3.0"]
    assert any(x.startswith("diffusers 0.50.0 is newer") for x in known["notes"])


def test_an_error_names_both_sides(monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(_versions, "installed", lambda project: None)
        with pytest.raises(ImportError, match=r"0\.42 to 0\.42, and there is none"):
            _versions.require("diffusers", "integrations.diffusers", "diffusers")
    monkeypatch.setattr(_versions, "installed", lambda project: "0.20.1")
    with pytest.raises(ImportError, match="and this is diffusers 0"):
        _versions.require("diffusers", "integrations.diffusers", "diffusers")


@pytest.mark.parametrize(
    ("owner", "said"),
    [
        ("torch_paged_attn.integrations._vllm_backend.PagedAttentionBackend", None),
        ("somebody.Else", "vLLM's CUSTOM belongs to somebody.Else"),
        (None, "no plugin has registered vLLM's CUSTOM"),
    ],
)
def test_who_owns_vllms_slot(owner, said, tmp_path, monkeypatch, capsys):
    registry = tmp_path / "vllm" / "v1" / "attention" / "backends"
    registry.mkdir(parents=True)
    (registry / "registry.py").write_text(VLLM.format(owner=owner))
    (tmp_path / "vllm" / "plugins.py").write_text("def load_general_plugins(): pass")
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    try:
        found = _doctor.vllm_custom()
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "vllm":
                del sys.modules[name]
    assert found["owner"] == owner and (said is None) == (found["error"] is None)
    assert said is None or said in found["error"]
    assert capsys.readouterr().out == ""


def test_the_flash_impl_is_the_current_one():
    torch.nn.attention.activate_flash_attention_impl("PAGED_ATTN")
    try:
        assert _doctor.report()["flash_attention_impl"] == "PAGED_ATTN"
    finally:
        torch.nn.attention.restore_flash_attention_impl()
