"""Ulysses: each rank computes some heads of all tokens (arXiv 2309.14509).

An all-to-all exchanges q, k and v, so that a rank has all tokens of its heads instead of some
tokens of all heads; another one does the opposite for `out`. Attention itself is one call of
`flash_varlen` for the whole batch, with the same bits as in one process.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.distributed.local_call import check_call, from_head, refuse_lacking
from torch_paged_attn.distributed.ranks import Ranks
from torch_paged_attn.distributed.shards import Shards, cumulative
from torch_paged_attn.ops import flash_varlen
from torch_paged_attn.ops._autocast import cast_early
from torch_paged_attn.ops.checks import fail, refuse

OP = "ulysses_attention"
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
ALLOWED = (
    *("alibi_slopes", "sinks", "softmax_scale", "causal", "window_size_left", "window_size_right"),
    *("softcap", "deterministic", "batch_invariant", "dropout_p", "rng_state"),
)


def ulysses_attention(
    q: Tensor, k: Tensor, v: Tensor, shards: Shards, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention over the whole batch, where each rank computes some of the heads.

    With W ranks, `num_heads` has to be a multiple of W, and `num_kv_heads` a multiple or a divisor.
    If it is a divisor, KV heads are sent to several ranks.

    Args:
        q: `(shards.rows, num_heads, head_dim)`, this rank's rows.
        k, v: `(shards.rows, num_kv_heads, head_dim or head_dim_v)`, this rank's rows.
        shards: which rank has which tokens; any `load_balance`.
        options: as for `flash_varlen`, for all heads on every rank: alibi_slopes, sinks,
            softmax_scale, causal, window_size_left, window_size_right, softcap, deterministic,
            batch_invariant, dropout_p and rng_state. The dropout mask is the same as in one
            process.

    Returns:
        `out` `(shards.rows, num_heads, head_dim_v)` and `softmax_lse` `(num_heads, shards.rows)`
        float32 of this rank's rows, the same as from `flash_varlen` of the whole batch.

    Raises:
        ValueError: on all ranks, arguments that `flash_varlen` refuses, heads as above, or calls
            that differ from rank to rank (on accelerators: with PAGED_ATTN_CHECK=1).
        NotImplementedError: on all ranks, another option.
    """
    ranks = shards.ranks
    if torch.compiler.is_compiling() and TORCH < (2, 12):
        problem = f"torch {torch.__version__} compiles two collectives into one"
        refuse(OP, problem, "use torch 2.12 or later, or no torch.compile")
    q, k, v = cast_early(q, k, v)
    check_call(OP, q, k, v, shards, options, ALLOWED, lambda call: _check_heads(call, ranks))
    heads, kv_heads = q.shape[1], k.shape[1]
    if kv_heads < ranks.size:
        k, v = (x.repeat_interleave(ranks.size // kv_heads, 1) for x in (k, v))
    q, k, v = to_heads((q, k, v), shards)
    own = heads // ranks.size
    for name in ("alibi_slopes", "sinks"):
        if (x := options.get(name)) is not None:
            options[name] = x[..., ranks.rank * own : (ranks.rank + 1) * own].contiguous()
    if (rng := options.get("rng_state")) is not None:
        options["rng_state"] = from_head(rng, ranks.rank * own)
    cu_seqlens = shards.keep("cu_seqlens", lambda: shards.to_device(cumulative(shards.lengths)))
    out, lse = flash_varlen(q, k, v, cu_seqlens, **options)
    return to_rows(out, shards), to_rows(lse.mT, shards).mT.contiguous()


def _check_heads(call: AttentionCall, ranks: Ranks) -> None:
    if call.rng_state is not None:
        refuse_lacking(OP, call.q.device, ("rng_state[2:]",), "rng_state")
    if call.num_heads % ranks.size:
        fail(OP, "q's num_heads", call.num_heads, f"a multiple of the {ranks.size} ranks")
    if call.num_kv_heads % ranks.size and ranks.size % call.num_kv_heads:
        expected = f"a multiple or a divisor of the {ranks.size} ranks"
        fail(OP, "k's num_kv_heads", call.num_kv_heads, expected)


def to_heads(tensors: Sequence[Tensor], shards: Shards) -> list[Tensor]:
    """Exchange rows for heads: each tensor `(rows, heads, dim)` becomes `(tokens, heads / W, dim)`
    of the whole batch. All tensors are sent in one message.
    """
    size = shards.ranks.size
    shapes = [(x.shape[1] // size, x.shape[2]) for x in tensors]
    pieces = [
        x.reshape(len(x), size, heads * dim).transpose(0, 1)
        for x, (heads, dim) in zip(tensors, shapes, strict=True)
    ]
    rows = _Swap.apply(torch.cat(pieces, 2), shards.ranks).flatten(0, 1)
    parts = shards.in_order(rows).split([heads * dim for heads, dim in shapes], 1)
    return [x.unflatten(1, shape) for x, shape in zip(parts, shapes, strict=True)]


def to_rows(x: Tensor, shards: Shards) -> Tensor:
    """Exchange heads for rows: `(tokens, heads / W, ...)` becomes `(rows, heads, ...)`."""
    size = shards.ranks.size
    x = shards.by_rank(x).unflatten(0, (size, shards.rows))
    return _Swap.apply(x, shards.ranks).transpose(0, 1).flatten(1, 2)


class _Swap(torch.autograd.Function):
    """All-to-all of equal parts of the first dimension. Its gradient is the same all-to-all."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks) -> Tensor:
        ctx.ranks = ranks
        return _swap(x, ranks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        return _swap(gradients[0], ctx.ranks), None


def _swap(x: Tensor, ranks: Ranks) -> Tensor:
    x = x.contiguous()
    found = torch.empty_like(x)
    dist.all_to_all_single(found, x, group=ranks.group)
    return found
