"""Run a kernel on the current machine, on NumPy arrays, as `nki.simulate` does."""

from collections.abc import Callable
from typing import Any

import numpy as np

from nki_emulator.language import NKIObject
from nki_emulator.machine import machine, require
from nki_emulator.memory import MemoryRegion
from nki_emulator.tensor import NkiTensor, allocate


def simulate(
    kernel: Callable, num_programs: int = 1, reverse: bool = False
) -> Callable[..., np.ndarray | tuple[np.ndarray, ...]]:
    """A function of arrays and plain values. It updates in place the arrays that the kernel writes.

    `num_programs=2` is a logical core of two physical ones; they run one after the other, in
    `reverse` order if asked. They must not write the same element, nor loop differently.
    """
    require(num_programs in (1, 2), f"{num_programs} programs; a logical core has 1 or 2")

    def run(*args: Any, **kwargs: Any) -> np.ndarray | tuple[np.ndarray, ...]:
        inputs = [_to_hbm(a) for a in args]
        named = {name: _to_hbm(a) for name, a in kwargs.items()}
        current = machine()
        current.num_programs, current.shared, current.trips = num_programs, [], {}
        order = range(num_programs)
        try:
            for program in reversed(order) if reverse else order:
                current.program_id, current.num_shared = program, 0
                results = kernel(*inputs, **named)
        finally:
            shared = current.shared
            current.program_id, current.num_programs, current.shared = 0, 1, []
        trips = [current.trips.get(program, []) for program in order]
        require(trips[0] == trips[-1], f"programs loop differently: {trips[0]}, {trips[-1]}")
        for tensor in (*shared, *inputs, *named.values()):
            if isinstance(tensor, NkiTensor):
                _check_disjoint(tensor)
        if isinstance(results, tuple):
            return tuple(_to_array(t) for t in results)
        return _to_array(results)

    return run


def _check_constant(value: Any) -> None:
    """Refuse what is no compile-time value; a tensor is a parameter of its own."""
    if isinstance(value, tuple | NKIObject):
        for part in value if isinstance(value, tuple) else vars(value).values():
            _check_constant(part)
        return
    require(
        value is None or isinstance(value, bool | int | float | str),
        f"a kernel's argument holds a {type(value).__name__}; allowed: arrays as arguments, and"
        " None, bool, int, float, str, tuples and NKIObjects of these",
    )


def _to_hbm(value: Any) -> Any:
    """An argument as the kernel gets it: an array as a tensor over its memory, else as it is."""
    if not isinstance(value, np.ndarray):
        _check_constant(value)
        return value
    require(value.flags.c_contiguous, "a kernel takes contiguous arrays")
    return allocate(value.shape, value.dtype, MemoryRegion.shared_hbm, value.reshape(-1))


def _to_array(tensor: NkiTensor) -> np.ndarray:
    """A result's memory."""
    require(tensor.buffer is MemoryRegion.shared_hbm, "a kernel returns tensors in nl.shared_hbm")
    return tensor.values(tensor.start())


def _check_disjoint(tensor: NkiTensor) -> None:
    """Refuse elements that both programs have written: nothing says who comes last."""
    writes = list(tensor.storage.writes.values())
    require(
        len(writes) < 2 or not (writes[0] & writes[1]).any(),
        "both programs of a logical core write the same element",
    )
