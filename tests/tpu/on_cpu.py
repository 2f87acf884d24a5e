"""How JAX runs here: to be called before it is imported."""

import os


def choose_cpu() -> None:
    """On the CPU; each program is compiled once and runs once, so that optimising it would take
    longer than it saves.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    )
