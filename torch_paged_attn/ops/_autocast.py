"""Attention under `torch.autocast`: q, k and v are cast as SDPA's are, the rest is left alone.

`torch.library.register_autocast` serves no operator with options, and casts every float tensor,
slopes and sinks too. These kernels stand on dispatch keys that are on inside autocast only.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import arguments
from torch_paged_attn.ops.checks import FLOAT

KEYS = "AutocastCPU", "AutocastCUDA", "AutocastXLA", "AutocastPrivateUse1"


def cast_inputs(op: str, args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """The arguments with q, q_latent, k and v in `dtype`, those of float32 or 16 bits. A cache,
    which a cast would copy whole, stays as it is: q goes with it.
    """
    names = [x.name for x in arguments(op) if not x.keyword_only]
    given = dict(zip(names, args, strict=False))
    inputs: tuple[str, ...] = ("q", "k", "v")
    if given.get("block_table") is not None:
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
    """Cast before a call of an operator, or of its twin, on each device."""
    for overload in overloads:
        name = overload._schema.name.partition("::")[2]
        for key in KEYS:
            library.impl(name, _kernel(op, overload), key)


def _kernel(op: str, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    def kernel(*args: Any, **options: Any) -> Any:
        dtype = torch.get_autocast_dtype(args[0].device.type)
        args = cast_inputs(op, args, dtype)
        with torch._C._DisableAutocast():
            return overload(*args, **options)

    return kernel
