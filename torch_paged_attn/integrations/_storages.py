"""Checks of storages, before torch's operators use a tensor. FSDP frees the storages of gathered
parameters, and torch's operators do not check that.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.ops.checks import fail, storage_fault


def readable(x: Tensor) -> bool:
    """Whether the host may read tensor values in a call with x: on a CPU, or with
    PAGED_ATTN_CHECK=1, but not while a graph is traced.
    """
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.device.type == "meta":
        return False
    return x.device.type == "cpu" or environment.CHECK


def check_storages(function: str, **arguments: Any) -> None:
    """Raise ValueError if a storage is too small. Only for calls that are `readable`. A tensor
    inside a `torch.func` transform has no storage of its own: the operators check what it wraps.
    """
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    for name, x in arguments.items():
        if isinstance(x, Tensor) and not is_wrapped(x) and (fault := storage_fault(x)):
            fail(function, name, *fault)


def with_whole_rows(function: str, name: str, x: Tensor) -> Tensor:
    """x (..., head_dim) with a contiguous last dimension, copied if necessary, as in flash-attn."""
    if x.dim() == 0 or x.stride(-1) == 1:
        return x
    if readable(x):
        check_storages(function, **{name: x})
    return x.contiguous()
