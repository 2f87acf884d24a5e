"""torch.compile traces the kernel launches of an op, where it would otherwise see one opaque node.

`Backend.traceable` returns the function to trace. An op stays one opaque node in these cases:

- A size is symbolic. Tiles, grids and splits are chosen from sizes on the host, so that tracing
  would bind the graph to one size; an opaque node serves all sizes without recompiling.
- An input requires grad. Activation checkpointing and the partitioner decide by op what is saved
  for the backward.
- `torch.export` runs. The kernels are traced when the exported program is compiled.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _pytree as pytree

from torch_paged_attn.ops.backend import serving_device


def _is_static(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value._has_symbolic_sizes_strides
    return not isinstance(value, torch.SymInt)


def name_of(op: Any) -> str:
    """An operator's name for `Backend.function`: `flash_varlen`, or with its overload
    `reshape_and_cache.split`.
    """
    name, overload = op._schema.name.partition("::")[2], op._schema.overload_name
    return f"{name}.{overload}" if overload else name


def inline(name: str, library: torch.library.Library) -> None:
    """Make torch.compile trace the kernel launches of the op `name`."""

    def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        device = tensors[0].device
        # torch_xla's own graphs hold operators
        is_opaque = device.type == "xla" or any(x.requires_grad for x in tensors)
        is_static = all(map(_is_static, leaves))
        if not is_opaque and is_static and not custom_triton_ops_decomposition_disabled():
            backend, _ = serving_device(device)
            function = backend.traceable(name_of(op)) if backend is not None else None
            if function is not None:
                with mode:
                    result = function(*args, **(kwargs or {}))
                if result is not NotImplemented:
                    return result
        return mode.__torch_dispatch__(op, types, args, kwargs)

    # torch registers a rule for all overloads of an operator together
    torch.library.register_torch_dispatch(
        f"paged_attn::{name}", FunctionalTensorMode, rule, lib=library
    )
