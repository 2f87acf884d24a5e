"""`python -m torch_paged_attn compile`, and `use_compiled`: compiled kernels that travel."""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

from torch_paged_attn import environment
from torch_paged_attn._model_calls import USES, Sizes, jobs_of
from torch_paged_attn._model_config import dtype_named, read_model
from torch_paged_attn._warmup import MOST_PROCESSES, usable_cores
from torch_paged_attn.ops.backend import backends
from torch_paged_attn.ops.checks import FLOAT, fail

# multiprocessors of the GPUs that are most common, on which the number of splits depends
MULTIPROCESSORS = {"sm80": 108, "sm86": 84, "sm89": 142, "sm90": 132, "sm100": 148, "sm120": 188}
MULTIPROCESSORS |= {"sm103": 160, "gfx90a": 104, "gfx942": 304, "gfx950": 256}
# names of 8-bit caches in vLLM
FLOAT8 = {"fp8": "float8_e4m3fn", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2"}


def use_compiled(*folders: str | os.PathLike[str]) -> None:
    """Take compiled kernels from these folders before Triton compiles any; without a folder, from
    none.

    They replace the folders of the environment variable PAGED_ATTN_KERNELS, which are used without
    this call. `python -m torch_paged_attn compile` makes such folders. Call it before the first
    kernel runs. A folder that does not fit, because it is for another GPU, Triton, Python or
    version of this package, or is damaged, is named by a warning when the first kernel is looked
    up, and Triton compiles as without it.

    Raises:
        ValueError: there is no such folder, or it has no manifest.
    """
    paths = tuple(Path(folder).absolute() for folder in folders)
    for path in paths:
        if not (path / "manifest.json").is_file():
            fail("use_compiled", "folders", path, "folders that have a manifest.json")
    environment.KERNELS = paths


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add = parser.add_argument
    add("--model", type=Path, required=True, metavar="FILE", help="its config.json, or the folder")
    add("--arch", required=True, help="the GPU: sm_90, sm_80, gfx942, ...")
    add("--out", type=Path, required=True, metavar="DIR", help="a folder to make or to add to")
    add(
        "--use", action="append", choices=USES,
        help="steps of vLLM; PagedKVCache, flash-attn's functions and Transformers; forward and"
        " backward of packed sequences (may be repeated; without it: serving)",
    )  # fmt: skip
    add("--page-size", type=int, default=16, metavar="N", help="tokens of a page (16)")
    add("--max-num-seqs", type=int, default=256, metavar="N", help="sequences of a step (256)")
    add("--max-num-batched-tokens", type=int, default=8192, metavar="N",
        help="new tokens of a step (8192)")  # fmt: skip
    add("--max-model-len", type=int, metavar="N", help="tokens of a sequence (the model's)")
    add("--dtype", help="of queries (the model's)")
    add("--kv-cache-dtype", default="auto", help="auto, fp8, fp8_e5m2, int8 or a dtype of torch")
    add("--tensor-parallel-size", type=int, default=1, metavar="N", help="ranks that share heads")
    add("--multiprocessors", type=int, metavar="N", help="of the GPU (those of the common one)")
    add("--processes", type=int, metavar="N", help="that compile (one for each core)")


def compile_model(asked: argparse.Namespace) -> None:
    """Run the command. Exits with a message if an argument is wrong or a process fails."""
    try:
        arch = arch_named(asked.arch)
        count = asked.multiprocessors or MULTIPROCESSORS.get(arch)
        if count is None:
            raise ValueError(f"give --multiprocessors, which are not known of {asked.arch}")
        compiler = _compiler()
        layers, sizes = _read(asked)
        uses = dict.fromkeys(asked.use or ["serving"])
        described = dict(job for x in layers for use in uses for job in jobs_of(x, use, sizes))
        jobs = [compiler.Job(*job) for job in described.items()]
        processes = asked.processes or min(usable_cores(), 2 * MOST_PROCESSES)
        start = time.perf_counter()
        for layer in layers:
            print(layer)
        found = compiler.compile_into(asked.out, jobs, arch, count, processes)
        for name, kernels in found.items():
            print(f"{kernels:5d} kernels for {name[:120]}")
        print(f"{time.perf_counter() - start:.1f} s")
    except ValueError as error:
        sys.exit(f"compile: {error}")
    files = [x for x in asked.out.rglob("*") if x.is_file()]
    size = sum(x.stat().st_size for x in files) / 1e6
    print(f"{asked.out}: {size:.1f} MB; set PAGED_ATTN_KERNELS={asked.out.absolute()}")


def arch_named(name: str) -> str:
    """`sm_90`, `sm_90a` and `sm90` as `sm90`; AMD's `gfx942` as it is."""
    if found := re.fullmatch(r"sm_?(\d{2,3})a?", name):
        return f"sm{found[1]}"
    if re.fullmatch(r"gfx\w+", name):
        return name
    raise ValueError(f"expected --arch to be such as sm_90 or gfx942, got {name}")


def _compiler() -> Any:
    for backend in backends():
        if backend.unsupported() is None and (compiler := backend.compiler()) is not None:
            return compiler
    raise ValueError("nothing compiles here: install triton (pip install triton), for GPUs of both"
                     " makers; a GPU is not needed")  # fmt: skip


def _read(asked: argparse.Namespace) -> tuple[list[Any], Sizes]:
    model = read_model(asked.model, asked.tensor_parallel_size)
    dtype = model.dtype if asked.dtype is None else dtype_named(asked.dtype)
    kv_dtype = dtype
    if asked.kv_cache_dtype != "auto":
        kv_dtype = dtype_named(FLOAT8.get(asked.kv_cache_dtype, asked.kv_cache_dtype))
    length = asked.max_model_len or model.max_length
    given = asked.page_size, asked.max_num_seqs, asked.max_num_batched_tokens, length
    if min(given) < 1:
        raise ValueError(f"expected sizes of at least 1, got {min(given)}")
    if dtype not in FLOAT:
        raise ValueError(f"expected --dtype to be a float of 16 or 32 bits, got {dtype}")
    return model.layers, Sizes(dtype, kv_dtype, *given)
