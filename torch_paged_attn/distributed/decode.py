"""Decode with a KV cache whose positions are distributed over ranks (decode context parallelism).

Of W ranks, each in turn gets `I = interleave` positions: position `p` is on rank `(p // I) % W`, at
local index `p // (I W) * I + p % I`. In a step, every rank writes those new keys that belong to it
(`local_slots` is -1 for the others), computes attention of all query heads to its local keys, and
merges the partial results of all ranks for its own heads (`combine`). Partial results are float32:
in 16 bits the error would be up to 1.6 times that of one device.

The host waits for nothing, and a step can be captured in a CUDA graph.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.distributed.combine import COMBINES, SymmetricCombine
from torch_paged_attn.distributed.local_call import KNOWN, is_default, refuse_lacking
from torch_paged_attn.distributed.ranks import Group, Ranks, agree
from torch_paged_attn.distributed.shards import all_gather
from torch_paged_attn.ops import flash_varlen
from torch_paged_attn.ops._autocast import cast_early
from torch_paged_attn.ops.attention_checks import check_attention
from torch_paged_attn.ops.checks import check_lengths, fail, refuse

__all__ = [
    "SymmetricCombine",
    "decode_attention",
    "gather_heads",
    "local_lengths",
    "local_slots",
]

OP = "decode_attention"
# options that depend on positions
BY_POSITION = ("causal", "window_size_left", "window_size_right", "alibi_slopes")
ALLOWED = (
    *("sinks", "q_descale", "k_descale", "v_descale", "softmax_scale", "softcap", "out_dtype"),
    *BY_POSITION,
)


def local_lengths(lengths: Tensor, group: Group = None, *, interleave: int = 1) -> Tensor:
    """The number of keys of each sequence that are on this rank.

    Args:
        lengths: `(batch,)` int32, keys of the whole sequences, on any device. The host does not
            read them.
        group: a process group, a mesh of one dimension, or None for all processes.
        interleave: number of consecutive positions on the same rank, at least 1.

    Returns:
        `(batch,)` int32.

    Raises:
        ValueError: an argument outside the above.
    """
    ranks = _checked("local_lengths", group, interleave)
    whole = interleave * ranks.size
    rest = lengths % whole - ranks.rank * interleave
    return lengths // whole * interleave + rest.clamp(0, interleave)


def local_slots(
    positions: Tensor,
    sequences: Tensor,
    block_table: Tensor,
    page_size: int,
    group: Group = None,
    *,
    interleave: int = 1,
) -> Tensor:
    """The slots of new tokens in this rank's cache, for `reshape_and_cache`.

    Args:
        positions: `(tokens,)` ints, the position of each token in its sequence.
        sequences: `(tokens,)` ints, the sequence of each token.
        block_table: `(batch, max_pages)` int32, this rank's pages of each sequence.
        page_size: tokens of a page.
        group, interleave: as in `local_lengths`.

    Returns:
        `(tokens,)` int64; -1 for tokens of other ranks.

    Raises:
        ValueError: an argument outside the above.
    """
    ranks = _checked("local_slots", group, interleave)
    is_own = positions // interleave % ranks.size == ranks.rank
    local = positions // (interleave * ranks.size) * interleave + positions % interleave
    column = (local // page_size).clamp(max=block_table.shape[1] - 1).long()
    page = block_table[sequences.long(), column].long()
    return torch.where(is_own, page * page_size + local % page_size, -1)


def gather_heads(x: Tensor, group: Group = None) -> Tensor:
    """All heads on every rank: each rank passes its own, `(tokens, n, head_dim)`, and gets those of
    all W ranks, `(tokens, W * n, head_dim)`.
    """
    ranks = Ranks.of("gather_heads", group)
    found = all_gather(x, ranks).unflatten(0, (ranks.size, x.shape[0]))
    return found.transpose(0, 1).flatten(1, 2)


def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor | None,
    lengths: Tensor,
    block_table: Tensor,
    group: Group = None,
    *,
    combine: str | SymmetricCombine = "all_to_all",
    interleave: int = 1,
    max_seqlen_q: int | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attention of all heads to the keys on all ranks; each rank gets the results of its own heads.

    Args:
        q: `(total_q, num_heads, head_dim)`, ALL heads (`gather_heads`), the same on every rank;
            num_heads is a multiple of the number W of ranks.
        k, v: this rank's pages, `(num_pages, num_kv_heads, page_size, head_dim or head_dim_v)`.
        cu_seqlens_q: `(batch + 1,)` int32; None for one query of each sequence.
        lengths: `(batch,)` int32, keys of the whole sequences on all ranks, new ones included.
        block_table: `(batch, max_pages)` int32, this rank's pages of each sequence.
        group: a process group, a mesh of one dimension, or None for all processes.
        combine: how partial results are exchanged: "all_to_all", "all_gather", "reduce_scatter", or
            a `SymmetricCombine`. The results are the same except for rounding.
        interleave: number of consecutive positions on the same rank, at least 1.
        max_seqlen_q: the hint of `flash_varlen`.
        options: as for `flash_varlen`: sinks, descales, softmax_scale, softcap, out_dtype; causal,
            windows and alibi_slopes, which refer to positions in the whole sequence.

    Returns:
        `out` `(total_q, num_heads / W, head_dim_v)` and `softmax_lse` `(num_heads / W, total_q)`
        float32 of this rank's heads, the same as from `flash_varlen` over the whole cache.

    Raises:
        ValueError: on all ranks, arguments that `flash_varlen` refuses, num_heads that is no
            multiple of W, or calls that differ from rank to rank (on accelerators: with
            PAGED_ATTN_CHECK=1).
        NotImplementedError: on all ranks, another option.
        RuntimeError: an earlier call of a `SymmetricCombine` timed out waiting for a rank.
    """
    if isinstance(combine, SymmetricCombine):
        combine.check_all_came()  # before any CUDA call, which would only report a failed launch
    ranks = Ranks.of(OP, group)
    q, k, v = cast_early(q, k, v)
    if cu_seqlens_q is None:
        # the only query is at the last position and sees all keys, so no causal mask is needed
        cu_seqlens_q = torch.arange(len(q) + 1, dtype=torch.int32, device=q.device)
        if options.get("causal") and _unbounded(options):
            options["causal"] = False
        max_seqlen_q = 1
    args = q, k, v, cu_seqlens_q, lengths, block_table
    said = {name: x for name, x in options.items() if not isinstance(x, Tensor)}
    name = combine if isinstance(combine, str) else type(combine).__name__
    same = q.dtype, tuple(q.shape), len(lengths), name, interleave, sorted(said.items())
    agree(OP, ranks, q.device, same, lambda: _check(ranks, combine, interleave, *args, **options))

    out_dtype = options.pop("out_dtype", None) or q.dtype
    if options.get("causal") or not _unbounded(options):
        # a rank's keys do not have consecutive positions
        options["q_position"] = lengths - cu_seqlens_q.diff()
        options |= {"key_ranks": ranks.size, "key_rank": ranks.rank, "key_interleave": interleave}
    if ranks.rank > 0:
        options["sinks"] = None  # a sink counts once
    out, lse = flash_varlen(
        *(q, k, v, cu_seqlens_q, None, max_seqlen_q, None),
        local_lengths(lengths, ranks.group, interleave=interleave),
        block_table,
        out_dtype=torch.float32,
        **options,
    )
    merge = COMBINES[combine] if isinstance(combine, str) else combine
    return merge(out, lse, ranks, out_dtype)


