"""Compile, for chips that are not here, what calls would launch there, and read the result.

    python tests/helpers/cross_compile.py [sm90 gfx942 ...] [--only REGEX] [--processes N]
                                         [--json FILE]

The calls are in `compiled_calls.py`. Tiles, specialisations and compiler options are those of a
launch, because a launch is what happens, up to the point where a kernel would be loaded.
"""

import argparse
import collections
import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import os
import re
import struct
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from compiled_calls import BACKWARD, BACKWARDS, CALLS, INVARIANT, attention
from processes import workers

from torch_paged_attn.testing import Problem

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

# latents of whole sequences, 512 numbers with scales by column
LATENTS_BY_COLUMN = (
    *(
        "mla/decode_columns/bf16",
        "mla/decode_h8_columns/bf16",
        "mla/prefill_columns/bf16",
        "mla/prefill_columns/f16",
    ),
    "deepseek_mla/latent_columns/bf16",
)

# The same for calls that are known to take more: the tiles of sm90 were timed, and are faster than
# smaller ones that spill less, with a bias or dropout too, and in a backward.
KNOWN = {
    ("sm90", "d128/guessed_narrow/bf16"): 192,
    # TODO: rows of 576 numbers in tiles that fit into gfx1100's registers
    ("gfx1100", "selected/dsa_128_heads/bf16"): 1408,
    ("gfx1201", "deepseek_v3_2/latent_e4m3/bf16"): 512,
    ("gfx1100", "deepseek_v3_2/latent_e4m3/bf16"): 1408,
    ("gfx1100", "select_keys/blocks/f32"): 128,
    # TODO: the same for scales by column; these are slow there
    ("gfx1100", "deepseek_v3_2/rows_of_656_bytes/bf16"): 11264,
    ("gfx1100", "selected/columns/f16"): 7424,
    ("gfx1201", "deepseek_v3_2/rows_of_656_bytes/bf16"): 960,
    ("gfx1201", "selected/columns/f16"): 2560,
    **dict.fromkeys([("gfx1100", name) for name in LATENTS_BY_COLUMN], 1408),
    **dict.fromkeys([("gfx1201", name) for name in LATENTS_BY_COLUMN], 384),
    ("gfx1100", "latent/columns/f32"): 64,
    ("gfx1100", "latent/sparse_columns/f16"): 256,
    ("gfx1201", "latent/columns/f32"): 64,
    # TODO: gradients of lists in tiles that fit into AMD's registers: no tile of 16 or 32 rows and
    # keys with 4, 8 or 16 warps does
    ("gfx90a", "backward/selected/single_latents/bf16"): 448,
    ("gfx942", "backward/selected/single_latents/bf16"): 128,
    ("gfx950", "backward/selected/single_latents/bf16"): 64,
    ("gfx1100", "backward/selected/single_latents/bf16"): 6912,
    ("gfx1201", "backward/selected/single_latents/bf16"): 2432,
    ("gfx1100", "backward/selected/single_keys/bf16"): 1152,
    ("gfx1100", "backward/selected/m3_training/bf16"): 64,
    ("gfx1100", "backward/selected/m3_training/f16"): 320,
    ("gfx1100", "backward/selected/groups_of_4/bf16"): 384,
    ("gfx1100", "backward/nsa/selected_blocks/f16"): 768,
    # TODO: bool masks in tiles that fit into registers of gfx1100 and gfx1201, whose tables have
    # none of their own
    ("gfx1100", "d192/prefill_mask/bf16"): 212,
    ("gfx1201", "d192/prefill_mask/bf16"): 356,
    ("gfx1100", "backward/d192/mask/bf16"): 100,
    ("gfx1201", "backward/d128/mask/bf16"): 36,
    ("gfx1201", "backward/d192/mask/bf16"): 36,
    ("sm90", "d128/guessed_wide/bf16"): 192,
    ("sm90", "d128/prefill_full/bf16"): 128,
    # tiles that spill less are slower: 2 x 4,096 tokens, 32/8 heads, 825 us; 128 keys, two stages
    # (312 bytes) 962, 32 keys (56 bytes) 951; 8 x 1,024 308, 374, 328
    ("sm90", "d128/prefill_bias/bf16"): 1184,
    ("sm90", "d128/prefill_mask/bf16"): 1024,
    # tiles of 64 keys, which spill nothing, leave twice as many parts: 7.5 ms for M3, not 4.2
    ("sm90", "backward/selected/groups_of_4/bf16"): 192,
    ("sm90", "backward/selected/m3_training/f16"): 128,
    # before their loops they look which tiles the mask shows: 136 and 208 without. Under a causal
    # mask, 2 x 2,048 tokens, 16 heads, 0.90 and 1.34 ms; without 1.39 and 2.28
    ("sm90", "backward/d128/mask/bf16"): 176,
    ("sm90", "backward/d192/mask/bf16"): 256,
    ("sm90", "deepseek_mla/decode/bf16"): 128,
    ("sm90", "d128/prefill_dropout/bf16"): 128,
    ("sm90", "phi3_small/local_strided/bf16"): 128,
    ("sm90", "d64/prefill_bias/bf16"): 128,
    ("sm90", "d256/prefill_softcap/bf16"): 256,
    ("sm90", "vllm/tokens_int8/bf16"): 320,
    ("sm90", "vllm/tokens_int4/bf16"): 320,
    # eight bytes more than what is left over
    ("sm80", "mla/prefill_columns/f16"): 72,
    ("gfx90a", "selected/columns/f16"): 8,
    # not timed: the tiles of calls without the argument
    ("sm90", "eagle/tree_verify/bf16"): 192,
    ("sm90", "vllm/tokens_e4m3/f16"): 192,
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
# lists of latents of 8 bits for up to 8 heads: with fewer registers for consumers than two programs
# leave them, the kernel is slower
BYTES_OF_8_HEADS = "h8", "h5_page1", "h8_slots", "h8_nothing", "h8_long"
KNOWN |= {("sm90", f"bytes_{name}"): 136 for name in BYTES_OF_8_HEADS}
KNOWN["sm90", "mla/decode_h8_columns/bf16"] = 136

# The same for a kernel, whatever the call: its accumulators fill the registers, and smaller tiles,
# which spill less, are slower.
KNOWN_KERNELS = {
    "_hopper_backward_keys_kernel": 704,
    "_hopper_backward_queries_kernel": 104,
    # of more than 32 rows of queries (docs/design/decode.md)
    "_hopper_mla_fwd_kernel": 56,
}

# memory that Triton would allocate for a kernel; AMD's has none
SCRATCH = "global", "profile"

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
    mixes_lanes: bool  # bits of one of two numbers in a register may reach the other
    repeated_factors: int  # of products, on NVIDIA's chips, with keys that lanes hold twice
    idle_barriers: int  # in shared memory of Gluon's kernels: made, and not used
    wide_loads: int  # of two or four numbers at once from memory, on NVIDIA's chips
    code: int  # bytes of machine code
    scratch: int  # bytes of memory that Triton would allocate for a program

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
        if self.mixes_lanes:
            found.append("one of two numbers in a register that overflows into the other")
        if self.repeated_factors:
            found.append(f"{self.repeated_factors} factors of products whose lanes repeat numbers")
        if self.idle_barriers:
            found.append(f"{self.idle_barriers} barriers that are not used, in others' room")
        if call in INVARIANT and self.fused > 0:
            # which of two it takes differs from row to row of a tile
            found.append(f"{self.fused} sums whose rounding is the compiler's choice")
        return found


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


def _code_bytes(elf: bytes) -> int:
    """Bytes of machine code in a compiled kernel, which is an ELF file for NVIDIA and for AMD."""
    (at,) = struct.unpack_from("<Q", elf, 0x28)
    size, count = struct.unpack_from("<HH", elf, 0x3A)
    # of each section: name, type, flags (4: it is code), address, place, bytes
    sections = [struct.unpack_from("<IIQQQQ", elf, at + size * i) for i in range(count)]
    return sum(section[5] for section in sections if section[2] & 4)


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


def mixes_lanes(ptx: str) -> bool:
    """Whether a 64-bit register of which the upper half is used is put together of two numbers, one
    of them a product of 64 bits: it belongs to the lower half, and may be longer than that.
    """
    made = dict(re.findall(r"^\s*(?:or|add)\.[bsu]64\s+(%rd\d+), (.*);", ptx, re.M))
    products = set(re.findall(r"^\s*mul\.wide\.[su]32\s+(%rd\d+),", ptx, re.M))
    halved = re.findall(r"^\s*mov\.b64\s+\{\S+, %r\d+\}, (%rd\d+);", ptx, re.M)
    return any(not products.isdisjoint(made.get(x, "").split(", ")) for x in halved)


def repeated_factors(ttgir: str) -> int:
    """How many factors of products of `mma.sync` have fewer numbers to add up than the four lanes
    of a row hold, `kWidth` each: Triton 3.6 takes some of them twice, and others by wrong columns
    (triton-lang/triton#10645).
    """
    found = re.findall(
        r"tensor<(?:\d+x)*(\d+)x(\d+)x[a-z]\w*, #ttg\.dot_op<\{opIdx = ([01]),"
        r" parent = (#\w+), kWidth = (\d+)\}>",
        ttgir,
    )
    parents = dict(re.findall(r"^(#\w+) = #ttg\.nvidia_mma<\{versionMajor = (\d)", ttgir, re.M))
    return sum(
        parents.get(parent) == "2" and int((columns, rows)[int(side)]) < 4 * int(width)
        for rows, columns, side, parent, width in set(found)
    )


def idle_barriers(ttgir: str) -> int:
    """How many groups of barriers are only initialized. Triton gives the room of what is not used
    any more to other data, and a barrier that was not invalidated may still be written: on an H200
    weights were a barrier's bits, which are NaN, in the first calls of a process.
    """
    # what partitions of warps take is in the head of `warp_specialize`, before their code
    code = ttgir.partition("partition0(")[0]
    names = collections.Counter(re.findall(r"%\w+", code))
    made = re.findall(r"(%\w+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<(?:\d+x)+i64,", code)
    initialized = set(re.findall(r"ttng\.init_barrier (%\w+),", code))
    parts = re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", code)
    only = [group for part, group in parts if part in initialized and names[part] == 2]
    return sum(names[group] == 1 + only.count(group) for group in made)


def _read(arch: str, name: str, binary) -> Kernel:
    scalar_spills = fused = repeated = idle = 0
    parts_threads = lanes_mix = False
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
        lanes_mix = mixes_lanes(text)
        repeated = repeated_factors(binary.asm["ttgir"])
        idle = idle_barriers(binary.asm["ttgir"])
    # Gluon's kernels begin further down
    code = binary.asm.get("ttir") or binary.asm["ttgir"]
    is_float32 = not re.search(r"(tt\.dot|warp_group_dot) .*x(bf16|f16|f8E\w+)", code)
    count = len(re.findall(CHIPS[arch][4], text))
    shared = binary.metadata.shared
    own_float8 = len(re.findall(r"\bv_cvt_\w*(fp8|bf8)", text))
    return Kernel(
        *(name, registers, spills, scalar_spills, shared, count, is_float32, own_float8, fused),
        parts_threads=parts_threads,
        mixes_lanes=lanes_mix,
        repeated_factors=repeated,
        idle_barriers=idle,
        code=_code_bytes(binary.asm["hsaco" if arch.startswith("gfx") else "cubin"]),
        scratch=sum(getattr(binary.metadata, f"{kind}_scratch_size", 0) for kind in SCRATCH),
        wide_loads=len(re.findall(r"\bld\.global\.\S*v[24]\.|cp\.async\.\S*, (?:8|16)\b", text)),
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
                attention(problem)()
    finally:
        JITFunction.run = run
    return {name: len(found) for name, found in keys.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("arch", nargs="*", help=f"of {', '.join(CHIPS)}; all without one")
    parser.add_argument("--only", default="", help="calls in whose name this is found")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--json", type=Path, help="a file for all that was read of the kernels")
    options = parser.parse_args()
    names = [name for name in CALLS if re.search(options.only, name)]
    failed, read = 0, []
    for arch in options.arch or CHIPS:
        with workers(options.processes) as pool:
            done = pool.map(functools.partial(compile_call, arch), names)
            for name, kernels in zip(names, done, strict=True):
                for kernel in kernels:
                    faults = kernel.faults(arch, name)
                    failed += bool(faults)
                    read.append({"chip": arch, "call": name, **dataclasses.asdict(kernel)})
                    print(
                        f"{arch:7} {name:34} {kernel.name:26} {kernel.registers:3} registers"
                        f" {kernel.spills:4} bytes and"
                        f" {kernel.scalar_spills:3} scalars spilled {kernel.shared:6} shared"
                        f" {kernel.matrix_instructions:4} matrix  {'; '.join(faults)}",
                        flush=True,
                    )
    if options.json:
        options.json.write_text(json.dumps(read, indent=0))
    print(f"{len(names) * len(options.arch or CHIPS)} calls, {failed} kernels at fault")
    raise SystemExit(failed > 0)


if __name__ == "__main__":
    main()
