"""Index tensors that every layer of a model needs alike, made once and kept for the next call.

A kept tensor is read only on the stream that made it, so nothing has to wait for it. A call that is
traced or captured in a CUDA graph gets a tensor of its own: a graph holds no reference to tensors
from outside of it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.lru import LRU

MOST = 256
_kept = LRU(MOST)
# torch's own, without a Stream made in Python
_raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def clear() -> None:
    """Give the memory of all kept tensors back."""
    _kept.clear()


def multiples(seqlen: int, batch: int, like: Tensor) -> Tensor:
    """int32 cu_seqlens of `batch` sequences of one length, on the device of `like`."""

    def make() -> Tensor:
        return torch.arange(batch + 1, dtype=torch.int32, device=like.device) * seqlen

    return _keep(("multiples", seqlen, batch), like, make)


def row_numbers(batch: int, like: Tensor) -> Tensor:
    """int32 (batch, 1): the block table of a cache whose rows are pages."""

    def make() -> Tensor:
        return torch.arange(batch, dtype=torch.int32, device=like.device)[:, None]

    return _keep(("row_numbers", batch), like, make)


def count(length: int, like: Tensor) -> Tensor:
    """int64 0, 1, 2, ... length - 1."""

    def make() -> Tensor:
        return torch.arange(length, device=like.device)

    return _keep(("count", length), like, make)


def repeated(value: int, batch: int, like: Tensor) -> Tensor:
    """int32 (batch,) of one value."""

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
    if type(made) is Tensor:  # not the fake one of a tracer
        _kept.put(key, made)
    return made
