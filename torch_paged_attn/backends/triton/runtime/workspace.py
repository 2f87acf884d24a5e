"""Memory that a call needs besides its arguments.

`Allocation` makes results, and memory that is given back to PyTorch's allocator when the call ends.
The allocator reuses it in stream order.

All launches on a stream, which run one after the other, share `Scratch`: partial results, and
counters, which are 0 before and after every launch, because kernels reset them. A launch in a CUDA
graph may run at any time and on any stream when the graph is replayed. So it gets counters of its
own, from a store that was zeroed before the capture.
"""

import itertools
import operator
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.lru import LRU

# how many streams have scratch memory; the fewest counters of a stream; the fewest and the most
# float32 elements of partial results (larger ones are allocated for each launch)
MOST_STREAMS = 32
LEAST = 1 << 13
LEAST_PARTS, MOST_PARTS = 1 << 18, 1 << 21

# counters of a device for captured launches. At least half of them are free when a capture begins,
# if the same calls have run before
STORE = 1 << 20

# counters of two launches are not in the same cache line
LINE = 32

# the function with which code of torch.compile allocates, three times as fast as `torch.empty`
_empty_on_current_device: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_is_capturing: Any = getattr(
    torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing
)


def _stream_handle(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


# a function that returns the handle of a device's current stream; torch's private one is faster
current_stream: Callable[[int], int] = (
    getattr(torch._C, "_cuda_getCurrentRawStream", None) or _stream_handle
)

# (device, stream) -> Scratch
_scratch = LRU(MOST_STREAMS)
_stores: dict[int, Tensor] = {}
# stores are never freed, because it is not known when a graph is replayed for the last time
_all_stores: list[Tensor] = []


class Allocation:
    """A function that returns a new contiguous tensor. If `device` is a GPU, it has to be the
    current device.
    """

    __slots__ = ("_is_quick", "device", "dtype", "shape", "strides")

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.dtype, self.device = tuple(shape), dtype, device
        steps = (max(size, 1) for size in reversed(self.shape[1:]))
        strides = itertools.accumulate(steps, operator.mul, initial=1) if shape else ()
        self.strides = tuple(strides)[::-1]
        is_real = device.type == "cuda" and not is_traced()
        self._is_quick = _empty_on_current_device is not None and is_real

    @classmethod
    def like(cls, x: Tensor) -> "Allocation":
        """An allocation with the shape, dtype and device of `x`."""
        return cls(x.shape, x.dtype, x.device)

    def __call__(self) -> Tensor:
        # with deterministic algorithms, torch.empty fills the memory, which the fast function does
        # not
        if self._is_quick and not torch.are_deterministic_algorithms_enabled():
            return _empty_on_current_device(self.shape, self.strides, self.dtype)
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


class Constants:
    """A function that returns tensors that are always the same, and their addresses. Each stream
    that calls it has its own, so that none waits for another, and so has each call in a CUDA graph,
    which keeps no reference to tensors that were made before it.
    """

    __slots__ = ("_device", "_kept", "_make")

    def __init__(self, make: Callable[[], tuple[Tensor, ...]], device: torch.device) -> None:
        self._make, self._device = make, device
        # the handle of a stream -> what is returned
        self._kept: dict[int, tuple[tuple[Tensor, ...], tuple[int, ...]]] = {}

    def __call__(self) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        if self._device.type != "cuda" or _is_capturing():
            return self._made()
        stream = current_stream(self._device.index)
        found = self._kept.get(stream)
        if found is None:
            if len(self._kept) == MOST_STREAMS:
                self._kept = {}
            # a tensor made under inference_mode could not be used outside
            with torch.inference_mode(False):
                found = self._kept[stream] = self._made()
        return found

    def _made(self) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
        made = self._make()
        return made, tuple([x.data_ptr() for x in made])


class Scratch:
    """Memory for partial results (float32) and counters (int32, 0) of launches on a stream."""

    __slots__ = ("addresses", "counters", "num_counters", "num_parts", "parts")

    def __init__(self, parts: Tensor, counters: Tensor) -> None:
        self.parts, self.counters = parts, counters
        self.num_parts, self.num_counters = parts.numel(), counters.numel()
        # traced tensors have no addresses
        both = () if is_traced() else (parts, counters)
        self.addresses = tuple(x.data_ptr() for x in both)


class ScratchOf:
    """A function that returns scratch memory of at least these sizes for the next launch on the
    current stream.
    """

    __slots__ = ("_device", "_is_kept", "_num_counters", "_num_parts")

    def __init__(self, num_parts: int, num_counters: int, device: torch.device) -> None:
        self._num_parts, self._num_counters = num_parts, num_counters
        self._device = device
        self._is_kept = device.type == "cuda" and not is_traced()

    def __call__(self) -> Scratch:
        if not self._is_kept:
            counters = torch.zeros(self._num_counters, dtype=torch.int32, device=self._device)
            return Scratch(self._new_parts(), counters)
        index = self._device.index
        if _is_capturing():
            counters = _of_graph(index, -(-self._num_counters // LINE) * LINE)
            return Scratch(self._new_parts(), counters)
        held = _scratch.get((index, current_stream(index)))
        if held is None or held.num_counters < self._num_counters:
            held = self._grown()
        if held.num_parts >= self._num_parts:
            return held
        if self._num_parts > MOST_PARTS:
            return Scratch(self._new_parts(), held.counters)
        return self._grown()

    def _new_parts(self) -> Tensor:
        return _new_parts(self._num_parts, self._device)

    def _grown(self) -> Scratch:
        # while torch.compile records a CUDA graph, its thread allocates from the graph's memory
        # pool, where nothing can be kept; another thread does not
        stream = torch.cuda.current_stream(self._device.index)
        with ThreadPoolExecutor(1) as elsewhere:
            sizes = self._num_parts, self._num_counters
            return elsewhere.submit(_grow, self._device.index, stream, *sizes).result()


def _new_parts(count: int, device: torch.device) -> Tensor:
    return Allocation((count,), torch.float32, device)()


def clear() -> None:
    """Drop the scratch memory of all streams."""
    _scratch.clear()


def _grow(index: int, stream: torch.cuda.Stream, num_parts: int, num_counters: int) -> Scratch:
    """Allocate larger scratch memory, which the stream's launches share from now on."""
    with torch.cuda.stream(stream):
        if index not in _stores or _stores[index].numel() < STORE // 2:
            _stores[index] = _zeros(index, STORE)
            _all_stores.append(_stores[index])
        before = _scratch.get((index, stream.cuda_stream))
        if before is not None:
            num_parts = max(num_parts, before.num_parts)
            num_counters = max(num_counters, before.num_counters)
        parts = _new_parts(min(max(num_parts, LEAST_PARTS), MOST_PARTS), _stores[index].device)
        held = Scratch(parts, _zeros(index, max(num_counters, LEAST)))
        _scratch.put((index, stream.cuda_stream), held)
        return held


def _of_graph(index: int, count: int) -> Tensor:
    store = _stores.get(index)
    if store is None or store.numel() < count:
        # the graph zeroes these at every replay
        return _zeros(index, count)
    _stores[index] = store[count:]
    if _stores[index].numel() < STORE // 2:
        # the next call outside a capture then allocates counters, and with them a new store
        _scratch.clear()
    return store


def _zeros(index: int, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")
