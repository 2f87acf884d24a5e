"""How JAX runs here: to be called before it is imported."""

import importlib.metadata
import os
import re

FLAGS = (
    # each program is compiled once and runs once: to optimise it would take longer than it saves
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    # without AVX2's fused multiply-add, by which XLA rounds a product in one program and not in
    # another, as its fusions come out: what has the same bits in kernels would differ
    "--xla_cpu_max_isa=AVX",
)


def choose_cpu() -> None:
    """On the CPU, by XLA's `FLAGS`."""
    flags = [*FLAGS]
    if _jaxlib() < (0, 11):  # later ones have no others, and end the process at an unknown flag
        # MLIR's fusions take half as long again to compile
        flags.append("--xla_cpu_use_fusion_emitters=false")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", " ".join(flags))


def _jaxlib() -> tuple[int, ...]:
    """Its version; nothing where there is none."""
    try:
        version = importlib.metadata.version("jaxlib")
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(x) for x in re.findall(r"\d+", version)[:2])
