"""Guards: objects that check fast whether a call has the same properties as an earlier one.

They are in C (csrc/python/guard.c). Where that is not built, plans are found by keys alone.
"""

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.backends.triton.runtime import target
from torch_paged_attn.ops.repeated import library

_address_of = Tensor.data_ptr

# a subclass without functions of its own has it, for example a parameter
_no_function_of_its_own: Any = torch._C._disabled_torch_function_impl

current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# torch.compile's own check of inputs, in C++: it compares types, dtypes, devices, sizes, strides,
# and autograd's modes
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)

# what plans depend on beside a call's arguments
SURROUNDINGS = (environment, "BATCH_INVARIANT"), (target, "_assumed")


def _is_plain(x: Tensor) -> bool:
    """Whether functions of this tensor are torch's own: those of a subclass may be its own, and a
    kernel is given the subclass.
    """
    return type(x) is Tensor or type(x).__torch_function__ is _no_function_of_its_own


def guard_of(
    tensors: tuple[Tensor | None, ...],
    options: dict[str, Any],
    sized: frozenset[int] = frozenset(),
) -> Any:
    """A guard whose `match(tensors, options)` returns the given tensors and their addresses if a
    call has the same options, and tensors that differ only in values and addresses, else None.
    None for calls of which `unsupported` says why.

    sized: which of the given tensors may also differ in their first dimension
    """
    if unsupported(tensors) is not None:
        return None
    given = tuple([x for x in tensors if x is not None])
    return library().Guard(
        _check_of(given, sized),
        _address_of,
        tuple([x is not None for x in tensors]),
        options,
        tuple([(vars(module), name, vars(module)[name]) for module, name in SURROUNDINGS]),
        current_device,
        # -1 if the tensors are not on a GPU
        given[0].get_device() if given[0].is_cuda else -1,
        all(map(_is_plain, given)),
        # in no_grad mode; the check compares it with that of a call's tensors, but knows no mode
        any(x.requires_grad for x in given),
    )


def narrowed(guard: Any, given: tuple[Tensor, ...]) -> Any:
    """The guard for calls with the first dimensions of these tensors, which it has matched."""
    return guard.checking(_check_of(given))


def _check_of(given: tuple[Tensor, ...], sized: frozenset[int] = frozenset()) -> Any:
    sizes: list[list[int | None]] = [[*x.shape] for x in given]
    for i in sized:
        sizes[i][0] = None
    strides = [[*x.stride()] for x in given]
    return _TensorGuards(*given, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check


def unsupported(tensors: tuple[Tensor | None, ...]) -> str | None:
    """Why a guard cannot be made for a call; None if it can."""
    given = [x for x in tensors if x is not None]
    if _TensorGuards is None or library() is None:
        return "this torch has none, or the library is not built"
    # `match` requires all addresses to be aligned
    if functools.reduce(operator.or_, map(_address_of, given), 0) & 15:
        return "a tensor lies off multiples of 16 bytes"
    return "a tensor comes twice" if len(set(map(id, given))) < len(given) else None