def _unbounded(options: dict[str, Any]) -> bool:
    """Whether neither a window nor alibi_slopes is given."""
    windows = (options.get(f"window_size_{side}", -1) for side in ("left", "right"))
    return all(window < 0 for window in windows) and options.get("alibi_slopes") is None


def _checked(op: str, group: Group, interleave: int) -> Ranks:
    if interleave < 1:
        fail(op, "interleave", interleave, "at least 1")
    return Ranks.of(op, group)


def _check(
    ranks: Ranks,
    combine: str | SymmetricCombine,
    interleave: int,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    block_table: Tensor,
    **options: Any,
) -> None:
    if interleave < 1:
        fail(OP, "interleave", interleave, "at least 1")
    if isinstance(combine, str) and combine not in COMBINES:
        expected = f"one of {', '.join(COMBINES)}, or a SymmetricCombine"
        fail(OP, "combine", repr(combine), expected)
    for name, value in options.items():
        if name not in ALLOWED and value is not KNOWN.get(name, ...):
            if name not in KNOWN:
                raise TypeError(f"{OP}() got an unexpected keyword argument '{name}'")
            refuse(OP, f"{name} is not supported", f"use {', '.join(ALLOWED)}")
    given = {name: options[name] for name in ALLOWED if name in options}
    call = AttentionCall(
        OP, q, k, v, cu_seqlens_q, seqused_k=lengths, block_table=block_table, **given
    )
    check_attention(call)
    check_lengths(OP, "lengths", lengths, call.batch, "(batch)")
    if call.num_heads % ranks.size:
        fail(OP, "q's num_heads", call.num_heads, f"a multiple of the {ranks.size} ranks")
    for name in BY_POSITION:
        if not is_default(options.get(name, KNOWN[name]), KNOWN[name]):
            refuse_lacking(OP, q.device, ("q_position", "key_ranks"), name)
    if isinstance(combine, SymmetricCombine):
        combine.check(call, ranks)
