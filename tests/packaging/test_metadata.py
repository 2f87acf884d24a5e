"""The project can be built by the setuptools that is here and by the one that a plain venv has."""

import ensurepip
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import release_links

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


def test_every_file_of_the_package_is_installed(tmp_path):
    """Types (py.typed, .pyi) and tables (.json) beside the modules, and nothing else."""
    source, built = tmp_path / "source", tmp_path / "built"
    hidden = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "torch_paged_attn", source / "torch_paged_attn", ignore=hidden)
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    environment = os.environ | {"PYTHONPATH": "", "PAGED_ATTN_BUILD_CPP": "0"}
    command = [sys.executable, "setup.py", "-q", "build_py", "--build-lib", str(built)]
    subprocess.run(command, cwd=source, env=environment, check=True, capture_output=True)
    expected, found = (
        {str(path.relative_to(folder)) for path in folder.rglob("*.*") if path.is_file()}
        for folder in (source / "torch_paged_attn", built / "torch_paged_attn")
    )
    assert found == expected
    assert {"py.typed", "ops/_typed.pyi"} <= found and any(x.endswith(".json") for x in found)


def test_a_release_has_absolute_links_and_addresses():
    """PyPI's page has no files beside it."""
    home, readme = "https://example.org/a/b", (ROOT / "README.md").read_text()
    page = release_links.absolute(readme, home, "v1")
    links = release_links.LINK.findall(readme)
    assert len(links) >= 15 and not release_links.LINK.search(page)
    for mark, _, path in links:
        assert (ROOT / path.partition("#")[0]).exists(), path
        assert f"]({home}/{'raw' if mark else 'blob'}/v1/{path})" in page
    project = release_links.with_addresses((ROOT / "pyproject.toml").read_text(), home)
    assert tomllib.loads(project)["project"]["urls"]["Repository"] == home
