"""Storages of tensors that torch's own operators read or write on the way to ours: those operators
do not look whether a storage was freed, as FSDP frees those of gathered parameters.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.ops.checks import storage_fault


def readable(x: Tensor) -> bool:
    """Whether the host may look at values of this call."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type == "meta":
        return False
    return x.device.type == "cpu" or environment.CHECK


def check_storages(function: str, **arguments: Any) -> None:
    """Raise for a tensor whose storage was freed or cut. For calls that are `readable`."""
    for name, x in arguments.items():
        if isinstance(x, Tensor) and (fault := storage_fault(x)):
            came, allowed = fault
            raise ValueError(f"{function}: {name} {came}; allowed: {allowed}")


def with_whole_rows(function: str, name: str, x: Tensor) -> Tensor:
    """x (..., head_dim) as kernels read it: the last dimension contiguous, other strides as they
    come. As in flash-attn, a tensor that is not so is copied.
    """
    if x.dim() == 0 or x.stride(-1) == 1:
        return x
    if readable(x):
        check_storages(function, **{name: x})
    return x.contiguous()
