"""The operators under `torch.autocast`: q, k and v are cast as for SDPA, other tensors are not.

Memory that the caller has made decides before autocast's dtype: attention runs in the dtype of a
paged cache or of `flash_varlen_out`'s result, and a cache write casts to the dtype of the cache.

`torch.library.register_autocast` cannot be used: it does not support operators with keyword-only
arguments, and it casts every float tensor, ALiBi slopes and sinks too. The kernels here are
registered for the autocast dispatch keys, which are active only inside `torch.autocast`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.ops.backend import dispatch_keys
from torch_paged_attn.ops.checks import FLOAT

# an operator's tensors by their names, and autocast's dtype -> those that are replaced
Rule = Callable[[dict[str, Any], torch.dtype], dict[str, Any]]


def cast_attention(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """q, q_latent, k and v in `dtype`, or in that of `out` if it is given, unless they are 8-bit.

    A paged cache is not cast, because that would copy all of it: q and q_latent are cast to the
    cache's dtype instead, or to the other if the cache is 8-bit.
    """
    inputs: tuple[str, ...] = ("q", "q_latent", "k", "v")
    if not _is_float(given["q"]):
        return {}
    dtype = _dtype_of(given.get("out"), dtype)
    if isinstance(given["k"], Tensor) and given["k"].dim() == 4:  # pages
        inputs, dtype = inputs[:2], _dtype_of(given["k"], dtype)
    return {name: given[name].to(dtype) for name in inputs if _is_float(given.get(name))}


def cast_early(q: Any, k: Any, v: Any) -> tuple[Any, Any, Any]:
    """q, k and v as attention would cast them, for functions that check or send them before."""
    if not isinstance(q, Tensor):
        return q, k, v
    device = q.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return q, k, v
    given = {"q": q, "k": k, "v": v}
    given |= cast_attention(given, torch.get_autocast_dtype(device))
    return given["q"], given["k"], given["v"]


def cast_index(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Index queries and keys in the dtype that loses nothing, so that the ids are those of the
    formula; index queries in that of a paged cache.
    """
    q, k = given["q"], given["k"]
    if not (_is_float(q) and _is_float(k)):
        return {}
    if k.dim() == 4:  # pages
        return {"q": q.to(k.dtype)}
    wide = torch.promote_types(q.dtype, k.dtype)
    return {"q": q.to(wide), "k": k.to(wide)}


def cast_new_tokens(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Keys and values to be stored in the dtype of their cache. An 8-bit cache takes any dtype, but
    the same for both: that which loses nothing.
    """
    key, value = given["key"], given["value"]
    if not (_is_float(key) and _is_float(value)):
        return {}
    wide = torch.promote_types(key.dtype, value.dtype)
    dtype = _dtype_of(given.get("kv_cache", given.get("k_cache")), wide)
    return {"key": key.to(dtype), "value": value.to(dtype)}


def cast_parts(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Partial results of several dtypes in that which loses nothing, as autocast does for `cat`."""
    outs = given["outs"] if "outs" in given else [given["out_a"], given["out_b"]]
    if not outs or not all(map(_is_float, outs)):
        return {}
    wide = outs[0].dtype
    for out in outs[1:]:
        wide = torch.promote_types(wide, out.dtype)
    outs = [out.to(wide) for out in outs]
    return {"outs": outs} if "outs" in given else {"out_a": outs[0], "out_b": outs[1]}


def _is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.dtype in FLOAT


def _dtype_of(memory: Any, otherwise: torch.dtype) -> torch.dtype:
    """The dtype of memory that the caller has made; `otherwise` if it is 8-bit, or not given."""
    return memory.dtype if _is_float(memory) else otherwise


# of the operators that are not attention
RULES: dict[str, Rule] = {
    "select_keys": cast_index,
    **dict.fromkeys(
        ("reshape_and_cache", "reshape_and_cache.split", "reshape_and_cache.quantize"),
        cast_new_tokens,
    ),
    **dict.fromkeys(("merge_states", "merge_states.list"), cast_parts),
}


def bind_autocast(
    library: torch.library.Library, op: str, overloads: tuple[torch._ops.OpOverload, ...]
) -> None:
    """Register, for each of the operator's overloads and each backend's devices, a kernel that
    casts the inputs and calls the overload again outside autocast.
    """
    rule = RULES.get(op, cast_attention)
    for overload in overloads:
        for key in dispatch_keys():
            library.impl(overload, _kernel(rule, overload), f"Autocast{key}")


def _kernel(rule: Rule, overload: torch._ops.OpOverload) -> Callable[..., Any]:
    names = [x.name for x in overload._schema.arguments if not x.kwarg_only]

    def kernel(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        first = next(iter(given.values()))
        device = (first[0] if isinstance(first, tuple | list) else first).device
        given |= rule(given, torch.get_autocast_dtype(device.type))
        with torch._C._DisableAutocast():
            return overload(*given.values(), **options)

    return kernel
