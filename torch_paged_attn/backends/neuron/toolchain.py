"""Which NKI the kernels are written in: the `nki` package, or the emulator where the user asks.

`PAGED_ATTN_NEURON_EMULATE=1`, read when this module is imported, runs the kernels on NumPy
(`testing/nki_emulator`), for trying things without a chip. What PyPI has under Neuron's names are
stubs that raise when they are imported, so that only importing tells what is installed.
"""

import importlib
import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EMULATED = os.environ.get("PAGED_ATTN_NEURON_EMULATE", "0") == "1"
OLDEST = (0, 3)  # dst-first instructions, `accumulate=`, buffers as objects

if EMULATED:
    from torch_paged_attn.testing.nki_emulator import nisa, nl
else:
    try:
        import nki.isa as nisa  # type: ignore[no-redef]
        import nki.language as nl  # type: ignore[no-redef]
    except ImportError:
        nisa = nl = None  # type: ignore[assignment]


def _import(name: str) -> Any:
    """The module, or None; the stubs' errors are ImportErrors too."""
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _version(module: Any) -> tuple[int, ...]:
    parts = str(getattr(module, "__version__", "0")).split(".")[:2]
    return tuple(int(p) if p.isdigit() else 0 for p in parts)


def missing() -> str | None:
    """Why the kernels cannot run here, or None."""
    if EMULATED:
        return None
    package = _import("nki")
    if package is None:
        if _import("neuronxcc.nki") is not None:
            return (
                "only neuronxcc.nki is installed, which current Neuron SDKs no longer run;"
                " install the nki package (SDK 2.29 or newer)"
            )
        return (
            "nki is not installed (PyPI's package of that name is a stub): install nki and"
            " neuronx-cc from the Neuron package repository"
        )
    if not hasattr(package, "jit") or _version(package) < OLDEST:
        found = getattr(package, "__version__", "without nki.jit")
        return f"nki {found} is installed; 0.3 or newer is needed (SDK 2.29)"
    if _import("neuronxcc") is None:
        return "neuronx-cc, the compiler that nki needs, is not installed"
    return None


def launch(kernel: Callable, *args: Any) -> Any:
    """Run `kernel` on tensors and plain values; a contiguous tensor it writes changes in place."""
    args = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in args)
    if EMULATED:
        return _emulate(kernel, args)
    reason = missing()
    if reason is not None:
        raise NotImplementedError(f"paged_attn: Neuron: {reason}")
    return importlib.import_module("nki").jit(kernel)[num_programs()](*args)


def num_programs() -> int:
    """Physical cores of one logical NeuronCore, as the runtime is configured."""
    return int(os.environ.get("NEURON_LOGICAL_NC_CONFIG", "1"))


def _emulate(kernel: Callable, args: tuple) -> Any:
    from torch_paged_attn.testing.nki_emulator import simulate

    results = simulate(kernel, num_programs())(*(_to_numpy(a) for a in args))
    if isinstance(results, tuple):
        return tuple(_to_torch(r) for r in results)
    return _to_torch(results)


def _to_numpy(value: Any) -> Any:
    """The same memory; NumPy has no bfloat16 nor float8 of its own."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.float8_e5m2:
        return value.view(torch.int8).numpy().view(nl.float8_e5m2)
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(nl.bfloat16)
    return value.numpy()


def _to_torch(array: Any) -> Tensor:
    if array.dtype == nl.bfloat16:
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
