"""`tools/shards.py`: no test goes missing between its processes."""

import subprocess
import sys
from pathlib import Path

SHARDS = Path(__file__).parents[2] / "tools/shards.py"

TESTS = """
import os, pytest
@pytest.mark.parametrize("n", range(5))
def test_passes(n): pass
@pytest.mark.skip(reason="not here")
def test_skips(): pass
def test_fails(): assert FAILS == 0
def test_ends_its_process(): os._exit(0) if CRASHES else None
"""


def shards(tmp_path, **values):
    lines = [f"{name} = {value}" for name, value in values.items()]
    (tmp_path / "test_some.py").write_text("\n".join([*lines, TESTS]))
    command = [sys.executable, SHARDS, "--processes", "3", "test_some.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    return done.returncode, done.stdout.splitlines()[-1], done.stdout


def test_adds_up(tmp_path):
    code, last, text = shards(tmp_path, FAILS=0, CRASHES=0)
    assert (code, last) == (0, "7 passed, 1 skipped, 0 failed, 0 without a result")
    assert "skipped 1: not here" in text


def test_a_failure_fails(tmp_path):
    code, last, text = shards(tmp_path, FAILS=1, CRASHES=0)
    assert (code, last) == (1, "6 passed, 1 skipped, 1 failed, 0 without a result")
    assert "failed test_some::test_fails: " in text


def test_a_process_that_ends_early_fails(tmp_path):
    code, last, _ = shards(tmp_path, FAILS=0, CRASHES=1)
    assert code == 1 and not last.endswith(" 0 without a result")


def test_a_process_that_hangs_is_ended_and_its_test_named(tmp_path):
    tests = "import time\ndef test_ends(): pass\ndef test_hangs(): time.sleep(90)\n"
    (tmp_path / "test_some.py").write_text(tests)
    command = [sys.executable, SHARDS, "--processes", "1", "--seconds", "20", "test_some.py"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1
    assert "::test_hangs" in done.stdout
    assert done.stdout.splitlines()[-1] == "1 passed, 0 skipped, 0 failed, 1 without a result"
