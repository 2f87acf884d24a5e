"""A call like an earlier one, without the way through the dispatcher.

On the host of a GPU the dispatcher's way into a kernel in Python costs as much as the kernel's own
Python. So a backend leaves a `Repeat` of a call that it has answered, and the public functions look
for one (`repeated`) before they call the operator. A repeat answers only where the dispatcher would
come to the same kernel and nobody on the way has anything to do or to see:

- torch.compile's guard compares types, sizes, strides, and each tensor's dispatch keys together
  with those that the thread's modes add and take away. With equal keys the dispatcher goes equal
  ways: subclasses, dispatch modes, `torch.func`, tracing and autocast come with other keys. So does
  `requires_grad`: no call is left whose tensors require a gradient;
- what has no key is asked for: modes of `__torch_function__`, forward-mode AD, the profiler.

In any other case, and where this torch has no such guard, the call goes the dispatcher's way.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_paged_attn import environment

# of each op, calls of so many kinds: those of a model whose layers alternate, and of its prefill
MOST = 4

# called with tensors and their addresses
Run = Callable[[tuple[Tensor, ...], list[int]], Any]

# how many modes such as torch.set_default_device's are on
function_modes: Any = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
_is_profiled: Any = getattr(torch._C._autograd, "_profiler_enabled", lambda: True)
# what code that torch.compile writes compares its inputs with
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


class Repeat:
    """Tells calls like the one that it is made for by a guard on the tensors, and answers them:
    `run` gets the tensors that are given and their addresses. It may answer NotImplemented.
    """

    __slots__ = ("_check", "_is_invariant", "_kinds", "_pick", "device", "options", "run")

    def __init__(
        self, tensors: tuple[Tensor | None, ...], options: dict[str, Any], run: Run
    ) -> None:
        given = [i for i, x in enumerate(tensors) if x is not None]
        self._kinds = tuple(map(type, tensors))
        self._pick = operator.itemgetter(*given)
        picked = self._pick(tensors)
        self._check = _TensorGuards(
            *picked,
            dynamic_dims_sizes=[list(x.shape) for x in picked],
            dynamic_dims_strides=[list(x.stride()) for x in picked],
        ).check
        self.options, self.run = options, run
        self.device = picked[0].get_device()
        self._is_invariant = environment.BATCH_INVARIANT

    def match(
        self, tensors: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], list[int]] | None:
        """What `run` takes for a call, or None if it is no repetition."""
        if options != self.options or tuple(map(type, tensors)) != self._kinds:
            return None
        given = self._pick(tensors)
        if not self._check(*given):
            return None
        addresses = [x.data_ptr() for x in given]
        if (
            functools.reduce(operator.or_, addresses) & 15
            or environment.BATCH_INVARIANT is not self._is_invariant
        ):
            return None
        return given, addresses


class Repeats(dict[str, tuple[Repeat, ...]]):
    """Of each op the repeats that were left last."""

    def find(self, op: str, tensors: tuple[Any, ...], options: dict[str, Any], device: int) -> Any:
        """The result of a call that repeats one of them on a device, or NotImplemented."""
        for repeat in self.get(op, ()):
            if repeat.device == device and (found := repeat.match(tensors, options)) is not None:
                result = repeat.run(*found)
                if result is not NotImplemented:
                    return result
        return NotImplemented

    def run_of(self, op: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> Run | None:
        """What would answer a call that repeats one of them."""
        tensors = trimmed(tensors)
        found = (x for x in self.get(op, ()) if x.match(tensors, options) is not None)
        return next((x.run for x in found), None)

    def leave(self, op: str, repeat: Repeat) -> None:
        """Keep it for the calls to come."""
        others = [x for x in self.get(op, ()) if x is not repeat]
        self[op] = (repeat, *others[: MOST - 1])


# of calls of the public functions
REPEATS = Repeats()


def repeated(op: str, tensors: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """The result of a call that repeats one that a backend has left, or NotImplemented.

    tensors: all that the op may take, in its order
    options: what it takes beside them, without the tensors
    """
    if (
        torch.compiler.is_compiling()
        or op not in REPEATS
        or function_modes()
        or forward_ad._current_level >= 0
        or _is_profiled()
        or environment.CHECK
    ):
        return NotImplemented
    if tensors[-1] is None:
        tensors = trimmed(tensors)
    return REPEATS.find(op, tensors, options, current_device())


def trimmed(tensors: tuple[Any, ...]) -> tuple[Any, ...]:
    """Tensors up to the last one that is given."""
    while tensors and tensors[-1] is None:
        tensors = tensors[:-1]
    return tensors


def repeatable(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether there can be a repeat of a call with such tensors.

    Not with one that requires a gradient or lies off multiples of 16 bytes, because a repeat looks
    at all addresses at once; nor with one tensor twice, which the guard refuses.
    """
    given = [x for x in tensors if x is not None]
    return (
        _TensorGuards is not None
        and len(given) > 1
        and len(set(map(id, given))) == len(given)
        and not any(x.requires_grad or x.data_ptr() & 15 for x in given)
    )
