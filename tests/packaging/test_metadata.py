"""The project can be built by the setuptools that is here and by the one that a plain venv has."""

import ensurepip
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# before 3.12 a venv comes with setuptools: 65.5 in Python 3.10 and 3.11, and a wheel is importable
BUNDLED = sorted(Path(ensurepip.__file__).parent.glob("_bundled/setuptools-*.whl"))


@pytest.mark.parametrize(
    "path", ["", *map(str, BUNDLED)], ids=["installed", *("venv" for _ in BUNDLED)]
)
def test_setuptools_reads_the_metadata(path, tmp_path):
    environment = os.environ | {"PYTHONPATH": path, "PAGED_ATTN_BUILD_CPP": "0"}
    command = [sys.executable, "setup.py", "-q", "egg_info", "-e", tmp_path]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "license" not in done.stderr, done.stderr
    (info,) = tmp_path.glob("*.egg-info/PKG-INFO")
    assert "\nLicense: Apache-2.0\n" in info.read_text()
