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


def current_tape() -> Tape | None:
    """The tape that runs, if any."""
    return getattr(_local, "tape", None)


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """`kernel[grid](*args, **options)`."""
    if is_traced():
        from torch.library import wrap_triton

        wrap_triton(kernel)[grid](*args, **options)
    elif not args[0].is_cuda:
        kernel[grid](*args, **options)
    else:
        with torch.cuda.device(args[0].device):
            compiled = kernel[grid](*args, **options)
        if (tape := current_tape()) is not None:
            tape.launches.append(Launch(kernel, compiled, grid, args, options))


def allocate(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory that a call needs besides its results, for as long as it lasts."""
    memory = torch.empty(shape, dtype=dtype, device=device)
    if (tape := current_tape()) is not None:
        tape.allocations.append(memory)
    return memory
