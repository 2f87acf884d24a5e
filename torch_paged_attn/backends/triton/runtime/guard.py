"""A fast check that a call has the same properties as an earlier one."""

import functools
import operator
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.backends.triton.runtime.target import assumed

_address_of = Tensor.data_ptr

# a subclass without functions of its own has it, for example a parameter
_no_function_of_its_own: Any = torch._C._disabled_torch_function_impl

current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
# torch.compile's own check of inputs, in C++: it compares types, dtypes, devices, sizes, strides,
# and autograd's modes
_TensorGuards: Any = getattr(torch._C._dynamo.guards, "TensorGuards", None)


def _is_plain(x: Tensor) -> bool:
    """Whether functions of this tensor are torch's own: those of a subclass may be its own, and a
    kernel is given the subclass.
    """
    return type(x) is Tensor or type(x).__torch_function__ is _no_function_of_its_own


class Guard:
    """Checks whether a call has the options of the call it was made for, and tensors that differ
    only in values and addresses.
    """

    __slots__ = (
        *("_absent", "_check", "_count", "_device", "_is_invariant", "_options", "_pick"),
        *("_target", "is_plain", "requires_grad"),
    )

    def __init__(self, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> None:
        places = [i for i, x in enumerate(tensors) if x is not None]
        given = tuple([x for x in tensors if x is not None])
        self._absent = tuple([i for i, x in enumerate(tensors) if x is None])
        self._count, self._options = len(tensors), options
        # itemgetter of a single index would not return a tuple
        self._pick = (
            operator.itemgetter(slice(1)) if places == [0] else operator.itemgetter(*places)
        )
        self._check = _TensorGuards(
            *given,
            dynamic_dims_sizes=[list(x.shape) for x in given],
            dynamic_dims_strides=[list(x.stride()) for x in given],
        ).check
        # -1 if the tensors are not on a GPU
        self._device = given[0].get_device() if given[0].is_cuda else -1
        self._is_invariant, self._target = environment.BATCH_INVARIANT, assumed()
        # in no_grad mode; the check compares it with that of a call's tensors, but knows no mode
        self.requires_grad = any(x.requires_grad for x in given)
        self.is_plain = all(map(_is_plain, given))

    @staticmethod
    def unsupported(tensors: tuple[Tensor | None, ...]) -> str | None:
        """Why a guard cannot be made for a call; None if it can."""
        given = [x for x in tensors if x is not None]
        if _TensorGuards is None:
            return "this torch has none"
        # `match` requires all addresses to be aligned
        if functools.reduce(operator.or_, map(_address_of, given), 0) & 15:
            return "a tensor lies off multiples of 16 bytes"
        return "a tensor comes twice" if len(set(map(id, given))) < len(given) else None

    def match(
        self, tensors: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, ...], list[int]] | None:
        """The given tensors and their addresses if the call is like the guard's, else None."""
        if options != self._options or len(tensors) != self._count:
            return None
        for i in self._absent:
            if tensors[i] is not None:
                return None
        given = self._pick(tensors)
        # `_check` returns False for anything that is not a tensor, None included
        if not self._check(*given) or (self._device >= 0 and current_device() != self._device):
            return None
        addresses = list(map(_address_of, given))
        is_off = functools.reduce(operator.or_, addresses) & 15
        if is_off or environment.BATCH_INVARIANT is not self._is_invariant:
            return None
        return None if assumed() is not self._target else (given, addresses)
