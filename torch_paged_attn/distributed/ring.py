"""Ring attention: keys and values pass from rank to rank, queries stay (arXiv 2310.01889).

In each step a rank computes attention to one rank's keys, in one call of `flash_varlen`, while the
next keys are being sent. A causal mask needs no positions for that: a piece of queries sees all of
another rank's keys, none of them, or, if ranks have two pieces each, those of the first piece. The
results of the steps are merged in float32. In the backward, keys pass round the ring once more,
and their gradients with them, which are back on their own rank after the last step.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.distributed.local_call import check_call, refuse_lacking
from torch_paged_attn.distributed.ranks import Ranks
from torch_paged_attn.distributed.shards import Shards, cumulative
from torch_paged_attn.ops import flash_varlen, flash_varlen_backward, merge_states
from torch_paged_attn.ops._autocast import cast_early
from torch_paged_attn.ops.checks import refuse

OP = "ring_attention"
# options that depend on positions
BY_POSITION = ("alibi_slopes", "window_size_left", "window_size_right")
ALLOWED = ("sinks", "softmax_scale", "causal", "softcap", "deterministic", *BY_POSITION)


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, shards: Shards, **options: Any
) -> tuple[Tensor, Tensor]:
    """Attention over the whole batch, where no rank ever holds more than two ranks' keys.

    Args:
        q: `(shards.rows, num_heads, head_dim)`, this rank's rows.
        k, v: `(shards.rows, num_kv_heads, head_dim or head_dim_v)`, this rank's rows.
        shards: which rank has which tokens; any `load_balance`.
        options: as for `flash_varlen`: sinks, softmax_scale, causal, softcap, deterministic. With
            load_balance "contiguous" also alibi_slopes, window_size_left and window_size_right;
            otherwise a rank's keys do not have consecutive positions.

    Returns:
        `out` `(shards.rows, num_heads, head_dim_v)` and `softmax_lse` `(num_heads, shards.rows)`
        float32 of this rank's rows, the same as from `flash_varlen` of the whole batch except for
        rounding.

    Raises:
        ValueError: on all ranks, arguments that `flash_varlen` refuses, or calls that differ from
            rank to rank (on accelerators: with PAGED_ATTN_CHECK=1).
        NotImplementedError: on all ranks, another option, or 8-bit inputs.
    """
    q, k, v = cast_early(q, k, v)
    check_call(OP, q, k, v, shards, options, ALLOWED, lambda call: _check(call, shards))
    sinks = options.pop("sinks", None)
    causal = options.pop("causal", False)
    by_position = any(_is_given(name, options.get(name)) for name in BY_POSITION)
    key = "ring", causal, by_position
    steps = shards.keep(key, lambda: _steps(shards, causal, by_position))
    return _Ring.apply(q, k, v, sinks, shards.ranks, steps, options)


def _is_given(name: str, value: Any) -> bool:
    return value is not None and (name == "alibi_slopes" or value >= 0)


def _check(call: AttentionCall, shards: Shards) -> None:
    for name in BY_POSITION:
        if _is_given(name, getattr(call, name)) and shards.load_balance != "contiguous":
            problem = f"{name} with load_balance = {shards.load_balance!r} is not supported"
            refuse(OP, problem, "use 'contiguous', or all_gather_attention")
        if _is_given(name, getattr(call, name)):
            refuse_lacking(OP, call.q.device, ("q_position",), name)
    if call.q.dtype.itemsize == 1 or call.k.dtype != call.q.dtype:
        problem = f"q of {call.q.dtype} with k of {call.k.dtype} is not supported"
        refuse(OP, problem, "pass one dtype of 16 or 32 bits")


class Step(NamedTuple):
    """One step: the arguments with which `flash_varlen` attends to one rank's keys; None if no
    query sees any of them.
    """

    lengths: dict[str, Any] | None


def _steps(shards: Shards, causal: bool, by_position: bool) -> list[Step]:
    """This rank's steps: its own keys first, then those of the ranks before it, in ring order."""
    rank, size = shards.ranks.rank, shards.ranks.size
    sources = [(rank - t) % size for t in range(size)]
    steps = [_step(shards, rank, source, causal) for source in sources]
    if by_position:  # "contiguous": each rank has one piece of a document
        for step, source in zip(steps[1:], sources[1:], strict=True):
            if step.lengths is not None:
                first = shards.first[rank, :, 0] - shards.first[source, :, 0]
                step.lengths["q_position"] = shards.to_device(first.int())
                step.lengths["causal"] = causal
    return steps


