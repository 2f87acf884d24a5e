"""Compile for chips that are not here what the named problems would launch there, and read it.

    python tests/triton/cross_compile.py sm90 gfx942 [--only SUBSTRING]

Prints registers, spills (and scratch), shared memory and matrix instructions of every kernel.
"""

import argparse
import importlib
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, mangle_type

from torch_paged_attn.backends import triton as backend
from torch_paged_attn.backends.triton.target import Target
from torch_paged_attn.testing import PROBLEMS, build

TARGETS = {
    "sm80": ("cuda", 80, 32),
    "sm86": ("cuda", 86, 32),
    "sm90": ("cuda", 90, 32),
    "sm100": ("cuda", 100, 32),
    "sm120": ("cuda", 120, 32),
    "gfx90a": ("hip", "gfx90a", 64),
    "gfx942": ("hip", "gfx942", 64),
    "gfx950": ("hip", "gfx950", 64),
    "gfx1100": ("hip", "gfx1100", 32),
    "gfx1201": ("hip", "gfx1201", 32),
}

# bytes of shared memory (LDS) that one program may have
SHARED = {"sm80": 166912, "sm86": 101376, "sm90": 232448, "sm100": 232448, "sm120": 101376}
SHARED |= {"gfx950": 163840} | dict.fromkeys(("gfx90a", "gfx942", "gfx1100", "gfx1201"), 65536)

FLOAT8_ARCHS = ("sm90", "sm100", "sm120", "gfx950", "gfx1201")


def launches(monkeypatch, arch, call):
    """The (kernel, arguments) that `call()` would launch on `arch`, with tensors on the CPU."""
    recorded = []

    def record(kernel, *args, grid, warmup, **kwargs):
        recorded.append((kernel, args, kwargs))

    fake = Target(arch, 132, arch in FLOAT8_ARCHS)
    monkeypatch.setattr(JITFunction, "run", record)
    for name in ("attention", "merge_states", "reshape_and_cache"):
        module = importlib.import_module(f"torch_paged_attn.backends.triton.{name}")
        monkeypatch.setattr(module, "target_of", lambda device: fake)
    call()
    monkeypatch.undo()
    return recorded


def compiled(arch, kernel, args, kwargs):
    """Compile one launch, specialised as a launch would be."""
    gpu = GPUTarget(*TARGETS[arch])
    compiler = make_backend(gpu)
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for i, parameter in enumerate(kernel.params):
        value = values.pop(parameter.name)
        if parameter.is_constexpr or value is None:
            signature[parameter.name], constants[(i,)] = "constexpr", value
        elif isinstance(value, int) and value == 1 and not parameter.do_not_specialize:
            signature[parameter.name], constants[(i,)] = "constexpr", 1
        else:
            signature[parameter.name] = mangle_type(value)
            aligned = isinstance(value, torch.Tensor) or (
                isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize
            )
            if aligned:
                attributes[(i,)] = compiler.parse_attr("D")
    source = ASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=gpu, options=values)


def report(arch, binary):
    """Registers, spills, bytes of shared memory, and the names of the matrix instructions in it."""
    if arch.startswith("gfx"):
        text = binary.asm["amdgcn"]

        def count(key):
            return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])

        spills = (
            count("vgpr_spill_count")
            + count("sgpr_spill_count")
            + count("private_segment_fixed_size")
        )
        matrix = set(re.findall(r"v_(mfma|wmma)_", text))
        return {
            "registers": count("vgpr_count"),
            "spills": spills,
            "shared": binary.metadata.shared,
            "matrix": matrix,
        }
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tools / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", usage)
    matrix = set(re.findall(r"\b(wgmma\.mma_async|tcgen05\.mma|mma\.sync)", binary.asm["ptx"]))
    return {
        "registers": int(found[1]),
        "spills": int(found[2]) + int(found[3]),
        "shared": binary.metadata.shared,
        "matrix": matrix,
    }


def call_of(problem):
    """The launcher of a problem, bound to its arguments."""
    call = build(problem)
    args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | call.args
    first = ["q", "k", "v", "crow_indices", "col_indices", "cu_seqlens_q", "cu_seqlens_k"]
    first += ["max_seqlen_q", "max_seqlen_k"]
    positional = [args.pop(name) for name in first if name in args]
    return lambda: getattr(backend, call.op)(*positional, **args)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("arch", nargs="+", choices=TARGETS)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    for arch in options.arch:
        for name, problem in PROBLEMS.items():
            if options.only not in name:
                continue
            for launch in launches(pytest.MonkeyPatch(), arch, call_of(problem)):
                found = report(arch, compiled(arch, *launch))
                verdict = "  SPILLS" if found["spills"] else ""
                verdict += "  TOO MUCH SHARED" if found["shared"] > SHARED[arch] else ""
                print(f"{arch} {name} {launch[0].__name__}: {found}{verdict}", flush=True)


if __name__ == "__main__":
    main()
