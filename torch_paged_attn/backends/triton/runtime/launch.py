"""Two special launches: into a graph that torch.compile traces, and programmatic dependent launch,
by which a kernel starts before the previous one has ended.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import triton
import triton.language as tl
from torch import Tensor


class _Thread(threading.local):
    # looking for a name that is not there takes sixteen times as long
    is_traced = False


_thread = _Thread()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """In this context, launches become nodes of the graph that is being traced."""
    _thread.is_traced = True
    try:
        yield
    finally:
        _thread.is_traced = False


def is_traced() -> bool:
    """Whether launches become nodes of a graph, in this thread."""
    return _thread.is_traced


def only_read(*tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors that a kernel only reads; copies of them while a graph is traced. torch.compile
    assumes that a kernel writes to every tensor from which it loads an index of a store, and a
    graph that writes to its inputs cannot be a CUDA graph.
    """
    return [x.clone() if x is not None and is_traced() else x for x in tensors]


def add_node(
    kernel: Any, grid: tuple[int, ...], pointers: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Add `kernel[grid](*pointers, **options)` to the graph. A graph can hold compiler options only
    in the configurations of an autotuned kernel, so the kernel gets one configuration.
    """
    from torch.library import wrap_triton

    arguments = {name: value for name, value in options.items() if name in kernel.arg_names}
    of_compiler = {name: value for name, value in options.items() if name not in arguments}
    if of_compiler:
        of_amd = {n: of_compiler.pop(n) for n in ("waves_per_eu",) if n in of_compiler}
        kernel = triton.autotune([triton.Config(of_amd, **of_compiler)], key=[])(kernel)
    wrap_triton(kernel)[grid](*pointers, **arguments)


@triton.jit
def gdc_wait(IS_DEPENDENT: tl.constexpr):
    """Wait until the previous kernel has ended. Before that, nothing may be read or written."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def gdc_launch_dependents(IS_DEPENDENT: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have called this."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


def dependent_launch(is_dependent: bool) -> dict[str, Any]:
    """Launch options of a kernel that calls `gdc_wait`, by which the GPU starts it before the
    previous kernel has ended. Not while a graph is traced: graphs have no such launches, and
    torch.compile assumes that a kernel with inline PTX writes to every tensor.
    """
    is_dependent = is_dependent and not is_traced()
    options: dict[str, Any] = {"IS_DEPENDENT": is_dependent}
    return options | {"launch_pdl": True} if is_dependent else options
