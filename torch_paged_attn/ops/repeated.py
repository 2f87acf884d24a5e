"""Repeated calls go past torch's dispatcher, which takes half of a decoding step's host time.

A backend that keeps the plans of its last calls (`Backend.repeated`) finds one of them by a guard.
The guard compares each tensor's dispatch keys in this thread's modes with those that it had in the
backend's kernel: type, device, whether it requires grad, autocast, `torch.func`, tracing and
dispatch modes are in them. Where they are equal, nothing stands between the call and the kernel.
What they do not show is asked here: forward-mode AD, and profilers, which name calls of operators.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd import forward_ad

# (tensors and other arguments by position, the rest by name, as a kernel gets them) -> the results
# of a call like one of the last, or NotImplemented
Again = Callable[[tuple[Any, ...], dict[str, Any]], Any]

_is_profiling: Callable[[], bool] = getattr(torch._C._autograd, "_profiler_enabled", lambda: True)

# an operator's name, with its overload -> its repeated calls, from its first call on
REPEATED: dict[str, "Repeated"] = {}

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


class Repeated:
    """The repeated calls of one operator, called with its arguments.

    op: the operator
    again: the backend's function
    bump_versions: tells autograd which of the arguments by position a call has changed; None if it
        changes none
    """

    def __init__(
        self,
        op: torch._ops.OpOverload,
        again: Again,
        bump_versions: Callable[[tuple[Any, ...]], None] | None = None,
    ) -> None:
        listed = op._schema.arguments
        behind = [a for a in listed if not a.kwarg_only]
        self._again, self._bump_versions = again, bump_versions
        self._places = {a.name: i for i, a in enumerate(behind)}
        self._required = sum(not a.has_default_value() for a in behind)
        # name -> default, and types of a value
        self._named = {
            a.name: (a.default_value, TYPES.get(str(a.real_type), ()))
            for a in listed
            if a.kwarg_only
        }

    def __call__(self, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """The results of a call like one of the last; NotImplemented for others."""
        if forward_ad._current_level >= 0 or _is_profiling():
            return NotImplemented
        # a kernel gets no defaults: neither by name nor behind the last argument that is given
        named, found = {}, args
        for name, value in options.items():
            expected = self._named.get(name)
            if expected is not None:
                default, types = expected
                if type(value) in types:
                    if value != default:
                        named[name] = value
                elif value is not default:
                    return NotImplemented
            elif value is not None:
                at = self._places.get(name, -1)
                if at < len(args):
                    return NotImplemented  # by position too, or of no argument
                found = (*found, *(None,) * (at + 1 - len(found)))
                found = (*found[:at], value, *found[at + 1 :])
        count = len(found)
        while count > self._required and found[count - 1] is None:
            count -= 1
        results = self._again(found[:count], named)
        if self._bump_versions is not None and results is not NotImplemented:
            self._bump_versions(found)
        return results


def repeat(name: str, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The results of an operator's call if it is like one of the last; NotImplemented for others.

    Args:
        name: the operator's, with its overload
    """
    if torch.compiler.is_compiling():
        return NotImplemented
    repeated = REPEATED.get(name)
    return NotImplemented if repeated is None else repeated(args, options)
