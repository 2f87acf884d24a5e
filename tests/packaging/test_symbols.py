"""An object of one instruction set holds nothing that could stand in for another's.

Of two weak symbols the linker keeps one, whichever: AVX-512 code could end up in the generic path.
"""

import os
import runpy
import shutil
import subprocess
from pathlib import Path

import pytest
import setuptools

ROOT = Path(__file__).parents[2]
CXX = os.environ.get("CXX", "g++")
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
# what the kernels take from outside: C, never the C++ library
LIBC = {"expf", "logf", "memcpy", "memset", "sched_yield", "sqrtf"}
# what is set for all of them where the processor is known (csrc/engines.cpp)
SETTINGS = {"_ZN10paged_attn29reads_ahead_into_second_levelE"}


@pytest.fixture(scope="module")
def build_flags():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PAGED_ATTN_BUILD_CPP", "0")
        patch.setattr(setuptools, "setup", lambda **_: None)
        return runpy.run_path(str(ROOT / "setup.py"))


def built(isa):
    """What `make install` compiled, if no source has changed since; None where it parses alone."""
    newest = max(path.stat().st_mtime for path in (ROOT / "csrc").rglob("*.*"))
    found = [*ROOT.glob(f"build/temp.*/csrc/isa/{isa}.o")]
    return found[0] if len(found) == 1 and found[0].stat().st_mtime > newest else None


def object_of(isa, build_flags, folder):
    """The built one, unless there is none or `make thorough` asks."""
    if not IS_THOROUGH and (made := built(isa)) is not None:
        return made
    # without optimisation nothing is inlined that does not have to be
    flags = [*build_flags["KERNEL_FLAGS"], *build_flags["ISA_FLAGS"][isa], "-O0"]
    target = folder / "kernels.o"
    subprocess.run([CXX, *flags, "-c", ROOT / f"csrc/isa/{isa}.cpp", "-o", target], check=True)
    return target


# where they are not built they are parsed (setup.py), and take up to half a minute each
SLOW = ("amx", "avx512", "avx512bf16")


def objects():
    for isa in sorted(path.stem for path in ROOT.glob("csrc/isa/*.cpp")):
        is_left = isa in SLOW and built(isa) is None
        yield pytest.param(isa, marks=pytest.mark.thorough if is_left else ())


# an ISA that takes some kernels from another's table
BORROWS = {"amx": ("kernels_avx512bf16",)}


@pytest.mark.skipif(
    shutil.which(CXX) is None or shutil.which("nm") is None, reason="needs a compiler and nm"
)
@pytest.mark.parametrize("isa", [*objects()])
def test_an_object_exports_its_table_alone(isa, build_flags, tmp_path):
    if isa not in build_flags["ISA_FLAGS"]:
        pytest.skip("not of this machine")
    target = object_of(isa, build_flags, tmp_path)
    nm = subprocess.run(
        ["nm", "--format=posix", target], check=True, capture_output=True, text=True
    )
    symbols = dict(line.split()[:2] for line in nm.stdout.splitlines())
    tables = {f"_ZN10paged_attn{len(name)}{name}E" for name in BORROWS.get(isa, ())}
    missing = {name for name, kind in symbols.items() if kind == "U"}
    assert missing - {"_GLOBAL_OFFSET_TABLE_"} <= LIBC | SETTINGS | tables
    # lower case: local to the object, or one of the weak kinds, v and w
    shared = {name: kind for name, kind in symbols.items() if kind not in "Ubdnrt"}
    table = f"kernels_{isa}"
    assert shared == {f"_ZN10paged_attn{len(table)}{table}E": "D"}
