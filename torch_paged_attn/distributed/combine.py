"""Parts of attention on several ranks, each over its own keys: the whole, for a rank's own heads.

All take `out` `(tokens, num_heads, head_dim_v)` float32 and `softmax_lse` `(num_heads, tokens)`
and return what they are together, `num_heads / W` heads of it, in `out_dtype`. A part that saw no
key (lse -inf) has no weight. Which is fastest is a matter of latency: of 32 sequences of 32 heads
of 128 half a megabyte travels.
"""

import datetime
import importlib.util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.distributed.ranks import Ranks
from torch_paged_attn.distributed.shards import all_gather
from torch_paged_attn.distributed.symmetric import TIMEOUT, symmetric_memory
from torch_paged_attn.ops import merge_states
from torch_paged_attn.ops.checks import fail

OP, INSTEAD = "SymmetricCombine", "combine='all_to_all'"


def by_all_gather(
    out: Tensor, lse: Tensor, ranks: Ranks, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Everyone gets everything, and merges what is its own."""
    flat = torch.cat([out.flatten(), lse.flatten()])
    parts = all_gather(flat, ranks).unflatten(0, (ranks.size, -1))
    own = _own(out.shape[1], ranks)
    outs = [part[: out.numel()].view(out.shape)[:, own] for part in parts]
    lses = [part[out.numel() :].view(lse.shape)[own] for part in parts]
    return merge_states(outs, lses, out_dtype=out_dtype)


def by_reduce_scatter(
    out: Tensor, lse: Tensor, ranks: Ranks, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Parts are scaled where they are and added up on the way."""
    lses = all_gather(lse, ranks).unflatten(0, (ranks.size, -1))
    whole = lses.logsumexp(0)
    weight = (lse - whole.masked_fill(whole == float("-inf"), 0.0)).exp()[..., None]
    # heads first: what is added up is one piece for each rank
    scaled = torch.where(weight > 0.0, weight * out.transpose(0, 1), 0.0)
    own = scaled.new_empty(scaled.shape[0] // ranks.size, *scaled.shape[1:])
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    reduce_scatter(own, scaled, group=ranks.group)
    heads = _own(out.shape[1], ranks)
    return own.transpose(0, 1).to(out_dtype).contiguous(), whole[heads].contiguous()


def by_all_to_all(
    out: Tensor, lse: Tensor, ranks: Ranks, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Each rank is sent its heads, `out` and `softmax_lse` in one message."""
    tokens, heads, dim = out.shape
    own = heads // ranks.size
    size = tokens * own * dim
    sent = out.new_empty(ranks.size, size + own * tokens)
    sent[:, :size].view(ranks.size, tokens, own, dim).copy_(
        out.unflatten(1, (ranks.size, own)).transpose(0, 1)
    )
    sent[:, size:].copy_(lse.view(ranks.size, -1))
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=ranks.group)
    outs = [part[:size].view(tokens, own, dim) for part in came]
    lses = [part[size:].view(own, tokens) for part in came]
    return merge_states(outs, lses, out_dtype=out_dtype)


COMBINES = {
    "all_gather": by_all_gather,
    "reduce_scatter": by_reduce_scatter,
    "all_to_all": by_all_to_all,
}


class SymmetricCombine:
    """Combine by memory that all GPUs of a group see: one kernel puts this rank's parts where they
    are merged, and merges those that are put here. No multicast is used.

    Made once for a group, for all layers; calls of a group come in the same order on all ranks. May
    be captured in a CUDA graph.

    Args:
        group: a process group, or a mesh of one dimension, of GPUs that reach each other's memory.
        max_tokens: queries of a step at most.
        num_heads, head_dim_v: of all ranks' heads.
        device: this rank's GPU.
        timeout: how long a rank waits for the others. Then the device stops; `decode_attention`,
            called next, says who did not come, and whoever else asks CUDA first hears of a launch
            that failed.

    Raises:
        ValueError: num_heads is not divisible by the ranks.
        NotImplementedError: no such memory on this device, or not in this torch; no Triton.
    """

    def __init__(
        self,
        group: Any,
        max_tokens: int,
        num_heads: int,
        head_dim_v: int,
        device: torch.device | str,
        *,
        timeout: datetime.timedelta = TIMEOUT,
    ) -> None:
        self.ranks = ranks = Ranks.of(OP, group)
        self.seconds = timeout.total_seconds()
        self.limits = max_tokens, num_heads, head_dim_v
        device = torch.device(device)
        memory = symmetric_memory(OP, device, INSTEAD)
        if num_heads % ranks.size:
            fail(OP, "num_heads", f"is {num_heads}", f"a multiple of the {ranks.size} ranks")
        if importlib.util.find_spec("triton") is None:
            came = f"is {device}, and Triton is not installed"
            fail(OP, "device", came, f"Triton; or {INSTEAD}", NotImplementedError)
        from torch_paged_attn.backends.triton.merge_remote import Slots

        slots = Slots.of(ranks.size, max_tokens * num_heads // ranks.size, head_dim_v)
        self.calls = torch.zeros(slots.programs, dtype=torch.int32, device=device)
        self.missing = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.said = self.missing.numpy()
        made = []
        for size, dtype in ((slots.elements, torch.float32), (slots.flags, torch.int32)):
            own = memory.empty(size, dtype=dtype, device=device)
            own.zero_()
            handle = memory.rendezvous(own, ranks.group)
            made.append([handle.get_buffer(rank, (size,), dtype) for rank in range(ranks.size)])
            # nobody raises a flag that is still to be lowered
            handle.barrier(channel=0)
            self.kept = [*getattr(self, "kept", []), own, handle]
        self.slots, self.flags = made

    def check(self, call: AttentionCall, ranks: Ranks) -> None:
        """Raise for a call that this was not made for."""
        tokens, heads, dim = self.limits
        sizes = call.num_heads, call.head_dim_v
        if call.total_q > tokens or sizes != (heads, dim) or ranks.group != self.ranks.group:
            came = f"was made for {tokens} queries, {heads} heads of {dim} and its own group"
            fail(call.op, "combine", came, f"one for {call.total_q} queries, heads {sizes}")

    def check_all_came(self) -> None:
        """Raise RuntimeError if a kernel has waited for a rank in vain. Asks no device."""
        if late := int(self.said[0]):
            came = f"has rank {late - 1}, which did not come within {self.seconds:g} s"
            fail(OP, "group", came, "ranks that make the same calls", RuntimeError)

    def __call__(
        self, out: Tensor, lse: Tensor, ranks: Ranks, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        from torch_paged_attn.backends.triton.merge_remote import merge_remote

        given = out, lse, self.calls, self.missing, self.slots, self.flags
        options: dict[str, Any] = {"rank": ranks.rank, "out_dtype": out_dtype}
        return merge_remote(*given, **options, seconds=self.seconds)


def _own(heads: int, ranks: Ranks) -> slice:
    each = heads // ranks.size
    return slice(ranks.rank * each, (ranks.rank + 1) * each)
