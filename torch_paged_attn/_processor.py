"""What the system says of the processor."""

import functools
import platform
from pathlib import Path

import torch


@functools.cache
def facts() -> dict[str, str]:
    """The lines of Linux's /proc/cpuinfo for the first core; empty elsewhere."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def flags() -> set[str]:
    """The features of an x86 processor, by Linux's names."""
    return set(facts().get("flags", "").split())


def family() -> str:
    """A processor, as far as what is fast on one is probably fast on the other: maker and family,
    and the instruction set that the CPU kernels use.
    """
    known = facts()
    maker = known.get("vendor_id") or known.get("CPU implementer") or platform.machine()
    number = known.get("cpu family") or known.get("CPU part") or platform.system()
    return f"{maker} {number} {torch.ops.paged_attn.cpu_isa()}"
