"""The chip that a call runs on, and what it can do."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterator

import torch

# the interpreter runs kernels on the CPU, program by program, in NumPy
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"


@dataclasses.dataclass(frozen=True)
class Target:
    """`arch` is `sm90`, `gfx942`, ... or `interpreter`."""

    arch: str
    multiprocessors: int
    converts_float8: bool  # elsewhere kernels take the bits apart
    converts_bfloat16: bool = True  # the interpreter truncates, and multiplies the bits

    @classmethod
    def of_arch(cls, arch: str, multiprocessors: int) -> "Target":
        """An NVIDIA chip by compute capability (`sm90`), an AMD one by its name (`gfx942`)."""
        if arch.startswith("gfx"):
            # gfx942 knows other float8 types of its own, with one exponent more and no -0
            return cls(arch, multiprocessors, arch == "gfx950" or arch.startswith("gfx12"))
        return cls(arch, multiprocessors, int(arch[2:]) >= 89)

    @property
    def is_hip(self) -> bool:
        """Whether this is an AMD chip."""
        return self.arch.startswith("gfx")

    @property
    def overlaps_launches(self) -> bool:
        """Whether a kernel can be started before the one before it has ended, to wait there."""
        return self.arch.startswith("sm") and int(self.arch[2:]) >= 90

    def smallest_chunk(self, block_m: int) -> int:
        """The narrowest operand of a product in 16 bits.

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
    """Within it, whatever device a tensor is on is that target: to compile for chips elsewhere."""
    global _assumed
    before, _assumed = _assumed, target
    try:
        yield
    finally:
        _assumed = before


def assumed() -> Target | None:
    """The target that kernels are compiled for though it is elsewhere, if any."""
    return _assumed


def target_of(device: torch.device) -> Target:
    """The target of a tensor's device."""
    if _assumed is not None:
        return _assumed
    if INTERPRETED:
        return Target("interpreter", 4, converts_float8=False, converts_bfloat16=False)
    return _of_gpu(device.index if device.index is not None else torch.cuda.current_device())


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least `n`, a tenth of the time that Triton's takes."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def is_even(n: int) -> bool:
    """Whether a number is a power of two."""
    return n & (n - 1) == 0
