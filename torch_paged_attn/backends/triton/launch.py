"""Starting a kernel, whether its call runs or is being traced by torch.compile."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from triton.runtime.driver import driver

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


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> Any:
    """`kernel[grid](*args, **options)`; the compiled kernel, if it ran on a GPU."""
    if is_traced():
        from torch.library import wrap_triton

        return wrap_triton(kernel)[grid](*args, **options)
    if not args[0].is_cuda:
        return kernel[grid](*args, **options)
    with torch.cuda.device(args[0].device):
        return kernel[grid](*args, **options)


class Relaunch:
    """A launch that was done, to be done again with other tensors.

    These must have the dtypes, the shapes, the strides and the alignment of those before. Triton's
    own way from arguments to a compiled kernel costs several times as much as this.
    """

    def __init__(
        self, kernel: Any, compiled: Any, grid: tuple[int, ...], args: Any, options: dict[str, Any]
    ) -> None:
        tensors = sum(x is None or isinstance(x, Tensor) for x in args)
        constants = [options[name] for name in kernel.arg_names[len(args) :]]
        self._fixed = (*args[tensors:], *constants)
        self._device = args[0].device.index
        self._grid = (*grid, 1, 1)[:3]
        self._run = compiled.run
        self._kernel = compiled.function, compiled.packed_metadata, None, None, None
        self._stream_of = driver.active.get_current_stream

    def __call__(self, tensors: Sequence[Tensor | None]) -> None:
        """Launch on the current stream of the tensors' device."""
        if torch.cuda.current_device() != self._device:
            with torch.cuda.device(self._device):
                return self(tensors)
        addresses = [None if x is None else x.data_ptr() for x in tensors]
        stream = self._stream_of(self._device)
        return self._run(*self._grid, stream, *self._kernel, *addresses, *self._fixed)


def describe(x: Any) -> Any:
    """All of a tensor that a launch depends on; anything else stands for itself."""
    if isinstance(x, Tensor):
        return x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16
    return x
