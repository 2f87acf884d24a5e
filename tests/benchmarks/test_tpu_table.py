"""docs/tpu.md's table of whole programs is what `benchmarks/tpu/run.py --write` has counted."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def _report():
    # by its path: there are other scripts of that name
    path = ROOT / "benchmarks" / "tpu" / "report.py"
    spec = importlib.util.spec_from_file_location("tpu_report", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_the_report_of_what_was_counted():
    lines, commits = _report().table()
    assert "\n".join(lines) in (ROOT / "docs" / "tpu.md").read_text()
    assert "none" not in commits["ours"] | commits["peers"]
    assert all("not counted" not in line for line in lines)


def test_calls_without_a_peer_are_those_that_were_counted():
    lines, commits = _report().alone()
    assert "\n".join(lines) in (ROOT / "docs" / "tpu.md").read_text()
    assert "none" not in commits
