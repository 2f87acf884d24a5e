"""Tensors for loops whose lengths grow with each step."""

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

HEADS, KV_HEADS, DIM = 32, 8, 128
BATCH = 4

Step = Callable[[int], Any]


class New:
    """Makes tensors on a device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def __call__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.device)

    def qkv(self, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of as many tokens."""
        return self(*shape, HEADS, DIM), *(self(*shape, KV_HEADS, DIM) for _ in "kv")

    def ints(self, values: Any) -> Tensor:
        return torch.tensor([*values], dtype=torch.int32, device=self.device)

    def bounds(self, lengths: Any) -> Tensor:
        """cu_seqlens of sequences of these lengths."""
        return self.ints([0, *itertools.accumulate(lengths)])

    def pages(self, count: int, page_size: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        """A cache of pages: keys and values, as `flash_varlen` takes them."""
        return self(2, count, page_size, KV_HEADS, DIM, dtype=dtype).transpose(2, 3)
