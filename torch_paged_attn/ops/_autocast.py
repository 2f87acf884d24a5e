"""Attention under `torch.autocast`: q, k and v are cast as for SDPA, other tensors are not.

`torch.library.register_autocast` cannot be used: it does not support operators with keyword-only
arguments, and it casts every float tensor, ALiBi slopes and sinks too. The kernels here are
registered for the autocast dispatch keys, which are active only inside `torch.autocast`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import arguments
from torch_paged_attn.ops.backend import dispatch_keys
from torch_paged_attn.ops.checks import FLOAT


def cast_inputs(op: str, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments with q, q_latent, k and v cast to `dtype`, unless they are 8-bit.

    A paged cache is not cast, because that would copy all of it: q and q_latent are cast to the
    cache's dtype instead, or to `dtype` if the cache is 8-bit.
    """
    names = [x.name for x in arguments(op) if not x.keyword_only]
    given = dict(zip(names, args, strict=False))
    inputs: tuple[str, ...] = ("q", "k", "v")
    is_slots = op == "selected_attention" and given["k"].dim() == 4
    if given.get("block_table") is not None or is_slots:
        inputs, dtype = ("q",), given["k"].dtype if given["k"].dtype in FLOAT else dtype
    if given["q"].dtype not in FLOAT:
        return args
    for name in (*inputs, "q_latent"):
        if isinstance(x := given.get(name), Tensor) and x.dtype in FLOAT:
            given[name] = x.to(dtype)
    return tuple(given.values())


def bind_autocast(
    library: torch.library.Library, op: str, overloads: tuple[torch._ops.OpOverload, ...]
) -> None:
    """Register, for each of the operator's overloads and each backend's devices, a kernel that
    casts the inputs and calls the overload again outside autocast.
    """
    for overload in overloads:
        name = overload._schema.name.partition("::")[2]
        for key in dispatch_keys():
            library.impl(name, _kernel(op, overload), f"Autocast{key}")


def _kernel(op: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(args[0].device.type)
        args = cast_inputs(op, args, dtype)
        with torch._C._DisableAutocast():
            return overload(*args, **options)

    return kernel
