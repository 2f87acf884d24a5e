"""Builds run_call.cpp with the kernels of some instruction sets."""

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parents[2]
CXX = shutil.which("g++")
FLAGS = ["-g0", "-std=c++17", "-ffp-contract=fast", "-Wno-psabi", f"-I{ROOT / 'csrc'}"]


def compiled(isa: str, folder: Path, flags: Sequence[str]) -> str:
    """The object of an instruction set that `make install` made of the sources as they are, else
    one without optimisation, which takes a half or a third of the time.
    """
    sources = [ROOT / "setup.py", *(ROOT / "csrc").rglob("*.*")]
    newest = max(path.stat().st_mtime for path in sources)
    for path in (ROOT / "build").glob(f"temp.*/csrc/isa/{isa}.o"):
        if path.stat().st_mtime > newest:
            return str(path)
    return compile_isa(isa, folder, flags)


def compile_isa(isa: str, folder: Path, flags: Sequence[str]) -> str:
    target = folder / f"{isa}.o"
    command = [CXX, *FLAGS, *flags, "-c", ROOT / f"csrc/isa/{isa}.cpp", "-o", target]
    subprocess.run(command, check=True)
    return str(target)


def link(folder: Path, table: str, objects: Sequence[str]) -> None:
    """The program, of objects of instruction sets and C++ that defines kernels()."""
    (folder / "kernels.cpp").write_text(f'#include "engines.h"\n{table}')
    names = ["tests/isa/run_call", "csrc/engines", "csrc/core/schedule", "csrc/core/backward_plan"]
    sources = [folder / "kernels.cpp", *(ROOT / f"{name}.cpp" for name in names)]
    subprocess.run([CXX, *FLAGS, *sources, *objects, "-o", folder / "run_call"], check=True)


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> str:
    """The program that `build` leaves in a folder, by whichever process of the suite asks first."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    program = folder / name / "run_call"
    with FileLock(folder / f"{name}.lock"):
        if not program.exists():
            program.parent.mkdir(exist_ok=True)
            build(program.parent)
    return str(program)
