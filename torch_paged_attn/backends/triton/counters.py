"""Counters that are zero before every launch and after it: kernels set back what they count.

Launches of one stream follow one another and share counters. A captured launch may run at any time
on any stream once its graph is replayed, so it gets counters of its own, that nobody gets again:
four bytes each, from a store that was zeroed before the capture.
"""

import torch
from torch import Tensor
from triton.runtime.driver import driver

# counters for captured launches, and the least that a stream gets
STORE = 1 << 18
LEAST = 1 << 13

_of_streams: dict[tuple[int, int], Tensor] = {}
_stores: dict[int, Tensor] = {}


def zeroed_counters(device: torch.device, count: int) -> Tensor:
    """At least `count` int32 zeros for the next launch on the current stream."""
    if device.type != "cuda":
        return torch.zeros(count, dtype=torch.int32, device=device)
    index = torch.cuda.current_device() if device.index is None else device.index
    store = _stores.get(index)
    if torch.cuda.is_current_stream_capturing():
        if store is None or store.numel() < count:
            # the graph zeroes these itself, at every replay
            return torch.zeros(count, dtype=torch.int32, device=device)
        _stores[index] = store[count:]
        return store
    if store is None or store.numel() < LEAST:
        _stores[index] = torch.zeros(STORE, dtype=torch.int32, device=device)
    key = index, driver.active.get_current_stream(index)
    counters = _of_streams.get(key)
    if counters is None or counters.numel() < count:
        counters = torch.zeros(max(count, LEAST), dtype=torch.int32, device=device)
        _of_streams[key] = counters
    return counters
