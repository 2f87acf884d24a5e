"""What is worked out once for the layers of a step: the same metadata comes again and again."""

import collections
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


class HostCopies:
    """Host copies of device tensors, each read once as long as it lives unchanged: reading is a
    wait. Only a tensor's version counter tells a change; inference tensors have none, and are read
    every time.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """`tensor` itself on the host, else a copy."""
        return tensor if tensor.device.type == "cpu" else self.copy_of(tensor)

    def copy_of(self, tensor: Tensor) -> Tensor:
        """A copy that may be older than this call, but not than the tensor's last change."""
        if tensor.is_inference():
            return tensor.cpu()
        place, version = id(tensor), tensor._version
        known = self._copies.get(place)
        if known is None or known[0]() is not tensor or known[1] != version:
            forget = weakref.ref(tensor, lambda _: self._copies.pop(place, None))
            known = self._copies[place] = (forget, version, tensor.to("cpu", copy=True))
        return known[2]


class Recent(Generic[T]):
    """The last few results of a function of host tensors, found again by what these hold."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._results: collections.OrderedDict[Hashable, T] = collections.OrderedDict()

    def __call__(
        self, tensors: Sequence[Tensor | None], options: Hashable, make: Callable[[], T]
    ) -> T:
        """`make()`, unless it was made for equal tensors and options lately."""
        key = (tuple(_content(t) for t in tensors), options)
        if key in self._results:
            self._results.move_to_end(key)
            return self._results[key]
        result = self._results[key] = make()
        if len(self._results) > self._size:
            self._results.popitem(last=False)
        return result


def _content(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tuple(tensor.shape), tensor.contiguous().numpy().tobytes()
