"""Letting torch.compile see into an op: instead of one opaque node, the kernels that it launches.

A backend whose kernels a graph can hold has a function `traceable(name)`: the op as a function to
be traced, or None. That function may answer NotImplemented: this call stays one node. It is asked
only where all sizes are plain numbers, because what the host decides (tiles, grids, splits) would
otherwise be decided for one size and guarded: with dynamic shapes an op stays one node, and no new
size compiles anything. `torch.export` keeps the ops too; compiling an exported program looks into
them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _pytree as pytree

# devices whose kernels a graph can hold, and where their backends are bound
DISPATCH_KEYS = {"cuda": "CUDA", "neuron": "PrivateUse1"}


def _is_static(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value._has_symbolic_sizes_strides
    return not isinstance(value, torch.SymInt)


def inline(name: str, library: torch.library.Library, backend: Callable[[str], Any]) -> None:
    """Have torch.compile look into the op `name`. `backend(key)` is the module that serves a
    dispatch key, or None.
    """

    def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        leaves = pytree.tree_leaves((args, kwargs))
        device = next(x for x in leaves if isinstance(x, Tensor)).device
        key = DISPATCH_KEYS.get(device.type)
        is_static = all(map(_is_static, leaves))
        if key and is_static and not custom_triton_ops_decomposition_disabled():
            traceable = getattr(backend(key), "traceable", None)
            function = traceable and traceable(name)
            if function:
                with mode:
                    result = function(*args, **(kwargs or {}))
                if result is not NotImplemented:
                    return result
        return mode.__torch_dispatch__(op, types, args, kwargs)

    # a rule belongs to the whole operator, whatever the overload
    torch.library.register_torch_dispatch(
        f"paged_attn::{name}", FunctionalTensorMode, rule, lib=library
    )
