"""Letting torch.compile see into an op: instead of one opaque node, the kernels that it launches.

`Backend.traceable` gives the op as a function to be traced. It is asked only where all sizes are
plain numbers, because what the host decides (tiles, grids, splits) would otherwise be decided for
one size and guarded: with dynamic shapes an op stays one node, and no new size compiles anything.
So does a call of which a gradient is asked for: checkpointing policies and the partitioner, which
decide what is kept for the backward, go by the op.
`torch.export` keeps the ops too; compiling an exported program looks into them.
"""

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensorMode
from torch.utils import _pytree as pytree

from torch_paged_attn.ops.backend import serving

# devices whose kernels a graph can hold, and where their backends are bound
DISPATCH_KEYS = {"cuda": "CUDA", "neuron": "PrivateUse1"}


def _is_static(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value._has_symbolic_sizes_strides
    return not isinstance(value, torch.SymInt)


def name_of(op: Any) -> str:
    """As backends know it: with its overload, if it has one."""
    name, overload = op._schema.name.partition("::")[2], op._schema.overload_name
    return f"{name}.{overload}" if overload else name


def inline(name: str, library: torch.library.Library) -> None:
    """Have torch.compile look into the op `name`."""

    def rule(mode: Any, op: Any, types: Any, args: Any, kwargs: Any) -> Any:
        from torch.export._trace import custom_triton_ops_decomposition_disabled

        leaves = pytree.tree_leaves((args, kwargs))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        key = DISPATCH_KEYS.get(tensors[0].device.type)
        if any(x.requires_grad for x in tensors):
            key = None
        is_static = all(map(_is_static, leaves))
        if key and is_static and not custom_triton_ops_decomposition_disabled():
            backend, _ = serving(key)
            function = backend.traceable(name_of(op)) if backend is not None else None
            if function is not None:
                with mode:
                    result = function(*args, **(kwargs or {}))
                if result is not NotImplemented:
                    return result
        return mode.__torch_dispatch__(op, types, args, kwargs)

    # a rule belongs to the whole operator, whatever the overload
    torch.library.register_torch_dispatch(
        f"paged_attn::{name}", FunctionalTensorMode, rule, lib=library
    )
