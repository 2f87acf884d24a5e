"""Repeated calls go past torch's dispatcher, which takes half of a decoding step's host time.

A backend that keeps the plans of its last calls (`Backend.recent`) finds one of them by a guard.
The guard compares each tensor's dispatch keys in this thread's modes with those that it had in the
backend's kernel: type, device, whether it requires grad, autocast, `torch.func`, tracing and
dispatch modes are in them. Where they are equal, nothing stands between the call and the kernel.
What they do not show is asked beside it: forward-mode AD, profilers, which name calls of operators,
and function modes.

All of it is one object in C (csrc/python/repeated.c). Where that is not built, and for every other
call, the dispatcher calls the kernel.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

# (arguments by position, by name) -> the results of a call like one of the last, or NotImplemented
Again = Callable[[tuple[Any, ...], dict[str, Any]], Any]

# an operator's name, with its overload -> its repeated calls, from its first call on
REPEATED: dict[str, Again] = {}

# what a schema calls the type of an argument by name -> the types of its values in Python. Others
# are left to the dispatcher, which converts or refuses them
TYPES: dict[str, tuple[type, ...]] = {
    "bool": (bool,),
    "int": (int,),
    "SymInt": (int,),
    "float": (float, int),
    "Optional[float]": (float, int),
    "Optional[ScalarType]": (torch.dtype,),
}

# what the object asks of torch
OF_TORCH: tuple[Any, ...] = (
    forward_ad,
    getattr(torch._C._autograd, "_profiler_enabled", lambda: True),
    # modes such as torch.set_default_device's
    getattr(torch._C, "_len_torch_function_stack", lambda: 1),
    torch.is_grad_enabled,
    Tensor.is_inference,
    # without the function in Python around it
    getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version),
)


class Recent(NamedTuple):
    """Where a backend keeps the plans of an operator's last calls."""

    plans: dict[str, tuple[tuple[Any, Any], ...]]
    """Key -> guards and their plans, the latest first."""

    key: str | Callable[..., tuple[Any, ...]]
    """The key; or a function of the hints that returns a tuple which begins with it."""

    hints: tuple[str, ...] = ()
    """The arguments that the function takes, in the order of the schema. Guards see none of them,
    and calls whose hints are no numbers, or negative, are not repeated."""

    beside: str | None = None
    """A tensor: the function's last argument is whether it is given."""


@functools.cache
def library() -> Any:
    """The compiled module; None where it is not built."""
    try:
        return importlib.import_module("torch_paged_attn._launch")
    except ImportError:
        return None


def remember(op: torch._ops.OpOverload, recent: Recent, written: Sequence[int] = ()) -> None:
    """From now on, look for the plan of a call of the operator among those of its last.

    written: the places of the tensors that a call changes
    """
    if library() is None:
        return
    listed = op._schema.arguments
    behind = [a for a in listed if not a.kwarg_only]
    places: dict[str, Any] = {a.name: i for i, a in enumerate(behind)}
    named = {
        a.name: (a.default_value, TYPES.get(str(a.real_type), ())) for a in listed if a.kwarg_only
    }
    required = sum(not a.has_default_value() for a in behind)
    name, overload = op._schema.name.removeprefix("paged_attn::"), op._schema.overload_name
    REPEATED[f"{name}.{overload}" if overload else name] = library().Repeated(
        places | named, required, *recent, tuple(written), OF_TORCH
    )


def repeat(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The results of an operator's call if it is like one of the last; NotImplemented for others.

    Args:
        name: the operator's, with its overload
    """
    if torch.compiler.is_compiling():
        return NotImplemented
    repeated = REPEATED.get(name)
    return NotImplemented if repeated is None else repeated(args, options)
