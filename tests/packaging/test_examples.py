"""Quick forms of three examples: each compares its own results, and exits with 1 if they differ."""

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"
# embed: embeddings of packed sequences against SDPA's; rollout: bits of a sampler and a trainer;
# indexer: losses and written bytes of selected keys against an eager formula
NAMES = ("embed", "rollout", "indexer")


@pytest.fixture
def example(monkeypatch):
    """Runs one here: in a process of its own imports are half of what it takes."""
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name, value in (("HF_HUB_OFFLINE", "1"), ("OMP_WAIT_POLICY", "PASSIVE")):
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(EXAMPLES)  # it imports files beside it
    before = set(sys.modules)

    def run(name):
        monkeypatch.setattr(sys, "argv", [name, "--quick"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return ended.value.code

    yield run
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "/").parent == EXAMPLES:
            del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_results_agree(name, example):
    assert not example(name)
