"""The Arm kernels, cross-compiled and run under QEMU: the same problems, judged by the same rule.

Needs qemu-aarch64 (Debian: qemu-user-static; QEMU_AARCH64 says where) and a compiler for
aarch64-linux: AARCH64_CXX, or aarch64-linux-gnu-g++, or zig (`pip install ziglang`).
"""

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from torch_paged_attn.testing import PROBLEMS, assert_accurate, build

sys.path.insert(0, str(Path(__file__).parent))
import run_call

ROOT = Path(__file__).parents[2]
KERNEL_FLAGS = ["-O2", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast"]
ISA_FLAGS = {"generic": [], "neon": [], "neon_bf16": ["-march=armv8.2-a+bf16"]}


def emulator():
    names = (os.environ.get("QEMU_AARCH64"), "qemu-aarch64-static", "qemu-aarch64")
    return next((path for name in names if name and (path := shutil.which(name))), None)


def compiler():
    if "AARCH64_CXX" in os.environ:
        return shlex.split(os.environ["AARCH64_CXX"])
    if gcc := shutil.which("aarch64-linux-gnu-g++"):
        return [gcc]
    if importlib.util.find_spec("ziglang"):
        return [sys.executable, "-m", "ziglang", "c++", "-target", "aarch64-linux-musl"]
    return None


pytestmark = pytest.mark.skipif(
    emulator() is None or compiler() is None, reason="needs qemu-aarch64 and a cross-compiler"
)


@pytest.fixture(scope="session")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("aarch64")
    objects = []
    for isa, flags in ISA_FLAGS.items():
        if any("zig" in word for word in compiler()):  # which has names of its own
            flags = [flag.replace("-march=armv8.2-a", "-mcpu=generic+v8_2a") for flag in flags]
        objects.append(str(folder / f"{isa}.o"))
        source = str(ROOT / f"csrc/isa/{isa}.cpp")
        command = [*compiler(), *KERNEL_FLAGS, *flags, "-c", source, "-o", objects[-1]]
        subprocess.run(command, check=True)
    sources = ["tests/isa/run_call.cpp", "csrc/dispatch.cpp", "csrc/core/schedule.cpp"]
    paths = [str(ROOT / source) for source in sources]
    command = [*compiler(), "-O2", "-std=c++17", "-static", f"-I{ROOT / 'csrc'}", *paths, *objects]
    subprocess.run([*command, "-o", str(folder / "run_call")], check=True)
    return str(folder / "run_call")


def emulate(program, *, cpu="max", isa=""):
    return [emulator(), "-cpu", cpu, "-E", f"PAGED_ATTN_CPU_ISA={isa}", program]


@pytest.mark.parametrize("isa", ISA_FLAGS)
@pytest.mark.parametrize("name", PROBLEMS)
def test_agrees_with_the_reference(name, isa, program, tmp_path):
    call = build(PROBLEMS[name])
    out, lse = run_call.run(call, emulate(program, isa=isa), tmp_path)
    assert_accurate(out, lse, call.truth())


@pytest.mark.parametrize(
    ("cpu", "best", "absent"),
    [("max", "neon_bf16", "avx2"), ("neoverse-n1", "neon", "neon_bf16")],
)
def test_dispatch(cpu, best, absent, program):
    def chosen(isa):
        command = emulate(program, cpu=cpu, isa=isa)
        return subprocess.run(command, capture_output=True, text=True)

    assert chosen("").stdout.split() == [best]
    assert chosen("generic").stdout.split() == ["generic"]
    missing = chosen(absent)
    assert missing.returncode == 1 and best in missing.stderr
