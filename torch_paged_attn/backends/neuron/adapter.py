"""Where PyTorch meets NKI: the one module that knows Neuron's front ends.

| front end | tensors | how a kernel is called |
|---|---|---|
| torch-neuronx 2.9 | `xla`, a runtime of type NEURON | `nki.jit(kernel)[cores](...)`, lazily |
| torch-neuronx from 2.10 | `neuron` (PrivateUse1) | the same, eagerly |
| traced by torch.compile | `neuron` | `nki_hop.wrap_nki(nki.jit(kernel))[(cores,)](...)` |
| emulator | `cpu` | on NumPy |

What PyPI has under Neuron's names are stubs that raise when they are imported, so that only
importing tells what is installed. Every assumption here is a test against a recorded signature.
"""

import contextlib
import functools
import importlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.backends.neuron.toolchain import nl

OLDEST = (0, 3)  # dst-first instructions, `accumulate=`, buffers as objects
NKI_HOPS = ("torch_neuronx.nki_hop", "libtorch_neuronx_lite.nki.nki_hop")
ONE_CORE = ("trn1", "trn1n", "inf2", "gen2")  # no logical cores of two

_local = threading.local()


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
    return None if environment.NEURON_EMULATE else missing_compiler() or missing_device()


def missing_compiler() -> str | None:
    """What of NKI is not installed, or None."""
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


def missing_device() -> str | None:
    """Why torch has no Neuron device, or None."""
    if is_native() or xla_runtime() == "NEURON":
        return None
    other = torch._C._get_privateuse1_backend_name()
    return (
        f"torch has no Neuron device: torch_xla's runtime is {xla_runtime() or 'not installed'},"
        f" the device of PrivateUse1 is {other}; install torch-neuronx"
    )


def is_native() -> bool:
    """Whether PrivateUse1 is Neuron's device; importing torch has loaded its package if so."""
    return torch._C._get_privateuse1_backend_name() == "neuron"


def xla_runtime() -> str | None:
    """What torch_xla runs on: "NEURON", "TPU", "CPU", ...; None without it."""
    runtime = _import("torch_xla.runtime")
    return None if runtime is None else runtime.device_type()


def num_programs() -> int:
    """Physical cores of one logical NeuronCore: as configured, else what Neuron takes by itself.

    A kernel launched on another number is refused.
    """
    configured = os.environ.get("NEURON_LOGICAL_NC_CONFIG")
    if configured:
        return int(configured)
    return 1 if environment.NEURON_EMULATE or platform() in ONE_CORE else 2


def platform() -> str:
    """The family of the chip; the native device came with the third generation."""
    named = os.environ.get("NEURON_PLATFORM_TARGET_OVERRIDE")
    if named:
        return named
    return "trn2" if is_native() else _installed_platform()


@functools.cache
def _installed_platform() -> str:
    utils = _import("torch_neuronx.utils")
    return "trn2" if utils is None else utils.get_platform_target()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Within it, launches become nodes of the graph that torch.compile traces."""
    _local.is_traced = True
    try:
        yield
    finally:
        _local.is_traced = False


def can_trace() -> bool:
    """Whether there is a node for a launch in a graph."""
    return not environment.NEURON_EMULATE and _wrap_nki() is not None


def launch(kernel: Callable, *args: Any) -> Any:
    """Run `kernel` on tensors and plain values. What it writes it returns; see `write_back`."""
    args = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in args)
    if environment.NEURON_EMULATE:
        return _emulate(kernel, args)
    wrap_nki = _wrap_nki()
    if getattr(_local, "is_traced", False) and wrap_nki is not None:
        return wrap_nki(_compiled(kernel))[(num_programs(),)](*args)
    return _compiled(kernel)[num_programs()](*args)


def as_bytes(stored: Tensor) -> Tensor:
    """Eight-bit floats as the bytes that kernels read: NKI's own differ by generation.

    Below functionalization, where the XLA key's kernels run, a lazy tensor has no view of another
    type, and what is written into any view is lost; the compiler removes this copy.
    """
    if stored.device.type == "xla":
        return torch.ops.aten.view_copy.dtype(stored, torch.uint8)
    return stored.view(torch.uint8)


def write_back(target: Tensor, written: Tensor) -> None:
    """Have `target` hold what the kernel it was given to returned for it.

    A lazy XLA tensor is a value: the kernel wrote another one, and the compiler turns this copy
    into an alias. Everywhere else the kernel has written the tensor's own memory.
    """
    if target.device.type == "xla":
        target.copy_(written)


@functools.cache
def _compiled(kernel: Callable) -> Any:
    return importlib.import_module("nki").jit(kernel)


@functools.cache
def _wrap_nki() -> Callable | None:
    for name in NKI_HOPS:
        module = _import(name)
        if module is not None:
            return module.wrap_nki
    return None


def _emulate(kernel: Callable, args: tuple) -> Any:
    from torch_paged_attn.testing.nki_emulator import simulate

    results = simulate(kernel, num_programs())(*(_to_numpy(a) for a in args))
    if isinstance(results, tuple):
        return tuple(_to_torch(r) for r in results)
    return _to_torch(results)


def _to_numpy(value: Any) -> Any:
    """The same memory; NumPy has no bfloat16 of its own."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(nl.bfloat16)
    return value.numpy()


def _to_torch(array: Any) -> Tensor:
    if array.dtype == nl.bfloat16:
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
