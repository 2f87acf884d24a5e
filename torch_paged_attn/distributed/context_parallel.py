"""Context parallelism: attention over a packed batch of which each rank has some tokens.

Three functions have the same meaning: each rank passes its own rows of q, k and v and gets its own
rows of `out` and `softmax_lse`, the same as from `flash_varlen` of the whole batch. `Shards` says
which rank has which tokens. All are differentiable if `flash_varlen` is.

    all_gather_attention   each rank fetches the keys and values that its queries see. Supports the
                           most options; the bits of one process. Use it first with grouped queries.
                           With `SharedKeys`, GPUs copy them directly from each other's memory
    ring_attention         shards of keys and values pass from rank to rank; a rank never holds more
                           than two of them
    ulysses_attention      each rank computes some heads of all tokens; the bits of one process.
                           `num_heads` has to be divisible by the number of ranks
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.distributed.arriving import attend_as_they_come
from torch_paged_attn.distributed.exchange import Exchange, Fetch, Mask
from torch_paged_attn.distributed.local_call import KNOWN, check_call, is_default, refuse_lacking
from torch_paged_attn.distributed.ring import ring_attention
from torch_paged_attn.distributed.shards import Shards
from torch_paged_attn.distributed.shared_keys import SharedKeys
from torch_paged_attn.distributed.ulysses import ulysses_attention
from torch_paged_attn.ops import flash_varlen
from torch_paged_attn.ops._autocast import cast_early
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.checks import refuse

__all__ = [
    "Shards",
    "SharedKeys",
    "all_gather_attention",
    "ring_attention",
    "ulysses_attention",
]

OP = "all_gather_attention"
ALLOWED = (
    *("attn_bias", "alibi_slopes", "sinks", "softmax_scale", "causal", "window_size_left"),
    *("window_size_right", "softcap", "deterministic", "batch_invariant"),
)


def all_gather_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shards: Shards,
    *,
    memory: SharedKeys | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention over the whole batch, where each rank fetches the keys that its queries see.

    With a causal mask, a window, or documents that are on one rank, these are not all keys. On the
    CPU the result has the same bits as from one process.

    Args:
        q: `(shards.rows, num_heads, head_dim)`, this rank's rows.
        k, v: `(shards.rows, num_kv_heads, head_dim or head_dim_v)`, this rank's rows.
        shards: which rank has which tokens; any `load_balance`.
        memory: symmetric memory through which ranks copy each other's keys, if no gradient is
            needed. None, or keys in many pieces: they are sent as messages. Pass it on all ranks or
            on none.
        options: as for `flash_varlen`: attn_bias `(1 or num_heads, shards.rows, >= longest
            document)` of this rank's rows, alibi_slopes, sinks, softmax_scale, causal,
            window_size_left, window_size_right, softcap, deterministic, batch_invariant.

    Returns:
        `out` `(shards.rows, num_heads, head_dim_v)` and `softmax_lse` `(num_heads, shards.rows)`
        float32 of this rank's rows, the same as from `flash_varlen` of the whole batch.

    Raises:
        ValueError: on all ranks, arguments that `flash_varlen` refuses, or calls that differ from
            rank to rank (on accelerators: with PAGED_ATTN_CHECK=1).
        NotImplementedError: on all ranks, another option, or `memory` with gradients.
    """

    q, k, v = cast_early(q, k, v)
    # the messages are different ones if gradients are needed
    trains = _wants_gradients(q, k, v, *options.values())

    def check(call: AttentionCall) -> None:
        _check(call)
        if memory is not None:
            memory.check(OP, k, v, shards.ranks)
            if trains:
                refuse(
                    OP, "no gradient with memory", "pass memory=None, or call under torch.no_grad()"
                )

    check_call(OP, q, k, v, shards, options, ALLOWED, check, memory is not None, trains)
    exchange = exchange_of(shards, options)
    placement = exchange.placement
    if placement is not None and not trains and _may_share(q.device):
        options["k_start"] = placement.k_start
        if memory is None or not placement.travels:
            k, v = placement.fetch(k, v)
    else:
        placement = None
        k, v = Fetch.apply(k, v, exchange)
    slopes = options.get("alibi_slopes")
    if slopes is not None and slopes.dim() == 2:  # one row per document
        options["alibi_slopes"] = slopes.index_select(0, exchange.documents)
    if exchange.q_position is not None:
        options["q_position"] = exchange.q_position
    if placement is not None and placement.travels and memory is not None:
        parts = memory.bring(placement, k, v, q.shape[1])
        return attend_as_they_come(q, parts, exchange.lengths | options)
    return flash_varlen(q, k, v, **exchange.lengths, **options)


def _check(call: AttentionCall) -> None:
    # then the last query is at the position of its last key, and needs no q_position
    if call.window_right == 0:
        return
    for name in ("alibi_slopes", "window_size_left", "window_size_right"):
        if not is_default(getattr(call, name), KNOWN[name]):
            refuse_lacking(OP, call.q.device, ("q_position",), name)


def _may_share(device: torch.device) -> bool:
    """Whether several sequences may use the same rows of keys. That needs a backend with `k_start`;
    and point-to-point messages, which torch.compile does not support.
    """
    if torch.compiler.is_compiling():
        return False
    backend, _ = serving_device(device)
    return backend is not None and "k_start" not in backend.lacks


def _wants_gradients(*given: Any) -> bool:
    tensors = [x for x in given if isinstance(x, Tensor)]
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def exchange_of(shards: Shards, options: dict[str, Any]) -> Exchange:
    """The rows of keys that a call exchanges, computed once for each batch and mask."""
    causal = options.get("causal", False)
    left, right = (options.get(f"window_size_{side}", -1) for side in ("left", "right"))
    has_bias = options.get("attn_bias") is not None
    has_slopes = options.get("alibi_slopes") is not None
    by_position = causal or left >= 0 or right >= 0 or has_slopes
    mask = Mask(causal, left, right, has_bias, by_position)
    found = shards.keep(mask, lambda: Exchange(shards, mask))
    assert isinstance(found, Exchange)
    return found
