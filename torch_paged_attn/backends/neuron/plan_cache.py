"""Plans of the last few steps: the layers of a step come with equal metadata, and share one plan.

A plan is found by the values of the metadata, which every call reads on the host. That waits for
the device; `keep_plans` is for callers who promise not to change values without PyTorch's
knowledge, and so need not wait.
"""

import collections
import contextlib
import contextvars
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Generic, TypeVar

from torch import Tensor

T = TypeVar("T")


def _copy(tensor: Tensor) -> Tensor:
    return tensor.to("cpu", copy=True)


class HostCopies:
    """Host copies of tensors, each read once for as long as its tensor lives in one version.

    A write through `tensor.data` or a raw pointer leaves the version as it is and is not seen.
    Inference tensors have no version: they are read every time.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        """A copy as old as the tensor's version, or younger."""
        if tensor.is_inference():
            return _copy(tensor)
        place, version = id(tensor), tensor._version
        known = self._copies.get(place)
        if known is None or known[0]() is not tensor or known[1] != version:
            forget = weakref.ref(tensor, lambda _: self._copies.pop(place, None))
            known = self._copies[place] = (forget, version, _copy(tensor))
        return known[2]


_kept: contextvars.ContextVar[HostCopies | None] = contextvars.ContextVar("_kept", default=None)


@contextlib.contextmanager
def keep_plans() -> Iterator[None]:
    """Within it, a metadata tensor that was read is not read again until its version changes.

    The layers of a step then wait for the device once. The caller promises that lengths,
    block tables and layouts change by PyTorch's in-place operations only: a write through
    `tensor.data` or a raw pointer is not noticed, and the result is that of the old values.
    """
    token = _kept.set(_kept.get() or HostCopies())
    try:
        yield
    finally:
        _kept.reset(token)


def read(tensor: Tensor) -> Tensor:
    """A host copy of a metadata tensor: a plan and the key it is kept by see the same values."""
    return (_kept.get() or _copy)(tensor)


class PlanCache(Generic[T]):
    """The last `size` plans, found by the values of the tensors and options they depend on."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._plans: collections.OrderedDict[Hashable, T] = collections.OrderedDict()
        self._lock = threading.Lock()

    def __call__(
        self, tensors: Sequence[Tensor | None], options: Hashable, make: Callable[[], T]
    ) -> T:
        """The plan that was made for equal tensors and options, else `make()`."""
        key = (tuple(_values(t) for t in tensors), options)
        with self._lock:
            if key in self._plans:
                self._plans.move_to_end(key)
                return self._plans[key]
        plan = make()
        with self._lock:
            self._plans[key] = plan
            if len(self._plans) > self._size:
                self._plans.popitem(last=False)
        return plan

    def clear(self) -> None:
        """Forget every plan."""
        with self._lock:
            self._plans.clear()


def _values(tensor: Tensor | None) -> Hashable:
    if tensor is None:
        return None
    return tensor.dtype, tuple(tensor.shape), tensor.contiguous().numpy().tobytes()
