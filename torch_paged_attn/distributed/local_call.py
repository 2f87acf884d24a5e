"""Checks of a distributed call before anything is sent, whose errors are raised on all ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, defaults
from torch_paged_attn.distributed.ranks import agree
from torch_paged_attn.distributed.shards import Shards
from torch_paged_attn.ops.attention_checks import check_attention
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.checks import fail, refuse

KNOWN = defaults("flash_varlen")


def check_call(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    options: dict[str, Any],
    allowed: tuple[str, ...],
    check: Callable[[AttentionCall], None],
    *more: Any,
) -> None:
    """Raise on all ranks if the call of any rank is wrong: an option that is not in `allowed`,
    arguments that `flash_varlen` refuses, a call for which `check` raises, or shapes, options or
    `more` that differ between ranks.
    """

    def check_all() -> None:
        for name, value in options.items():
            if name not in KNOWN:
                raise TypeError(f"{op}() got an unexpected keyword argument '{name}'")
            if name not in allowed and not is_default(value, KNOWN[name]):
                refuse(op, f"{name} is not supported", f"use {', '.join(allowed)}")
        if torch.compiler.is_compiling():  # the operator checks its traced arguments itself
            return
        given = {name: x for name, x in options.items() if name in allowed}
        slopes = given.get("alibi_slopes")
        if slopes is not None and slopes.dim() == 2:  # one row per document of the whole batch
            given["alibi_slopes"] = slopes[: len(shards.lengths)]
        call = AttentionCall(op, q, k, v, shards.cu_seqlens_q, **given)
        check_attention(call)
        for name, x in (("q", q), ("k", k), ("v", v)):
            if len(x) != shards.rows:
                fail(op, f"{name}.shape[0]", len(x), f"shards.rows = {shards.rows}")
        check(call)

    said = {name: _described(x) for name, x in sorted(options.items())}
    same = _described(q), _described(k), _described(v), said, *more
    # later layers make the same call
    is_first = not torch.compiler.is_compiling() and shards.is_first(op)
    agree(op, shards.ranks, q.device, same, check_all, is_first)


def refuse_lacking(op: str, device: torch.device, names: Sequence[str], what: str) -> None:
    """Raise NotImplementedError if the device's backend does not support the arguments `names`,
    into which the option `what` is translated. It is checked before anything is sent, because an
    error later would leave other ranks waiting.
    """
    backend, _ = serving_device(device)
    for name in names:
        if backend is not None and name in (*backend.lacks, *backend.lacks_in_backward):
            refuse(op, f"{what} needs {name}, which the {backend.name} backend does not support")


def from_head(rng_state: Tensor, head: int) -> Tensor:
    """`rng_state` for a call whose first head is number `head` of the model, so that dropout has
    the same mask as in one process. The host does not wait for the device.
    """
    base = torch.cat([rng_state, rng_state.new_zeros(5 - len(rng_state))])
    base[2] += head
    return base


def is_default(value: Any, default: Any) -> bool:
    """Whether an option has its default value."""
    return value is default or (not isinstance(value, Tensor) and value == default)


def _described(x: Any) -> Any:
    """What has to be equal on all ranks: the value, or the dtype and shape of a tensor."""
    return (str(x.dtype), tuple(x.shape)) if isinstance(x, Tensor) else x
