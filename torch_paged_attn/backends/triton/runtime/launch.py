"""Starting a kernel, whether its call runs or is being traced by torch.compile.

What a call launches and what memory it allocates can be noted on a tape, so that calls like it are
played from there: `recipes.py`.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_local = threading.local()


@contextlib.contextmanager
def traced() -> Iterator[None]:
    """Within it, launches become nodes of the graph that is being traced."""
    _local.is_traced = True
    try:
        yield
    finally:
        _local.is_traced = False


def is_traced() -> bool:
    """Whether launches become nodes of a graph."""
    return getattr(_local, "is_traced", False)


@dataclasses.dataclass(frozen=True)
class Launch:
    """`kernel[grid](*args, **options)` as it was done: `args` begin with tensors, tensor maps and
    None.
    """

    kernel: Any
    compiled: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    options: dict[str, Any]

    @property
    def device(self) -> int:
        """The number of the device."""
        return self.args[0].device.index


@dataclasses.dataclass
class Tape:
    """What a call launched, the memory it allocated for that, and its zeroed counters."""

    launches: list[Launch] = dataclasses.field(default_factory=list)
    allocations: list[Tensor] = dataclasses.field(default_factory=list)
    counters: Tensor | None = None
    num_counters: int = 0


@contextlib.contextmanager
def taped() -> Iterator[Tape]:
    """Within it, `launch`, `allocate` and `zeroed_counters` note what they do."""
    _local.tape = tape = Tape()
    try:
        yield tape
    finally:
        _local.tape = None


def only_read(*tensors: Tensor | None) -> list[Tensor | None]:
    """Tensors for a kernel that reads them. Where a graph is traced they are copies: torch.compile
    takes it for writing what a function has loaded an index of what it writes from, and a graph
    that writes its inputs is no CUDA graph.
    """
    return [x.clone() if x is not None and is_traced() else x for x in tensors]


def current_tape() -> Tape | None:
    """The tape that runs, if any."""
    return getattr(_local, "tape", None)


def _node(kernel: Any, options: dict[str, Any]) -> Any:
    """The kernel as torch.compile takes it. What is for the compiler leaves the options: a graph
    has a place for all of it only in the configurations of a tuned kernel, of which there is one.
    """
    from torch.library import wrap_triton

    told = {name: options.pop(name) for name in [*options] if name not in kernel.arg_names}
    if told:
        for_amd = {name: told.pop(name) for name in ("waves_per_eu",) if name in told}
        kernel = triton.autotune([triton.Config(for_amd, **told)], key=[])(kernel)
    return wrap_triton(kernel)


@triton.jit
def follow(IS_DEPENDENT: tl.constexpr):
    """Wait, before anything is read or written, for the kernel before this one to end."""
    if IS_DEPENDENT:
        tl.extra.cuda.gdc_wait()


def following(is_dependent: bool) -> dict[str, Any]:
    """Options of a kernel that begins with `follow`: on its way before the one before has ended.
    Not so in a graph: torch.compile takes PTX for writing every tensor, and has no such launch.
    """
    is_dependent = is_dependent and not is_traced()
    options: dict[str, Any] = {"IS_DEPENDENT": is_dependent}
    return options | {"launch_pdl": True} if is_dependent else options


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`."""
    if is_traced():
        _node(kernel, options)[grid](*args, **options)
        return
    first = args[0][0] if isinstance(args[0], tuple) else args[0]
    if not first.is_cuda:
        kernel[grid](*args, **options)
    elif first is not args[0]:
        with torch.cuda.device(first.device):
            kernel[grid](*args, **options)
    else:
        with torch.cuda.device(args[0].device):
            compiled = kernel[grid](*args, **options)
        if (tape := current_tape()) is not None:
            tape.launches.append(Launch(kernel, compiled, grid, args, options))


def launch_groups(
    kernel: Any, grid: tuple[int, ...], device: torch.device, **arguments: Any
) -> None:
    """Start a kernel whose arguments come in groups (tuples), by name. It is on no tape."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](**arguments)
    else:
        kernel[grid](**arguments)


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that a call needs besides its results, for as long as it lasts."""
    memory = torch.empty(shape, dtype=dtype, device=device)
    if (tape := current_tape()) is not None:
        tape.allocations.append(memory)
    return memory
