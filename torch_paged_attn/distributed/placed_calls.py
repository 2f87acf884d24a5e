"""Calls on DTensors that lie as a rule wants them, past DTensor's dispatcher.

Nothing travels then: the call is the operator's on local tensors, and where the results lie is
known from calls like it. Only where nobody else wants to see the call: no gradient is asked for, no
mode is on, nothing is compiled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from torch_paged_attn.lru import LRU

try:
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
except ImportError:  # a torch that has them elsewhere: DTensor's dispatcher does all
    DTensorSpec = TensorMeta = None  # type: ignore[assignment,misc]

# descriptions of calls
MOST_KNOWN = 1024

_modes = [
    getattr(torch._C, name, lambda: 1)
    for name in ("_len_torch_dispatch_stack", "_len_torch_function_stack")
]
_known = LRU(MOST_KNOWN)


class Placed(NamedTuple):
    """Where the results of a call lie."""

    out: Any
    lse: Any


class _Replicated(NamedTuple):
    """What a rule sees of a plain tensor: the same on all ranks."""

    tensor_meta: Any
    placements: tuple[Any, ...]
    mesh: Any


def placed_alike(
    names: tuple[str, ...], given: dict[str, Any], rule: Callable[..., Any]
) -> Placed | None:
    """Where the results of a call lie, if its arguments lie as a strategy of `rule` wants them;
    None for any other call, which DTensor dispatches. `names`: the arguments that a rule takes, in
    its order.
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
        # False: such calls are DTensor's
        found = _placed(names, given, rule) or False
        _known.put(described, found)
    return found or None


def attend_locally(
    function: Callable[..., tuple[Tensor, Tensor]], given: dict[str, Any], placed: Placed
) -> tuple[Tensor, Tensor]:
    """The results of a call for which `placed_alike` has an answer."""
    local = {name: x._local_tensor if isinstance(x, DTensor) else x for name, x in given.items()}
    results: Any = [
        # what `__init__` would do besides is to ask whether anything is compiled
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
    except ValueError:  # DTensor raises it
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
