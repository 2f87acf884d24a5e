"""How kernels are launched on PyTorch's tensors: the one module that knows Neuron's front ends.

| front end | tensors | how a kernel is called |
|---|---|---|
| torch-neuronx 2.9 | `xla`, a runtime of type NEURON | `nki.jit(kernel)[cores](...)`, lazily |
| torch-neuronx from 2.10 | `neuron` (PrivateUse1) | the same, eagerly |
| traced by torch.compile | `neuron` | `nki_hop.wrap_nki(nki.jit(kernel))[(cores,)](...)` |
| emulator | `cpu` | `nki_emulator.simulate(kernel, cores)(...)`, on NumPy |

PyPI's packages of Neuron's names are stubs that raise when they are imported, so only importing
tells what is installed. Each assumption is tested against a recorded signature.
"""

import contextlib
import functools
import importlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.backends.neuron.toolchain import import_or_none, nl

OLDEST = (0, 3)  # dst-first instructions, `accumulate=`, buffers as objects
NKI_HOPS = ("torch_neuronx.nki_hop", "libtorch_neuronx_lite.nki.nki_hop")
ONE_CORE = ("trn1", "trn1n", "inf2", "gen2")  # no logical cores of two

_local = threading.local()


def _version(module: Any) -> tuple[int, ...]:
    """The first two parts of a version; 0 for a part that is no number."""
    parts = str(getattr(module, "__version__", "0")).split(".")[:2]
    return tuple(int(p) if p.isdigit() else 0 for p in parts)


def unsupported() -> str | None:
    """Why the kernels cannot run here, or None."""
    if not environment.NEURON_EMULATE:
        return unsupported_compiler() or unsupported_device()
    if import_or_none("nki_emulator") is not None:
        return None
    return (
        "PAGED_ATTN_NEURON_EMULATE is 1, but nki_emulator cannot be imported: it needs ml_dtypes,"
        " and the folder tools/ of torch_paged_attn's repository on PYTHONPATH"
    )


def unsupported_compiler() -> str | None:
    """Why NKI cannot compile the kernels, or None."""
    package = import_or_none("nki")
    if package is None:
        if import_or_none("neuronxcc.nki") is not None:
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
    if import_or_none("neuronxcc") is None:
        return "neuronx-cc, the compiler that nki needs, is not installed"
    return None


def unsupported_device() -> str | None:
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
    runtime = import_or_none("torch_xla.runtime")
    return None if runtime is None else runtime.device_type()


def num_programs() -> int:
    """Physical cores of one logical NeuronCore: as configured, else Neuron's default.

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
    """What torch_neuronx says the chip is; Trainium2 where it says nothing."""
    utils = import_or_none("torch_neuronx.utils")
    return "trn2" if utils is None else utils.get_platform_target()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """While it is open, launches become nodes of the graph that torch.compile traces."""
    _local.is_traced = True
    try:
        yield
    finally:
        _local.is_traced = False


def can_trace() -> bool:
    """Whether there is a node for a launch in a graph."""
    return not environment.NEURON_EMULATE and _wrap_nki() is not None


def launch(kernel: Callable, **arguments: Any) -> Any:
    """Run `kernel`; every tensor is an argument of its own, since front ends look no deeper.

    A kernel returns the tensors that it writes; see `write_back`.
    """
    # the front ends are recorded with arguments by place
    ordered = inspect.signature(kernel).bind(**arguments).args
    args = tuple(a.contiguous() if isinstance(a, Tensor) else a for a in ordered)
    if environment.NEURON_EMULATE:
        return _emulate(kernel, args)
    wrap_nki = _wrap_nki()
    if getattr(_local, "is_traced", False) and wrap_nki is not None:
        return wrap_nki(_compiled(kernel))[(num_programs(),)](*args)
    return _compiled(kernel)[num_programs()](*args)


def as_bytes(stored: Tensor) -> Tensor:
    """A tensor of 8-bit floats viewed as bytes: NKI's 8-bit types differ by generation.

    Below functionalization, where the XLA key's kernels run, a lazy tensor has no view of another
    type, and what is written into any view is lost; the compiler removes this copy.
    """
    if stored.device.type == "xla":
        return torch.ops.aten.view_copy.dtype(stored, torch.uint8)
    return stored.view(torch.uint8)


def write_back(target: Tensor, written: Tensor) -> None:
    """Copy a kernel's result into the argument it stands for, where the front end needs it.

    A lazy XLA tensor is a value: the kernel returned another one, and the compiler turns this copy
    into an alias. Everywhere else the kernel has written `target`'s own memory.
    """
    if target.device.type == "xla":
        target.copy_(written)


@functools.cache
def _compiled(kernel: Callable) -> Any:
    """`nki.jit(kernel)`, one for each kernel: it keeps what it has compiled."""
    return importlib.import_module("nki").jit(kernel)


@functools.cache
def _wrap_nki() -> Callable | None:
    """The function that makes a launch a node of a graph, of whichever package has it."""
    for name in NKI_HOPS:
        module = import_or_none(name)
        if module is not None:
            return module.wrap_nki
    return None


def _emulate(kernel: Callable, args: tuple) -> Any:
    """A launch on the emulator, which writes the tensors' own memory."""
    emulator = importlib.import_module("nki_emulator")
    results = emulator.simulate(kernel, num_programs())(*(_to_numpy(a) for a in args))
    if isinstance(results, tuple):
        return tuple(_to_torch(r) for r in results)
    return _to_torch(results)


def _to_numpy(value: Any) -> Any:
    """A tensor's memory as an array; NumPy has no bfloat16 of its own."""
    if not isinstance(value, Tensor):
        return value
    if value.dtype == torch.bfloat16:
        return value.view(torch.int16).numpy().view(nl.bfloat16)
    return value.numpy()


def _to_torch(array: Any) -> Tensor:
    """The way back: a tensor over an array's memory."""
    if array.dtype == nl.bfloat16:
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)
