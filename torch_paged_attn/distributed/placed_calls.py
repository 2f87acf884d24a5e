"""Calls on DTensors whose placements fit a sharding rule, without DTensor's dispatcher.

No tensor has to be redistributed then: the operator runs on the local tensors, and the placements
of the results are remembered from an earlier call of the same kind. This saves DTensor's host time.
It is used only if no gradient is needed, no dispatch mode is active and nothing is compiled,
because these have to see the call.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torch_paged_attn.lru import LRU

try:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
except ImportError:  # another torch: all calls go through DTensor's dispatcher
    DTensorSpec = TensorMeta = None  # type: ignore[assignment,misc]

# the largest number of remembered kinds of calls
MOST_KNOWN = 1024

_modes = [
    getattr(torch._C, name, lambda: 1)
    for name in ("_len_torch_dispatch_stack", "_len_torch_function_stack")
]
_known = LRU(MOST_KNOWN)


class Placed(NamedTuple):
    """The `DTensorSpec`s of a call's results."""

    out: Any
    lse: Any


class _Replicated(NamedTuple):
    """A plain tensor as a rule sees it: replicated, because it is the same on all ranks."""

    tensor_meta: Any
    placements: tuple[Any, ...]
    mesh: Any


def placed_alike(
    names: tuple[str, ...], given: dict[str, Any], rule: Callable[..., Any]
) -> Placed | None:
    """The specs of a call's results if its arguments are placed as one of the rule's strategies
    requires; None for any other call, which DTensor has to dispatch.

    names: the arguments that `rule` takes, in its order
    given: the call's arguments by name
    """
    if DTensorSpec is None or torch.compiler.is_compiling() or any(mode() for mode in _modes):
        return None
    wants_gradients = torch.is_grad_enabled()
    key: list[Any] = [rule, given.get("out_dtype")]
    for name, x in given.items():
        if isinstance(x, Tensor):
            if wants_gradients and x.requires_grad:
                return None
            key += name, x._spec if isinstance(x, DTensor) else x.shape
    found = _known.get(described := tuple(key))
    if found is None:
        # False: calls of this kind go through DTensor's dispatcher
        found = _placed(names, given, rule) or False
        _known.put(described, found)
    return found or None


def attend_locally(
    function: Callable[..., tuple[Tensor, Tensor]], given: dict[str, Any], placed: Placed
) -> tuple[Tensor, Tensor]:
    """The results of a call for which `placed_alike` returned `placed`."""
    local = {name: x._local_tensor if isinstance(x, DTensor) else x for name, x in given.items()}
    results: Any = [
        # `__init__` would also check whether something is compiled, which is known here
        DTensor.__new__(DTensor, x, spec, requires_grad=False)
        for x, spec in zip(function(**local), placed, strict=True)
    ]
    return results[0], results[1]


def _placed(
    names: tuple[str, ...], given: dict[str, Any], rule: Callable[..., Any]
) -> Placed | None:
    mesh = next((x.device_mesh for x in given.values() if isinstance(x, DTensor)), None)
    if mesh is None or mesh.get_coordinate() is None:
        return None
    specs: list[Any] = []
    for x in (given.get(name) for name in names):
        if isinstance(x, DTensor):
            if x.device_mesh != mesh:
                return None
            specs.append(x._spec)
        elif isinstance(x, Tensor):
            meta = TensorMeta(x.shape, x.stride(), x.dtype)
            specs.append(_Replicated(meta, (Replicate(),) * mesh.ndim, mesh))
        else:
            specs.append(x)
    try:
        strategies = rule(*specs)
    except ValueError:  # raised again when DTensor dispatches the call
        return None
    placed: list[list[Any]] = [[], []]
    for dim in range(mesh.ndim):
        lies = [x.placements[dim] if hasattr(x, "tensor_meta") else None for x in specs]
        wanted = next((results for results, inputs in strategies if inputs == lies), None)
        if wanted is None:
            return None
        for found, placement in zip(placed, wanted, strict=True):
            found.append(placement)
    q, v = given["q"], given["v"]
    tokens, heads, _ = q.shape
    out = (tokens, heads, v.shape[-1]), given.get("out_dtype") or q.dtype
    lse = (heads, tokens), torch.float32
    made = []
    for (shape, dtype), placements in zip((out, lse), placed, strict=True):
        stride = torch.empty(shape, device="meta").stride()
        meta = TensorMeta(torch.Size(shape), stride, dtype)
        made.append(DTensorSpec(mesh, tuple(placements), tensor_meta=meta))
    return Placed(*made)