def _step(shards: Shards, rank: int, source: int, causal: bool) -> Step:
    """The step in which the queries of `rank` attend to the keys of `source`."""
    own, theirs = shards.counts[rank], shards.counts[source]  # (documents, pieces)
    queries, keys, used = own.sum(1), theirs.sum(1), None
    if causal and source < rank:
        used = theirs[:, 0]  # the second pieces are after all queries
    if causal and source > rank:
        if own.shape[1] == 1:
            return Step(None)
        # the first pieces of queries see nothing, the second ones all keys
        queries = own.flatten()
        keys = torch.stack([torch.zeros_like(keys), keys], 1).flatten()
    seen = keys if used is None else used
    if not bool(((queries > 0) & (seen > 0)).any()):
        return Step(None)
    lengths: dict[str, Any] = {
        "cu_seqlens_q": shards.to_device(cumulative(queries)),
        "cu_seqlens_k": shards.to_device(cumulative(keys)),
        "seqused_k": None if used is None else shards.to_device(used.int()),
        "max_seqlen_q": int(queries.max()),
        "max_seqlen_k": int(seen.max()),
        "causal": causal and source == rank,
    }
    return Step(lengths)


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sinks: Tensor | None,
        ranks: Ranks,
        steps: list[Step],
        options: dict[str, Any],
    ) -> tuple[Tensor, Tensor]:
        ctx.ranks, ctx.steps, ctx.options = ranks, steps, options
        packed = torch.cat([k.flatten(1), v.flatten(1)], 1)
        found: tuple[Tensor, Tensor] | None = None
        last = max((t for t, step in enumerate(steps) if step.lengths is not None), default=-1)
        for t, step in enumerate(steps):
            arriving = _Passing(packed, ranks) if t + 1 < len(steps) else None
            sink = sinks if t == 0 else None
            if step.lengths is not None:
                keys, values = _unpacked(packed, k, v)
                # partial results are float32, the merged one is rounded once
                dtype = q.dtype if t == last else torch.float32
                part_dtype = dtype if found is None else torch.float32
                part = flash_varlen(
                    q, keys, values, **step.lengths, **options, sinks=sink, out_dtype=part_dtype
                )
                if found is not None:
                    outs, lses = zip(found, part, strict=True)
                    part = merge_states(outs, lses, out_dtype=dtype)
                found = part
            if arriving is not None:
                packed = arriving.wait()
        if found is None:
            out = q.new_zeros(len(q), q.shape[1], v.shape[2])
            found = out, out.new_full(out.shape[1::-1], float("-inf"), dtype=torch.float32)
        out, lse = found
        ctx.save_for_backward(q, k, v, sinks, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        q, k, v, sinks, out, lse = ctx.saved_tensors
        dout = torch.zeros_like(out) if gradients[0] is None else gradients[0].contiguous()
        dlse = gradients[1]
        steps, ranks = ctx.steps, ctx.ranks
        packed = torch.cat([k.flatten(1), v.flatten(1)], 1)
        dq = torch.zeros_like(q, dtype=torch.float32)
        dsinks = None
        travelling: _Passing | None = None
        for t, step in enumerate(steps):
            arriving = _Passing(packed, ranks) if t + 1 < len(steps) else None
            own = torch.zeros_like(packed, dtype=torch.float32)
            if step.lengths is not None:
                keys, values = _unpacked(packed, k, v)
                sink = sinks if t == 0 else None
                given = {**step.lengths, **ctx.options, "sinks": sink}
                given["output_mask"] = (True, True, True, False, sink is not None)
                found = flash_varlen_backward(dout, dlse, q, keys, values, out, lse, **given)
                dq += found[0]
                own = torch.cat([found[1].flatten(1), found[2].flatten(1)], 1).float()
                dsinks = found[4] if sink is not None else dsinks
            if travelling is not None:
                own += travelling.wait()
            travelling = _Passing(own, ranks)
            if arriving is not None:
                packed = arriving.wait()
        assert travelling is not None
        dk, dv = _unpacked(travelling.wait(), k, v)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks, None, None, None


def _unpacked(packed: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    width = k.shape[1] * k.shape[2]
    return packed[:, :width].unflatten(1, k.shape[1:]), packed[:, width:].unflatten(1, v.shape[1:])


class _Passing:
    """Sends a tensor to the next rank and receives that of the previous rank, in the background."""

    def __init__(self, x: Tensor, ranks: Ranks) -> None:
        self.sent, self.found = x, torch.empty_like(x)
        self.works = []
        if ranks.size == 1:
            self.found = x
            return
        to = ranks.global_rank((ranks.rank + 1) % ranks.size)
        source = ranks.global_rank((ranks.rank - 1) % ranks.size)
        self.works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, to, ranks.group),
                dist.P2POp(dist.irecv, self.found, source, ranks.group),
            ]
        )

    def wait(self) -> Tensor:
        for work in self.works:
            work.wait()
        return self.found
