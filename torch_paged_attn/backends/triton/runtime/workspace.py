"""Memory that the launches of a stream share: they follow one another.

Counters are zero before every launch and after it: kernels set back what they count. Room holds
anything from one line of a kernel to another, not to another launch: two threads may launch on one
stream in turn.

A captured launch may run at any time on any stream once its graph is replayed, so it gets memory of
its own: counters that nobody gets again, four bytes each, from a store that was zeroed before the
capture, and room in the graph's pool.
"""

from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from triton.runtime.driver import driver

from torch_paged_attn.backends.triton.runtime.launch import current_tape, is_traced

# counters for captured launches, of which half are there whenever a capture begins after a call
# like those in it, and the least that a stream gets
STORE = 1 << 20
LEAST = 1 << 13

# by device and stream: counters and room
_held: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
_stores: dict[int, Tensor] = {}
# stores are never given back: a graph does not say when it was replayed for the last time
_kept: list[Tensor] = []


def zeroed_counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros for the next launch on the current stream."""
    if device.type != "cuda" or is_traced():
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    counters, _ = shared_memory(index, driver.active.get_current_stream(index), count, 0)
    if (tape := current_tape()) is not None:
        tape.counters, tape.num_counters = counters, count
    return counters


def shared_memory(index: int, stream: int, count: int, room: int) -> tuple[Tensor, Tensor]:
    """At least `count` int32 zeros and `room` bytes for the next launch on a device's current
    stream.
    """
    held = _held.get((index, stream))
    if torch.cuda.is_current_stream_capturing():
        return _of_graph(index, count), _bytes(index, room)
    if held is not None and held[0].numel() >= count and held[1].numel() >= room:
        return held
    # while torch.compile runs what will be a graph, all that its thread allocates comes from the
    # graph's pool, where nothing can be kept
    with ThreadPoolExecutor(1) as elsewhere:
        on = torch.cuda.current_stream(index)
        return elsewhere.submit(_grow, index, on, count, room).result()


def _grow(index: int, on: torch.cuda.Stream, count: int, room: int) -> tuple[Tensor, Tensor]:
    """`shared_memory`, which is kept."""
    with torch.cuda.stream(on):
        if index not in _stores or _stores[index].numel() < STORE // 2:
            _stores[index] = _zeros(index, STORE)
            _kept.append(_stores[index])
        held = _held.get((index, on.cuda_stream))
        counters, bytes_ = held or (_zeros(index, max(count, LEAST)), _bytes(index, room))
        if counters.numel() < count:
            counters = _zeros(index, count)
        if bytes_.numel() < room:
            bytes_ = _bytes(index, room)
        _held[index, on.cuda_stream] = counters, bytes_
        return counters, bytes_


def _of_graph(index: int, count: int) -> Tensor:
    store = _stores.get(index)
    if store is None or store.numel() < count:
        # the graph zeroes these itself, at every replay
        return _zeros(index, count)
    _stores[index] = store[count:]
    if _stores[index].numel() < STORE // 2:
        # the next call outside a capture fills the store up
        _held.clear()
    return store


def _zeros(index: int, count: int) -> Tensor:
    return torch.zeros(count, dtype=torch.int32, device=f"cuda:{index}")


def _bytes(index: int, room: int) -> Tensor:
    return torch.empty(room, dtype=torch.uint8, device=f"cuda:{index}")
