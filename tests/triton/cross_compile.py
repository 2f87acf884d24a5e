"""Compile, for chips that are not here, what calls would launch there, and read what came out.

    python tests/triton/cross_compile.py [sm90 gfx942 ...] [--only SUBSTRING] [--processes N]

The calls are the named problems, those of `MORE`, the backward of those that have one and of
`BACKWARD`, and every kind of cache write, merge and look-up of slots. Tiles, specialisations and
compiler options are those of a launch, because a launch is what happens, up to the point where a
kernel would be loaded.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import importlib.metadata
import multiprocessing
import os
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from dispatched import dispatched

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backward_call import arguments as backward_arguments
from torch_paged_attn.testing import (
    EXTENDED,
    EXTENDED_DIFFERENTIABLE,
    PROBLEMS,
    Layout,
    Problem,
    build,
)
from torch_paged_attn.testing.training_problems import DIFFERENTIABLE

# backend, architecture and warp size as Triton names them; bytes of shared memory (LDS) a program
# may have; what its matrix instructions are called
MMA = r"\bmma\.sync"
CHIPS = {
    "sm80": ("cuda", 80, 32, 166912, MMA),
    "sm86": ("cuda", 86, 32, 101376, MMA),
    "sm90": ("cuda", 90, 32, 232448, rf"\bwgmma\.mma_async|{MMA}"),
    "sm100": ("cuda", 100, 32, 232448, rf"\btcgen05\.mma|{MMA}"),
    "sm120": ("cuda", 120, 32, 101376, MMA),
    "gfx90a": ("hip", "gfx90a", 64, 65536, r"\bv_mfma_"),
    "gfx942": ("hip", "gfx942", 64, 65536, r"\bv_mfma_"),
    "gfx950": ("hip", "gfx950", 64, 163840, r"\bv_mfma_"),
    "gfx1100": ("hip", "gfx1100", 32, 65536, r"\bv_wmma_"),
    "gfx1201": ("hip", "gfx1201", 32, 65536, r"\bv_wmma_"),
}

# the Triton that the tables of tiles were fitted with: others spill elsewhere, which is no fault
IS_FITTED = importlib.metadata.version("triton").startswith("3.6.")

# Bytes of memory a thread may have for what its registers do not hold: none on AMD chips. NVIDIA's
# compiler leaves over a few values that live from the first to the last line of a kernel.
LEFT_OVER = {"cuda": 64, "hip": 0}

# The same for calls that are known to take more: the tiles of sm90 were timed, and are faster than
# smaller ones that spill less, with a bias or dropout too, and in a backward.
KNOWN = {
    ("sm90", "d128/guessed_narrow/bf16"): 192,
    ("sm90", "d128/guessed_wide/bf16"): 192,
    ("sm90", "d128/prefill_full/bf16"): 128,
    ("sm90", "d128/prefill_bias/bf16"): 320,
    ("sm90", "deepseek_mla/decode/bf16"): 128,
    ("sm90", "d128/prefill_dropout/bf16"): 128,
    ("sm90", "phi3_small/local_strided/bf16"): 128,
    ("sm90", "d64/prefill_bias/bf16"): 128,
    ("sm90", "d256/prefill_softcap/bf16"): 256,
    # not timed: the tiles of calls without the argument
    ("sm90", "eagle/tree_verify/bf16"): 192,
    ("sm90", "backward/training/long/bf16"): 128,
    ("sm90", "backward/tiny_head/bf16"): 128,
    ("sm90", "backward/d64/causal/bf16"): 128,
    ("sm90", "backward/d64/everything/bf16"): 128,
    ("sm90", "backward/training/mqa_window/f16"): 384,
    ("sm90", "backward/training/gpt_oss/bf16"): 384,
    ("sm90", "backward/llama3_8b/prefill_ragged/bf16"): 448,
    ("sm90", "backward/training/head_dim_80/bf16"): 128,
    ("sm90", "backward/d128/causal/bf16"): 448,
    ("sm90", "backward/d128/full/bf16"): 192,
}

# The same for a kernel, whatever the call: its accumulators fill the registers, and smaller tiles,
# which spill less, are slower.
KNOWN_KERNELS = {
    "_hopper_backward_keys_kernel": 704,
    "_hopper_backward_queries_kernel": 104,
    # of more than 32 rows of queries (notes/gpu.md, "Keys of 8 bits")
    "_hopper_mla_bytes_fwd_kernel": 56,
}

FLOATS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
EIGHT_BITS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}

# what the names of backward's calls begin with
BACKWARDS = "backward/"

bf16, f32 = torch.bfloat16, torch.float32
PREFILL = ((200, 72), (130, 0))
DECODE = ((1, 500), (1, 90))
SOME, MANY = ((1, 2500), *[(1, 9)] * 19), [(1, 5)] * 520
LONG = ((1, 5000), *[(1, 9)] * 5)
# several queries a sequence, as for tokens that were guessed: more than 16 rows for a KV head
GUESSED, MANY_GUESSED = ((8, 2500), *[(8, 9)] * 39), [(8, 5)] * 520

OF_INT8 = {"dtype": bf16, "kv_dtype": torch.int8, "descale": "heads"}

# what is said of the longest sequence's keys
SAID = {
    "d128/said_few_near/bf16": 512,
    "d128/said_few/bf16": 4096,
    "d128/said_few_once/bf16": 16384,
    "d128/said_several_near/bf16": 512,
    "d128/said_several_once/bf16": 2048,
    "d128/said_several/bf16": 8192,
    "d128/said_some_next/bf16": 512,
    "d128/said_some_near/bf16": 1024,
    "d128/said_some_mid/bf16": 4096,
    "d128/said_some/bf16": 8192,
    "d128/said_wave_next/bf16": 512,
    "d128/said_wave_mid/bf16": 1024,
    "d128/said_wave/bf16": 8192,
    "d128/said_several_once/kv_int8": 2048,
    "d128/said_several/kv_int8": 8192,
    "d64/said_several_near/bf16": 512,
    "d64/said_several/bf16": 4096,
    "d64/said_few_near/bf16": 512,
    "d64/said_some/bf16": 512,
    "d64/said_wave/bf16": 512,
    "d64/said_several/kv_int8": 4096,
}

# what the named problems leave out of the sizes and options that choose a kernel's tiles
MORE = {
    p.name: p
    for p in (
        Problem("d128/prefill_wide_pages/bf16", PREFILL, 8, 2, 128, dtype=bf16, page_size=128),
        Problem("d128/prefill_full/bf16", PREFILL, 8, 2, 128, dtype=bf16, causal=False),
        Problem("d128/prefill_bias/bf16", PREFILL, 8, 2, 128, dtype=bf16, bias="float"),
        Problem("d128/prefill_alibi/bf16", PREFILL, 8, 2, 128, dtype=bf16, alibi="heads"),
        Problem("d128/prefill_dropout/bf16", PREFILL, 8, 2, 128, dtype=bf16, dropout_p=0.1),
        Problem(
            "d128/prefill_layout/bf16", PREFILL, 8, 2, 128, dtype=bf16, layout=Layout(heads="kv")
        ),
        Problem("d256/prefill/bf16", PREFILL, 8, 2, 256, dtype=bf16, page_size=16),
        Problem("d256/prefill/f32", PREFILL, 8, 2, 256, dtype=f32, page_size=16),
        Problem("d256/decode/bf16", DECODE, 8, 2, 256, dtype=bf16, page_size=16),
        Problem("d64/decode/bf16", DECODE, 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/prefill_bias/bf16", PREFILL, 8, 2, 64, dtype=bf16, bias="float"),
        Problem("d256/prefill_softcap/bf16", PREFILL, 8, 2, 256, dtype=bf16, softcap=30.0),
        Problem("d256/latent/bf16", PREFILL, 1, 1, 256, dtype=bf16, page_size=256, latent=True),
        Problem("d512/decode/f32", DECODE, 8, 2, 512, dtype=f32, page_size=16),
        Problem("d128/decode_packed/bf16", DECODE, 8, 2, 128, dtype=bf16),
        Problem("d128/decode_few_medium/bf16", ((1, 3000),), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/decode_few_long/bf16", ((1, 5000),), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/decode_some_narrow/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/decode_some_wide/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=64),
        Problem("d128/decode_many/bf16", tuple(MANY), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_few_near/bf16", DECODE, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_few/bf16", ((1, 3000),), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_few_once/bf16", ((1, 9000),), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_several_near/bf16", SOME[:6], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_several_once/bf16", SOME[:6], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_several/bf16", LONG, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_some_next/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_some_near/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_some_mid/bf16", SOME, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_some/bf16", (*LONG, *SOME), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_wave_next/bf16", SOME * 2, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_wave_mid/bf16", SOME * 2, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_wave/bf16", (*LONG, *SOME * 2), 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/said_several_once/kv_int8", SOME[:6], 8, 2, 128, page_size=16, **OF_INT8),
        Problem("d128/said_several/kv_int8", LONG, 8, 2, 128, page_size=16, **OF_INT8),
        Problem("d64/said_several_near/bf16", SOME[:6], 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/said_several/bf16", SOME[:6], 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/said_few_near/bf16", DECODE, 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/said_several/kv_int8", SOME[:6], 8, 2, 64, page_size=16, **OF_INT8),
        Problem("d64/said_wave/bf16", SOME * 2, 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/said_some/bf16", SOME[1:], 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/decode_many/bf16", tuple(MANY), 8, 2, 64, dtype=bf16, page_size=16),
        Problem("d64/decode/kv_int8", tuple(MANY), 8, 2, 64, page_size=16, **OF_INT8),
        Problem("d64/decode_several/kv_int8", SOME[:6], 8, 2, 64, page_size=16, **OF_INT8),
        Problem("d64/decode_few/kv_int8", DECODE, 8, 2, 64, page_size=16, **OF_INT8),
        Problem("d128/decode_few/kv_int8", DECODE, 8, 2, 128, page_size=16, **OF_INT8),
        Problem("d128/decode_many/kv_int8", tuple(MANY), 8, 2, 128, page_size=16, **OF_INT8),
        Problem("d128/guessed_narrow/bf16", GUESSED, 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/guessed_wide/bf16", GUESSED, 8, 2, 128, dtype=bf16, page_size=64),
        Problem("d128/guessed_few/bf16", GUESSED[:20], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/guessed_short/bf16", GUESSED[1:], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d128/guessed_few_short/bf16", GUESSED[1:21], 8, 2, 128, dtype=bf16, page_size=16),
        Problem("d256/guessed_few/bf16", GUESSED[:2], 4, 2, 256, dtype=bf16, page_size=16),
        Problem("d256/guessed_several/bf16", GUESSED[:8], 4, 2, 256, dtype=bf16, page_size=16),
        Problem("d128/guessed_many/bf16", tuple(MANY_GUESSED), 8, 2, 128, dtype=bf16, page_size=16),
        Problem(
            "d128/guessed/kv_int8",
            GUESSED,
            8,
            2,
            128,
            dtype=bf16,
            page_size=16,
            kv_dtype=torch.int8,
            descale="heads",
        ),
        # few keys are the portable kernel's, on Hopper too
        Problem(
            "mla/decode/bf16",
            ((1, 600), (2, 64), (1, 0)),
            16,
            1,
            576,
            512,
            dtype=bf16,
            page_size=64,
            cache_layout="mla",
        ),
        Problem(
            "mla/prefill/bf16",
            PREFILL,
            16,
            1,
            576,
            512,
            dtype=bf16,
            page_size=64,
            cache_layout="mla",
        ),
        *(
            Problem(
                f"d128/decode/kv_{name}",
                SOME,
                8,
                2,
                128,
                dtype=bf16,
                page_size=16,
                kv_dtype=dtype,
                descale="heads",
            )
            for name, dtype in EIGHT_BITS.items()
        ),
    )
}

# options that no kernel of a backward has more of
EVERYTHING = {
    "bias": "float",
    "bias_heads": "all",
    "softcap": 5.0,
    "alibi": "heads",
    "dropout_p": 0.1,
    "window_size_left": 50,
    "sinks": True,
}

# the sizes and options that choose a backward's tiles
BACKWARD = {
    p.name: p
    for p in (
        *(
            Problem(f"d{d}/{kind}/{name}", PREFILL, 4, 2, d, head_dim_v, dtype=dtype, **options)
            for d, head_dim_v in ((64, 64), (128, 128), (256, 256), (576, 512))
            for name, dtype in (("bf16", bf16), ("f32", f32))
            for kind, options in (
                ("causal", {}),
                ("full", {"causal": False}),
                ("everything", EVERYTHING),
                ("one_bias", EVERYTHING | {"bias_heads": "one"}),
            )
        ),
        Problem("d128/layout/f16", PREFILL, 8, 2, 128, dtype=torch.float16, layout=Layout()),
    )
}


# what shared memory of 99 KiB does not hold, and is refused by name
REFUSED = {
    (arch, f"{BACKWARDS}{name}")
    for arch in ("sm86", "sm120")
    for name in BACKWARD
    if name.startswith("d576/") and name.endswith("/f32")
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """What one compiled kernel takes. `spills`: bytes of stack, scratch and local memory. Scalar
    registers of AMD chips are spilled to lanes of vector registers, which costs no memory.
    """

    name: str
    registers: int
    spills: int
    scalar_spills: int
    shared: int
    matrix_instructions: int
    is_float32: bool  # its products run on the plain units
    own_float8: int  # instructions that convert to or from float8, in the chip's sense of it
    fused: int  # products that the compiler fused with sums without being asked, on NVIDIA's chips
    parts_threads: bool  # by a clock that each of them reads

    def faults(self, arch: str, call: str) -> list[str]:
        """What a chip would not forgive, in words."""
        backend, _, _, room, _ = CHIPS[arch]
        found = []
        most = KNOWN_KERNELS.get(self.name, KNOWN.get((arch, call), LEFT_OVER[backend]))
        if IS_FITTED and self.spills > most:
            found.append(f"{self.spills} bytes spilled")
        if self.shared > room:
            found.append(f"{self.shared} bytes of shared memory, of {room}")
        if "attention" in self.name and not self.is_float32 and not self.matrix_instructions:
            found.append("no matrix instruction")
        if self.own_float8 and arch == "gfx942":
            found.append("float8 in the chip's own format, which is not OCP's")
        if self.parts_threads:
            # some would leave a loop while the others wait for them in it
            found.append("a branch by a clock that each thread reads for itself")
        if call in INVARIANT and self.fused > 0:
            # which of two it takes differs from row to row of a tile
            found.append(f"{self.fused} sums whose rounding is the compiler's choice")
        return found


def _attention(problem: Problem) -> Callable[[], None]:
    from torch_paged_attn.backends.triton import BACKEND

    call = build(problem)
    said = {"max_seqlen_k": SAID[problem.name]} if problem.name in SAID else {}
    args, options = dispatched(call.op, call.args | said)
    return functools.partial(BACKEND.function(call.op), *args, **options)


def _backward(problem: Problem) -> Callable[[], None]:
    """The backward of a problem's call, whose values matter to nobody."""
    from torch_paged_attn.backends.triton import BACKEND

    call = build(problem)
    args, options = dispatched(call.op, call.args)
    forward = getattr(AttentionCall, call.op)(*args, **options)
    out, lse = forward.new_results()
    given = forward.given() | {"dout": out, "dlse": lse, "out": out, "softmax_lse": lse}
    op = f"{call.op}_backward"
    listed = backward_arguments(op)
    args = [given[x.name] for x in listed if not x.keyword_only]
    options = {x.name: given[x.name] for x in listed if x.keyword_only and x.name in given}
    return functools.partial(BACKEND.function(op), *args, **options)


