"""How a kernel starts: as a node of a graph that torch.compile traces, or before the kernel ahead
of it has ended.
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
    """Within it, launches become nodes of the graph that is being traced."""
    _thread.is_traced = True
    try:
        yield
    finally:
        _thread.is_traced = False


def is_traced() -> bool:
    """Whether launches become nodes of a graph."""
    return _thread.is_traced


def only_read(*tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors for a kernel that reads them. Where a graph is traced they are copies: torch.compile
    assumes that a function writes whatever it loads an index from for a store, and a graph that
    writes its inputs cannot be a CUDA graph.
    """
    return [x.clone() if x is not None and is_traced() else x for x in tensors]


def add_node(
    kernel: Any, grid: tuple[int, ...], pointers: tuple[Any, ...], options: dict[str, Any]
) -> None:
    """Put `kernel[grid](*pointers, **options)` into the graph. A graph has a place for options of
    the compiler only in the configurations of a tuned kernel, so the kernel gets one configuration.
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
    """Wait, before anything is read or written, for the kernel before this one to end."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def gdc_launch_dependents(IS_DEPENDENT: tl.constexpr):
    """Let the kernel after this one start where there is room, once all programs came here."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


def dependent_launch(is_dependent: bool) -> dict[str, Any]:
    """Options of a kernel that begins with `gdc_wait`: the chip starts it before the kernel ahead
    of it has ended. Not in a graph: torch.compile assumes that PTX writes every tensor, and a graph
    has no such launches.
    """
    is_dependent = is_dependent and not is_traced()
    options: dict[str, Any] = {"IS_DEPENDENT": is_dependent}
    return options | {"launch_pdl": True} if is_dependent else options
