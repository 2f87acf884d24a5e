"""Compile FlashAttention-4's backward for a Hopper GPU, on any machine: no GPU is needed.

    python -m venv ENV && ENV/bin/pip install torch 'flash-attn-4[cu13]==4.0.0b36'
    ENV/bin/python benchmarks/gpu/fa4/build.py build/fa4
    python benchmarks/gpu/run.py --only backward --fa4 build/fa4/fa4.so

The folder gets fa4.so, fa4.json (which function is whose) and fa4_peer.py, fit for any Python. The
machine that runs them needs apache-tvm-ffi, and a driver as new as the extra's CUDA: without the
extra, kernels are compiled by CUDA 12. For bfloat16, not deterministic, without windows, sequences
of one length and of more than one tile.
"""

import argparse
import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

# an H200 or H100; read when FA4 is imported
os.environ |= {
    "FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"
}  # fmt: skip

import torch
from cutlass import cute
from flash_attn.cute import interface
from torch._subclasses.fake_tensor import FakeTensorMode

# head_dim, head_dim_v and query heads for a KV head; FA4 has no groups for two head dimensions
SHAPES = (*itertools.product(((64, 64), (128, 128), (256, 256)), (1, 4)), ((192, 128), 1))

HERE = Path(__file__).parent

# stands in for the one function that FA4's objects take from CUTLASS's runtime, of 43 MB
RAISE = r"""
#include <stdint.h>
#include <stdio.h>
void CuteDSLRT_TVMFFISetRaisedCudaError(
    void (*set_error)(const char *, const char **, int32_t), int32_t code) {
  char text[32];
  snprintf(text, sizeof text, "CUDA error %d", code);
  const char *parts[] = {text};
  set_error("RuntimeError", parts, 1);
}
"""


class Exports:
    """Takes the place of one of FA4's caches of compiled functions: an object file for each key,
    and the names of those that were asked for."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.names: dict[Any, str] = {}
        self.asked: list[str] = []

    def __contains__(self, key: Any) -> bool:
        known = key in self.names
        self.asked.append(self.names.setdefault(key, f"{self.name}{len(self.names)}"))
        return known

    def __setitem__(self, key: Any, function: Any) -> None:
        name = self.names[key]
        function.export_to_c(str(self.folder / f"{name}.o"), name, export_only_tvm_ffi_symbols=True)


def compile_case(dim: int, dim_v: int, group: int, causal: bool) -> None:
    """What one case needs and no case before has needed."""
    heads_kv = 8 // group
    shapes = ((8, dim), (heads_kv, dim), (heads_kv, dim_v), (8, dim_v), (8, dim_v))
    with FakeTensorMode():
        q, k, v, out, dout = (
            torch.empty(2, 1024, *shape, dtype=torch.bfloat16, device="cuda") for shape in shapes
        )
        lse = torch.empty(2, 8, 1024, device="cuda")
        interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=causal)


def export(folder: Path) -> dict[str, Any]:
    """Objects of all cases; each one's functions, tiles and multiple of head dimensions."""
    owners = {
        "preprocess": interface._bwd_preprocess,
        "main": interface._flash_attn_bwd,
        "postprocess": interface._bwd_postprocess_convert,
    }
    caches = {name: Exports(name, folder) for name in owners}
    for name, owner in owners.items():
        owner.compile_cache = caches[name]
    cases = {}
    for ((dim, dim_v), group), causal in itertools.product(SHAPES, (False, True)):
        for cache in caches.values():
            cache.asked.clear()
        compile_case(dim, dim_v, group, causal)
        tile = interface._tile_size_bwd_sm90(dim, dim_v, causal, False)
        cases[f"{dim}/{dim_v} {group} {'causal' if causal else 'full'}"] = {
            **{name: [*cache.asked] for name, cache in caches.items()},
            "tile_m": tile.m_block_size,
            "tile_n": tile.n_block_size,
            "dim_multiple": 64 if tile.dKV_swapAB else 32,
        }
    return cases


def link(folder: Path, library: Path) -> None:
    """One library of all objects, with the part of CUTLASS's runtime that loads kernels."""
    stub = folder / "raise.c"
    stub.write_text(RAISE)
    [runtime] = (
        Path(file).with_name("libcuda_dialect_runtime_static.a")
        for file in cute.runtime.find_runtime_libraries(enable_tvm_ffi=False)
    )
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O2", "-s", "-o", library, stub, *folder.glob("*.o"), runtime],
        check=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="where the library goes")
    folder = parser.parse_args().folder
    objects = folder / "objects"
    shutil.rmtree(objects, ignore_errors=True)
    objects.mkdir(parents=True)
    cases = export(objects)
    link(objects, folder / "fa4.so")
    (folder / "fa4.json").write_text(json.dumps(cases, indent=1) + "\n")
    shutil.copy(HERE / "fa4_peer.py", folder)
    shutil.rmtree(objects)


if __name__ == "__main__":
    main()