def _cache_write(source: torch.dtype, stored: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.reshape_and_cache import reshape_and_cache

    new = torch.zeros(9, 8, 128, dtype=source)
    cache = torch.zeros(2, 4, 8, 16, 128).to(stored)
    scale = torch.ones(8) if stored.itemsize == 1 else None
    slots = torch.arange(9)
    return lambda: reshape_and_cache(new, new, cache, slots, scale, scale)


def _merge(dtype: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.merge_states import merge_states

    out, lse = torch.zeros(9, 8, 128, dtype=dtype), torch.zeros(8, 9)
    return lambda: merge_states(out, lse, out, lse)


def _merge_list(dtype: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.merge_states import merge_states_list

    out, lse = torch.zeros(9, 8, 128, dtype=dtype), torch.zeros(8, 9)
    return lambda: merge_states_list([out] * 3, [lse] * 3)


def _merge_remote(dtype: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.merge_remote import Slots, merge_remote

    out, lse, numbers = torch.zeros(9, 8, 128), torch.zeros(8, 9), torch.zeros(9, dtype=torch.int32)
    slots = [torch.zeros(Slots.of(4, 18, 128).elements)] * 4
    flags = [torch.zeros(Slots.of(4, 18, 128).flags, dtype=torch.int32)] * 4
    options = {"rank": 1, "out_dtype": dtype, "seconds": 1.0}
    return lambda: merge_remote(out, lse, numbers, numbers, slots, flags, **options)


def _merge_backward(dtype: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.merge_states_backward import merge_states_backward

    out, lse = torch.zeros(9, 8, 128, dtype=dtype), torch.zeros(8, 9)
    return lambda: merge_states_backward(out, lse, out, lse, out, lse, out, lse)


def _append_slots(bounds: list[int] | None) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.append_slots import append_slots

    seqlens, table = torch.zeros(9, dtype=torch.int32), torch.zeros(9, 4, dtype=torch.int32)
    cu_seqlens = None if bounds is None else torch.tensor(bounds, dtype=torch.int32)
    return lambda: append_slots(seqlens, table, cu_seqlens, 16, 18)


def _append_and_attend(stored: torch.dtype) -> Callable[[], None]:
    from torch_paged_attn.backends.triton.append_and_attend import append_and_attend

    q, new = torch.zeros(40, 1, 8, 128, dtype=bf16), torch.zeros(40, 1, 2, 128, dtype=bf16)
    cache, table = torch.zeros(80, 16, 2, 128).to(stored), torch.zeros(40, 4, dtype=torch.int32)
    scales = (None, *[torch.ones(2)] * 2) if stored.itemsize == 1 else ()
    return lambda: append_and_attend(q, cache, cache, new, new, table[:, 0], table, *scales)


def _calls() -> dict[str, Callable[[], Callable[[], None]]]:
    problems = PROBLEMS | MORE | EXTENDED
    calls = {name: functools.partial(_attention, problems[name]) for name in problems}
    backwards = DIFFERENTIABLE | BACKWARD | EXTENDED_DIFFERENTIABLE
    calls |= {
        f"{BACKWARDS}{name}": functools.partial(_backward, backwards[name]) for name in backwards
    }
    for name, dtype in FLOATS.items():
        calls[f"merge_states_backward/{name}"] = functools.partial(_merge_backward, dtype)
        calls[f"merge_states/{name}"] = functools.partial(_merge, dtype)
        calls[f"merge_states/list/{name}"] = functools.partial(_merge_list, dtype)
        calls[f"merge_remote/{name}"] = functools.partial(_merge_remote, dtype)
        for stored_name, stored in {name: dtype, **EIGHT_BITS}.items():
            write = functools.partial(_cache_write, dtype, stored)
            calls[f"reshape_and_cache/{name}_to_{stored_name}"] = write
    calls["append_slots/equal"] = functools.partial(_append_slots, None)
    for name, stored in {"bf16": bf16, "int8": torch.int8}.items():
        calls[f"append_and_attend/{name}"] = functools.partial(_append_and_attend, stored)
    calls["append_slots/ragged"] = functools.partial(_append_slots, list(range(0, 20, 2)))
    return calls


CALLS = _calls()

# calls of which the bits of a row do not depend on the others
INVARIANT = {n for n, problem in (PROBLEMS | MORE | EXTENDED).items() if problem.batch_invariant}


def _local_memory(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of a kernel for NVIDIA."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [tool, "-res-usage", file.name]
        usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+).* LOCAL:(\d+)", usage).groups()
    return int(registers), int(stack) + int(local)


def _fused(ptx: str, llvm: str) -> int:
    """How many products are fused with sums in PTX beyond those that LLVM's code asks for (some of
    which are in branches that PTX does without).
    """
    asked = re.findall(r"call .*@llvm\.(?:nvvm\.)?fma(?:\.v(\d+))?", llvm)
    return max(len(re.findall(r"\bfma\.rn\.\S*f32\b", ptx)) - sum(int(n or 1) for n in asked), 0)


def _parts_threads(ptx: str) -> bool:
    """Whether a branch depends on a clock by way of registers alone. What has been through memory
    is the same for all threads.
    """
    lines = [re.sub(r"^@!?%p\d+\s+(?!bra)", "", line.strip()) for line in ptx.splitlines()]
    own: set[str] = set()
    while True:
        known = len(own)
        for line in lines:
            to, *sources = re.findall(r"%[a-z]+\d+", line) or [""]
            if line.startswith("@"):
                if to in own:
                    return True
            elif "%globaltimer" in line or (
                not line.startswith(("ld.", "st.", "atom.")) and not own.isdisjoint(sources)
            ):
                own.add(to)
        if len(own) == known:
            return False


def _read(arch: str, name: str, binary) -> Kernel:
    scalar_spills = fused = 0
    parts_threads = False
    if arch.startswith("gfx"):
        text = binary.asm["amdgcn"]

        def number(key: str) -> int:
            return int(re.search(rf"\.{key}:\s+(\d+)", text)[1])

        registers = number("vgpr_count")
        spills = number("private_segment_fixed_size") + 4 * number("vgpr_spill_count")
        scalar_spills = number("sgpr_spill_count")
    else:
        text = binary.asm["ptx"]
        registers, spills = _local_memory(binary.asm["cubin"])
        fused = _fused(text, binary.asm["llir"])
        parts_threads = "%globaltimer" in text and _parts_threads(text)
    # Gluon's kernels begin further down
    code = binary.asm.get("ttir") or binary.asm["ttgir"]
    is_float32 = not re.search(r"(tt\.dot|warp_group_dot) .*x(bf16|f16|f8E\w+)", code)
    count = len(re.findall(CHIPS[arch][4], text))
    shared = binary.metadata.shared
    own_float8 = len(re.findall(r"\bv_cvt_\w*(fp8|bf8)", text))
    return Kernel(
        *(name, registers, spills, scalar_spills, shared, count, is_float32, own_float8, fused),
        parts_threads=parts_threads,
    )


@contextlib.contextmanager
def elsewhere(arch: str) -> Iterator[None]:
    """Within it, this machine has such a chip, as far as compiling asks."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.driver import GPUDriver
    from triton.runtime.driver import driver

    from torch_paged_attn.backends.triton.runtime.target import Target, assume

    class Elsewhere(GPUDriver):
        def __init__(self):
            self.get_current_device = lambda: arch
            self.get_current_stream = lambda device: 0

        def get_current_target(self):
            return GPUTarget(*CHIPS[arch][:3])

        is_active = map_python_to_cpp_type = get_active_torch_device = get_benchmarker = None

    driver.set_active(Elsewhere())
    with assume(Target.of_arch(arch, 128)):
        yield


def compile_call(arch: str, name: str) -> list[Kernel]:
    """The kernels that a call launches on a chip. In a process where Triton does not interpret."""
    from triton.runtime.jit import JITFunction

    kernels, launch = [], JITFunction.run

    def compile_only(kernel, *args, grid, warmup, **kwargs):
        binary = launch(kernel, *args, grid=grid, warmup=True, **kwargs)
        kernels.append(_read(arch, kernel.__name__, binary))
        return binary

    JITFunction.run = compile_only
    try:
        with elsewhere(arch):
            CALLS[name]()()
    finally:
        JITFunction.run = launch
    return kernels


def specialisations(arch: str, problems: list[Problem]) -> dict[str, int]:
    """How many kernels of each name the calls take on a chip; nothing is compiled."""
    from triton.runtime.jit import JITFunction, compute_cache_key

    keys: dict[str, set[str]] = {}
    run = JITFunction.run

    def note(kernel, *args, grid, warmup, **kwargs):
        *_, key_cache, _, _, bind = kernel.device_caches[arch]
        _, specialization, options = bind(*args, **kwargs, debug=False, instrumentation_mode="")
        key = compute_cache_key(key_cache, specialization, options)
        keys.setdefault(kernel.__name__, set()).add(key)

    JITFunction.run = note
    try:
        with elsewhere(arch):
            for problem in problems:
                _attention(problem)()
    finally:
        JITFunction.run = run
    return {name: len(found) for name, found in keys.items()}


def _compile_for_real() -> None:
    """Not in the interpreter, which the suite in the parent process turns on."""
    os.environ["TRITON_INTERPRET"] = "0"
    torch.set_num_threads(1)


def workers(processes: int) -> concurrent.futures.ProcessPoolExecutor:
    """Processes in which `compile_call` works: for one chip, for those of NVIDIA or for those of
    gfx9. LLVM crashes on float8 for gfx1201 in a process that has compiled for others of AMD's.
    """
    context = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(processes, context, _compile_for_real)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", nargs="*", help=f"of {', '.join(CHIPS)}; all without one")
    parser.add_argument("--only", default="", help="calls whose name contains this")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    options = parser.parse_args()
    names = [name for name in CALLS if options.only in name]
    failed = 0
    for arch in options.arch or CHIPS:
        with workers(options.processes) as pool:
            done = pool.map(functools.partial(compile_call, arch), names)
            for name, kernels in zip(names, done, strict=True):
                for kernel in kernels:
                    faults = kernel.faults(arch, name)
                    failed += bool(faults)
                    print(
                        f"{arch:7} {name:34} {kernel.name:26} {kernel.registers:3} registers"
                        f" {kernel.spills:4} bytes and"
                        f" {kernel.scalar_spills:3} scalars spilled {kernel.shared:6} shared"
                        f" {kernel.matrix_instructions:4} matrix  {'; '.join(faults)}",
                        flush=True,
                    )
    print(f"{len(names) * len(options.arch or CHIPS)} calls, {failed} kernels at fault")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
