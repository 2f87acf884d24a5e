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
import torch

from torch_paged_attn import reference
from torch_paged_attn.testing import (
    DIFFERENTIABLE,
    PROBLEMS,
    Truth,
    assert_accurate,
    assert_accurate_gradients,
    build,
)
from torch_paged_attn.testing.inputs import hostile_gradients

sys.path.insert(0, str(Path(__file__).parent))
import run_call

ROOT = Path(__file__).parents[2]
KERNEL_FLAGS = ["-O2", "-std=c++17", "-fno-exceptions", "-fno-rtti", "-ffp-contract=fast"]
ISA_FLAGS = {"generic": [], "neon": [], "neon_bf16": ["-march=armv8.2-a+bf16"]}
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


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
    sources += ["csrc/core/backward_plan.cpp", "csrc/engines.cpp"]
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
    out, lse = run_call.attend(call, emulate(program, isa=isa), tmp_path)
    assert_accurate(out, lse, call.truth())


@pytest.mark.parametrize("isa", ISA_FLAGS)
@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_agree_with_the_reference(name, isa, program, tmp_path):
    call = build(DIFFERENTIABLE[name])
    out, lse = call.run()
    dout, dlse = hostile_gradients(call, out, lse)
    command = emulate(program, isa=isa)
    found = run_call.attend_backward(call, dout, dlse, out, lse, command, tmp_path)
    assert_accurate_gradients(found, call.gradients(dout, dlse))


def empty_caches(layout, dtype, heads=3, dims=(64, 17), num_pages=6, page_size=16):
    """Keys and values of different head_dim: one a cache line at least, one never whole vectors."""
    if layout == "packed_last":
        shape = num_pages, heads, page_size, sum(dims)
        return torch.full(shape, 77.0).to(dtype).split(dims, -1)
    if layout == "nhd":
        shapes = [(num_pages, page_size, heads, dim) for dim in dims]
        return tuple(torch.full(shape, 77.0).to(dtype).transpose(1, 2) for shape in shapes)
    return tuple(torch.full((num_pages, heads, page_size, dim), 77.0).to(dtype) for dim in dims)


def assert_same_storages(tensors, expected):
    """Also where no token belongs."""
    for got, want in zip(tensors, expected, strict=True):
        assert bytes(got.untyped_storage()) == bytes(want.untyped_storage())


@pytest.mark.parametrize("layout", ["hnd", "nhd", "packed_last"])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("isa", ISA_FLAGS)
def test_writes_what_the_reference_writes(isa, dtype, layout, program, tmp_path):
    generator = torch.Generator().manual_seed(0)
    for cache_dtype in (dtype, *EIGHT_BITS):
        caches, expected = empty_caches(layout, cache_dtype), empty_caches(layout, cache_dtype)
        # more than the 8-bit types hold, and numbers that are none
        new = [
            torch.randn(40, 3, cache.shape[3], generator=generator).exp2().mul(20).to(dtype)
            for cache in caches
        ]
        new[0][1, 1, :4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
        slots = torch.randperm(96, generator=generator)[:40]
        slots[::7] = -1  # skipped
        slots[20:23] = slots[5]  # the last one wins
        scales = (None, None)
        if cache_dtype in EIGHT_BITS:
            scales = (torch.tensor(0.25), torch.tensor([0.5, 0.002, 0.1]))
        reference.reshape_and_cache_split(*new, *expected, slots, *scales)
        slots = slots.int() if cache_dtype == dtype else slots
        residues = 2 if layout == "nhd" else 1
        command = emulate(program, isa=isa)
        run_call.reshape_and_cache(new, caches, slots, scales, residues, command, tmp_path)
        assert_same_storages(caches, expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("isa", ISA_FLAGS)
def test_merges_as_the_reference_does(isa, dtype, program, tmp_path):
    generator = torch.Generator().manual_seed(0)
    outs = torch.randn(2, 23, 5, 33, generator=generator).to(dtype)
    lses = torch.randn(2, 5, 23, generator=generator) * 5
    lses[0, :, ::5] = lses[1, :, ::3] = -float("inf")
    outs[0, ::5] = float("nan")  # a part that saw no key has no weight, whatever it holds
    # one part contiguous, the other with its dimensions in another order in memory
    states = outs[0], lses[0], outs[1].mT.contiguous().mT, lses[1].mT.contiguous().mT
    out, lse = run_call.merge_states(*states, emulate(program, isa=isa), tmp_path)
    assert_accurate(out, lse, Truth.of(reference.merge_states, *states))


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
