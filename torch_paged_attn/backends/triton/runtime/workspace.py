"""Memory that a call needs besides its arguments.

`Allocation` makes results, and scratch that goes back to PyTorch's allocator when the call returns;
the allocator hands it out again in the order of the stream.

Counters are zero before every launch and after it: kernels set back what they count. So the
launches of a stream, which run one after another, share them. A launch that a CUDA graph captures
may run at any time and on any stream once the graph is replayed, so it gets counters that no other
launch has, from a store that was zeroed before the capture.
"""

import itertools
import operator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.backends.triton.runtime.lru import LRU

# streams whose counters are kept, and the fewest that each of them has
MOST_STREAMS = 32
LEAST = 1 << 13

# counters of a device for captured launches; at least half of them are left when a capture begins
# after a call like those in it
STORE = 1 << 20

# counters of two launches do not share a line of the cache
LINE = 32

# what code that torch.compile writes allocates with: it takes a third of the time of `torch.empty`
_empty_on_current_device: Any = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)

# by device and stream
_counters = LRU(MOST_STREAMS)
_stores: dict[int, Tensor] = {}
# stores are never given back: a graph does not say when it was replayed for the last time
_all_stores: list[Tensor] = []


class Allocation:
    """Called, a new contiguous tensor, on the current device where `device` is a GPU."""

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
        """Of the shape, dtype and device of `x`."""
        return cls(x.shape, x.dtype, x.device)

    def __call__(self) -> Tensor:
        # torch.empty fills what it returns where algorithms have to be deterministic
        if self._is_quick and not torch.are_deterministic_algorithms_enabled():
            return _empty_on_current_device(self.shape, self.strides, self.dtype)
        return torch.empty(self.shape, dtype=self.dtype, device=self.device)


def current_stream(device: int) -> int:
    """The handle of a device's current stream."""
    if _raw_stream is not None:
        return _raw_stream(device)
    return torch.cuda.current_stream(device).cuda_stream


def zeroed_counters(count: int, device: torch.device) -> Tensor:
    """At least `count` int32 zeros for the next launch on the current stream."""
    if device.type != "cuda" or is_traced():
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = device.index
    if torch.cuda.is_current_stream_capturing():
        return _of_graph(index, -(-count // LINE) * LINE)
    held = _counters.get((index, current_stream(index)))
    if held is not None and held.numel() >= count:
        return held
    # while torch.compile runs what is to become a graph, all that its thread allocates comes from
    # the graph's pool, where nothing can be kept
    with ThreadPoolExecutor(1) as elsewhere:
        stream = torch.cuda.current_stream(index)
        return elsewhere.submit(_grow, index, stream, count).result()


def clear() -> None:
    """Give the counters of all streams back."""
    _counters.clear()


def _grow(index: int, stream: torch.cuda.Stream, count: int) -> Tensor:
    """Counters that the stream's launches share from now on."""
    with torch.cuda.stream(stream):
        if index not in _stores or _stores[index].numel() < STORE // 2:
            _stores[index] = _zeros(index, STORE)
            _all_stores.append(_stores[index])
        counters = _zeros(index, max(count, LEAST))
        _counters.put((index, stream.cuda_stream), counters)
        return counters


def _of_graph(index: int, count: int) -> Tensor:
    store = _stores.get(index)
    if store is None or store.numel() < count:
        # the graph zeroes these itself, at every replay
        return _zeros(index, count)
    _stores[index] = store[count:]
    if _stores[index].numel() < STORE // 2:
        # the next call outside a capture finds no counters, and makes a new store too
        _counters.clear()
    return store


def _zeros(index: int, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")
