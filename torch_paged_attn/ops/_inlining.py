"""Letting torch.compile see into an op: instead of one opaque node, the kernels that it launches.

A backend whose kernels a graph can hold has a function `traceable(name)`: the op as a function to
be traced, or None. It is asked only where all sizes are plain numbers, because what the host
decides (tiles, grids, splits) would otherwise be decided for one size and guarded: with dynamic
shapes an op stays one node, and no new size compiles anything. `torch.export` keeps the ops too;
compiling an exported program looks into them.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _pytree as pytree


def _is_static(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value._has_symbolic_sizes_strides
    return not isinstance(value, torch.SymInt)


def inline(name: str, library: torch.library.Library, backend: Callable[[], Any]) -> None:
    """Have torch.compile look into the op `name` on GPUs. `backend()` is the module that serves
    them.
    """

    def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        leaves = pytree.tree_leaves((args, kwargs))
        device = next(x for x in leaves if isinstance(x, Tensor)).device
        is_static = all(map(_is_static, leaves))
        if device.type == "cuda" and is_static and not custom_triton_ops_decomposition_disabled():
            traceable = getattr(backend(), "traceable", None)
            function = traceable and traceable(name)
            if function:
                with mode:
                    return function(*args, **(kwargs or {}))
        return mode.__torch_dispatch__(op, types, args, kwargs)

    # a rule belongs to the whole operator, whatever the overload
    torch.library.register_torch_dispatch(
        f"paged_attn::{name}", FunctionalTensorMode, rule, lib=library
    )
