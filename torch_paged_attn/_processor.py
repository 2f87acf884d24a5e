"""The processor: its model and features, read from the operating system."""

import functools
import platform
from pathlib import Path

from torch_paged_attn.ops._library import instruction_sets


@functools.cache
def facts() -> dict[str, str]:
    """Linux's /proc/cpuinfo of the first core, field name -> value; empty on other systems."""
    try:
        first, _, _ = Path("/proc/cpuinfo").read_text().partition("\n\n")
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def flags() -> set[str]:
    """The features of an x86 processor, such as `amx_bf16`, under Linux's names."""
    return set(facts().get("flags", "").split())


def family() -> str:
    """Vendor, processor family, and the instruction set that the CPU kernels use. Processors for
    which this text is equal are expected to be fast at the same things.
    """
    known = facts()
    maker = known.get("vendor_id") or known.get("CPU implementer") or platform.machine()
    number = known.get("cpu family") or known.get("CPU part") or platform.system()
    isa, _ = instruction_sets()
    return f"{maker} {number} {isa}"
