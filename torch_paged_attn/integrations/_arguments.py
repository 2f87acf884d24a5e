"""Translation of flash-attn's arguments into those of `flash_varlen`."""

import numbers
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_paged_attn.integrations import _constants
from torch_paged_attn.integrations._dropout import drawn_rng_state
from torch_paged_attn.integrations._kvcache import end_to_end
from torch_paged_attn.integrations._storages import check_storages, readable
from torch_paged_attn.ops import checks
from torch_paged_attn.ops.checks import fail
from torch_paged_attn.ops.kinds import refuse_nested

Window: TypeAlias = tuple[int | None, int | None]


# what to do instead of giving an argument that is not supported
INSTEAD = {
    "seqused_q": "leave unused rows out of q, and their numbers out of cu_seqlens_q",
    "leftpad_k": "leave the padding out of k and v, or call flash_attn_with_kvcache with"
    " cache_leftpad",
    "attention_chunk": "pass its mask as attn_bias to torch_paged_attn.flash_varlen",
    "rotary_seqlens": "rotate q and k before the call",
}


def refuse(name: str, **arguments: Any) -> None:
    """Raise NotImplementedError for an argument that is given, since none of these is supported."""
    for argument, value in arguments.items():
        if isinstance(value, Tensor) or value:
            checks.refuse(name, f"{argument} is not supported", INSTEAD.get(argument, ""))


def one_of(name: str, **arguments: Any) -> Any:
    """The value of the one argument that is not None; ValueError if several are, which are names of
    one argument.
    """
    given = [argument for argument, value in arguments.items() if value is not None]
    if len(given) > 1:
        fail(name, " and ".join(arguments), "both", "one argument, given once")
    return arguments[given[0]] if given else None


def check_tensors(name: str, **arguments: Any) -> None:
    """Raise TypeError for an argument that is not a tensor, or a nested one."""
    for argument, value in arguments.items():
        if not isinstance(value, Tensor):
            fail(name, argument, f"{value!r:.60}", "a tensor", TypeError)
        refuse_nested(name, argument, value)


def both_sides(name: str, window_size: Any) -> tuple[int, int]:
    """Keys seen before and after a query by `window_size`; -1 is unbounded, as None and
    any negative number are there. TypeError unless it is a pair of integers.
    """
    if isinstance(window_size, tuple | list) and len(window_size) == 2:
        left, right = window_size
        left, right = -1 if left is None else left, -1 if right is None else right
        if is_size(left) and is_size(right):
            if type(left) is type(right) is int:  # comparing a SymInt would put a guard on it
                return max(left, -1), max(right, -1)
            return left, right
    expected = "a pair (left, right) of integers, None for unbounded"
    fail(name, "window_size", f"{window_size!r:.60}", expected, TypeError)


def is_size(value: Any) -> bool:
    """Whether a value is an integer, in a graph too."""
    # an abstract class takes microseconds to ask
    return type(value) is int or isinstance(value, numbers.Integral | torch.SymInt)


def _check_numbers(name: str, **arguments: Any) -> None:
    """TypeError for an option that is no number: an operator would say so by its schema, after
    `flash_attn_with_kvcache` has written.
    """
    for argument, value in arguments.items():
        if not isinstance(value, numbers.Real | torch.SymFloat | torch.SymInt | Tensor):
            fail(name, argument, f"{value!r:.60}", "a number", TypeError)


def asks_gradient(q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None = None) -> bool:
    """Whether a call needs gradients; `extra` is its bias or its sinks."""
    if not torch.is_grad_enabled():
        return False
    asks = q.requires_grad or k.requires_grad or v.requires_grad
    return asks or (extra is not None and extra.requires_grad)


def of_equal_lengths(
    q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None = None
) -> dict[str, Any]:
    """The tensor arguments of `flash_varlen` for a batch of sequences of one length.

    q: (batch, seqlen_q, num_heads, head_dim)
    k, v: (batch, seqlen_k, num_kv_heads, head_dim), (..., head_dim_v)
    extra: a bias or sinks that may need a gradient

    Keys are packed if that needs no copy, or if a gradient is needed. Otherwise each sequence is
    one page, so that keys with any strides, such as (batch, heads, seqlen) caches, are not copied.
    """
    batch, seqlen_q = q.shape[:2]
    seqlen_k = k.shape[1]
    found: dict[str, Any] = {
        "q": q.flatten(0, 1),
        "cu_seqlens_q": _constants.multiples(seqlen_q, batch, q),
        "cu_seqlens_k": _constants.multiples(seqlen_k, batch, q),
        "max_seqlen_q": seqlen_q,
        "max_seqlen_k": seqlen_k,
    }
    if (end_to_end(k) and end_to_end(v)) or asks_gradient(q, k, v, extra):
        return found | {"k": k.flatten(0, 1), "v": v.flatten(0, 1)}
    table = _constants.row_numbers(batch, q)
    return found | {"k": k.transpose(1, 2), "v": v.transpose(1, 2), "block_table": table}


def flash_varlen_arguments(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    out: Tensor | None,
    window_size: Window,
    s_aux: Tensor | None,
    max_seqlen_q: int | Tensor | None,
    max_seqlen_k: int | Tensor | None,
    causal: bool,
    softcap: float,
    dropout_p: float = 0.0,
    deterministic: bool = True,
    return_attn_probs: bool = False,
    qv: Tensor | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """The arguments of `flash_varlen` whose values differ from the defaults.

    name: the calling function, for errors
    qv: q_latent, with which FlashAttention-3's scale counts the elements of both
    arguments: further arguments of `flash_varlen`, which are passed on
    """
    arguments |= {"q": q, "k": k, "v": v}
    if qv is not None:
        arguments["q_latent"] = qv
        if arguments.get("softmax_scale") is None:
            arguments["softmax_scale"] = (q.shape[-1] + qv.shape[-1]) ** -0.5
    scale = arguments.get("softmax_scale")
    _check_numbers(name, softmax_scale=1.0 if scale is None else scale, softcap=softcap)
    if dropout_p > 0:
        if return_attn_probs:
            checks.refuse(name, "return_attn_probs is not supported with dropout_p > 0")
        arguments |= {"dropout_p": dropout_p, "rng_state": drawn_rng_state(q.device)}
    if window_size != (-1, -1):
        left, right = both_sides(name, window_size)
        arguments |= {"window_size_left": left, "window_size_right": right}
    if not deterministic and asks_gradient(q, k, v, s_aux):
        arguments["deterministic"] = False  # of the backward
    if causal:
        arguments["causal"] = True
    if softcap:
        arguments["softcap"] = softcap
    if out is not None:
        arguments["out_dtype"] = out.dtype
    elif q.dtype.itemsize == 1:
        arguments["out_dtype"] = torch.bfloat16
    if s_aux is not None:
        if readable(q):
            check_storages(name, s_aux=s_aux)
        arguments["sinks"] = s_aux.float()  # engines keep sinks in the dtype of the model
    # reading a tensor would wait for the device; without the hint the op takes bounds from shapes
    for argument, hint in (("max_seqlen_q", max_seqlen_q), ("max_seqlen_k", max_seqlen_k)):
        if not isinstance(hint, Tensor):
            if hint is not None and not is_size(hint):
                fail(name, argument, f"{hint!r:.60}", "an integer", TypeError)
            arguments[argument] = hint
    # passing an argument by name takes 0.2 microseconds
    return {argument: value for argument, value in arguments.items() if value is not None}
