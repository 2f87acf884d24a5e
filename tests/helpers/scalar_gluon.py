"""Gluon functions of numbers alone, such as those that find a program's work, run as Python: Triton
has no interpreter for Gluon."""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton.language
from triton.experimental.gluon import language as gl
from triton.language import constexpr


class Pointer(NamedTuple):
    """Into a flat tensor, to one of its numbers or to many."""

    base: torch.Tensor
    at: Any = 0

    def __add__(self, by: Any) -> "Pointer":  # type: ignore[override]
        return Pointer(self.base, self.at + by)


def _load(pointer: Pointer, mask: Any = True, other: int = 0) -> torch.Tensor:
    at, mask = torch.broadcast_tensors(torch.as_tensor(pointer.at), torch.as_tensor(mask))
    # what the mask does not hide has to be there
    assert bool(((at >= 0) & (at < pointer.base.numel()) | ~mask).all())
    return torch.where(mask, pointer.base[torch.where(mask, at, 0)], other)


def _store(pointer: Pointer, value: Any) -> None:
    pointer.base[pointer.at] = value


def _atomic_add(pointer: Pointer, value: Any) -> torch.Tensor:
    before = pointer.base[pointer.at].clone()
    pointer.base[pointer.at] += value
    return before


def _of_tensors(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda *given: function(*map(torch.as_tensor, given))


def as_python(function: Any, program: int = 0, programs: int = 1) -> Callable[..., Any]:
    """A Gluon or Triton function as one of a program. Its tensors are PyTorch's, its pointers
    `Pointer`; what it calls is Python, too."""
    language = types.SimpleNamespace(
        constexpr=constexpr,
        int32=torch.int32,
        BlockedLayout=lambda *_: None,
        arange=lambda start, stop, *_: torch.arange(start, stop, dtype=torch.int32),
        load=_load,
        store=_store,
        atomic_add=_atomic_add,
        sum=lambda x, axis: x.sum(axis),
        max=lambda x, axis: x.amax(axis),
        min=lambda x, axis: x.amin(axis),
        where=_of_tensors(torch.where),
        maximum=_of_tensors(torch.maximum),
        minimum=_of_tensors(torch.minimum),
        program_id=lambda _: program,
        num_programs=lambda _: programs,
    )
    made: dict[int, Callable[..., Any]] = {}

    def of(x: Any) -> Any:
        if x is gl or x is triton.language:
            return language
        if isinstance(x, constexpr):
            return x.value
        if not hasattr(x, "fn"):
            return x
        if id(x) not in made:
            code, names = x.fn.__code__, dict[str, Any]()
            made[id(x)] = types.FunctionType(code, names, argdefs=x.fn.__defaults__)
            known = x.fn.__globals__
            names.update({name: of(known[name]) for name in code.co_names if name in known})
        return made[id(x)]

    found: Callable[..., Any] = of(function)
    return found
