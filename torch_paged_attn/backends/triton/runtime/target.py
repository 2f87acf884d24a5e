"""The GPU on which a call runs, and its capabilities."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator

import torch

# Triton's interpreter runs kernels on the CPU, one program after the other, in NumPy
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"

# bytes of shared memory that a program may use, on GPUs for data centres
OF_DATA_CENTRES = {"sm80": 166912, "sm87": 166912, "sm90": 232448, "sm100": 232448, "sm103": 232448}


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU, or Triton's interpreter. `arch` is `sm90`, `gfx942`, ... or `interpreter`."""

    arch: str
    multiprocessors: int
    converts_float8: bool  # if not, kernels convert by integer operations
    converts_bfloat16: bool = True  # the interpreter truncates, and multiplies the bits

    @classmethod
    def of_arch(cls, arch: str, multiprocessors: int) -> "Target":
        """An NVIDIA GPU by compute capability (`sm90`), or an AMD GPU by name (`gfx942`)."""
        if arch.startswith("gfx"):
            # gfx942 has other float8 types, with another exponent bias and without -0
            return cls(arch, multiprocessors, arch == "gfx950" or arch.startswith("gfx12"))
        return cls(arch, multiprocessors, int(arch[2:]) >= 89)

    @property
    def is_hip(self) -> bool:
        return self.arch.startswith("gfx")

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel can start before the previous one ends (dependent launch)."""
        return self.arch.startswith("sm") and int(self.arch[2:]) >= 90

    @property
    def shared_memory(self) -> int | None:
        """Bytes of shared memory that a program may use; 99 KiB on GPUs for graphics. None if it is
        not an NVIDIA GPU.
        """
        if not self.arch.startswith("sm"):
            return None
        return OF_DATA_CENTRES.get(self.arch, 101376)

    def smallest_chunk(self, block_m: int) -> int:
        """The least number of columns of an operand of a 16-bit matrix product whose tile has
        `block_m` rows.

        TODO: drop the 64 when Triton multiplies operands of less than 128 bytes a row right with
        the instructions of Hopper's warpgroups, which take 64 rows (3.6 does not).
        """
        return 64 if self.arch in ("sm90", "sm100") and block_m >= 64 else 16


@functools.cache
def _of_gpu(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip is not None:
        arch = properties.gcnArchName.partition(":")[0]
    else:
        arch = f"sm{properties.major}{properties.minor}"
    return Target.of_arch(arch, properties.multi_processor_count)


_assumed: Target | None = None


@contextlib.contextmanager
def assume(target: Target) -> Iterator[None]:
    """In this context, `target_of` returns `target` for every device: to compile for other GPUs."""
    global _assumed
    before, _assumed = _assumed, target
    try:
        yield
    finally:
        _assumed = before


def assumed() -> Target | None:
    """The target of the innermost `assume`, or None."""
    return _assumed


def target_of(device: torch.device) -> Target:
    if _assumed is not None:
        return _assumed
    if INTERPRETED:
        return Target("interpreter", 4, converts_float8=False, converts_bfloat16=False)
    return _of_gpu(device.index if device.index is not None else torch.cuda.current_device())


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`; ten times as fast as Triton's function."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def cdiv(n: int, size: int) -> int:
    """`n / size`, rounded up. Triton's function of this name takes 1.4 us."""
    return -(-n // size)


def is_even(n: int) -> bool:
    """Whether a number is a power of two."""
    return n & (n - 1) == 0
