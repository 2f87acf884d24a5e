"""A cache of constant index tensors that every layer of a model needs.

A cached tensor is used only on the CUDA stream that made it, so that no synchronisation is needed.
A call that is traced or captured in a CUDA graph gets a new tensor, because a graph keeps no
reference to tensors that were made outside of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.lru import LRU

MOST = 256
_kept = LRU(MOST)
# torch's function, which is faster than making a Python Stream object
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def clear() -> None:
    """Drop all cached tensors."""
    _kept.clear()


def multiples(seqlen: int, batch: int, like: Tensor) -> Tensor:
    """int32 cu_seqlens of `batch` sequences of one length, on the device of `like`."""

    def make() -> Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=like.device) * seqlen

    return _keep(("multiples", seqlen, batch), like, make)


def row_numbers(batch: int, like: Tensor) -> Tensor:
    """int32 (batch, 1): the block table of a cache whose row b is the only page of sequence b."""

    def make() -> Tensor:
        return torch.arange(batch, dtype=torch.int32, device=like.device)[:, None]

    return _keep(("row_numbers", batch), like, make)


def count(length: int, like: Tensor) -> Tensor:
    """int64 0, 1, 2, ... length - 1."""

    def make() -> Tensor:
        return torch.arange(length, device=like.device)

    return _keep(("count", length), like, make)


def repeated(value: int, batch: int, like: Tensor) -> Tensor:
    """int32 (batch,), all entries `value`."""

    def make() -> Tensor:
        return torch.full((batch,), value, dtype=torch.int32, device=like.device)

    return _keep(("repeated", value, batch), like, make)


def _current_stream(device: torch.device) -> int:
    if _raw_stream is not None and device.index is not None:
        return _raw_stream(device.index)
    return torch.cuda.current_stream(device).cuda_stream


def _keep(what: tuple[Any, ...], like: Tensor, make: Callable[[], Tensor]) -> Tensor:
    stream = None
    if torch.compiler.is_compiling() or type(like) is not Tensor:
        return make()
    device = like.device
    if device.type == "cuda":
        if torch.cuda.is_current_stream_capturing():
            return make()
        stream = _current_stream(device)
    elif device.type != "cpu":
        return make()
    key = (*what, device, stream)
    if (kept := _kept.get(key)) is not None:
        return kept
    # a tensor made under inference_mode could not be saved for a backward pass
    with torch.inference_mode(False):
        made = make()
    if type(made) is Tensor:  # not a tracer's FakeTensor
        _kept.put(key, made)
    return made
