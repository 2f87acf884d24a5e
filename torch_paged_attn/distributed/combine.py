"""Parts of attention on several ranks, each over its own keys: the whole, for a rank's own heads.

All take `out` `(tokens, num_heads, head_dim_v)` float32 and `softmax_lse` `(num_heads, tokens)`
and return what they are together, `num_heads / W` heads of it, in `out_dtype`. A part that saw no
key (lse -inf) has no weight. Which is fastest is a matter of latency: of 32 sequences of 32 heads
of 128 half a megabyte travels.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.distributed.ranks import Ranks
from torch_paged_attn.distributed.shards import all_gather
from torch_paged_attn.distributed.symmetric import symmetric_memory
from torch_paged_attn.ops import merge_states
from torch_paged_attn.ops.checks import fail


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
    """Combine by memory that all GPUs of a group see: one barrier, then one kernel that reads and
    merges what is this rank's on every GPU. No multicast is used.

    Made once for a group; two buffers take turns. Before the first layer of each step call `begin`,
    in a CUDA graph inside of the capture: it keeps a rank that is ahead from writing what another
    one still reads.

    Args:
        group: a process group, or a mesh of one dimension, of GPUs that reach each other's memory.
        max_tokens: queries of a step at most.
        num_heads, head_dim_v: of all ranks' heads.
        device: this rank's GPU.

    Raises:
        NotImplementedError: no such memory on this device, or not in this torch.
    """

    def __init__(
        self,
        group: Any,
        max_tokens: int,
        num_heads: int,
        head_dim_v: int,
        device: torch.device | str,
    ) -> None:
        self.ranks = Ranks.of("SymmetricCombine", group)
        self.limits = max_tokens, num_heads, head_dim_v
        device = torch.device(device)
        memory = symmetric_memory("SymmetricCombine", device, "combine='all_to_all'")
        self.size = max_tokens * num_heads * (head_dim_v + 1)
        self.buffer = memory.empty(2 * self.size, dtype=torch.float32, device=device)
        self.handle = memory.rendezvous(self.buffer, self.ranks.group)
        self.next: int | None = None

    def begin(self) -> None:
        """Wait, on the GPU, until all ranks have come here."""
        self.handle.barrier(channel=0)
        self.next = 0

    def check(self, call: AttentionCall, ranks: Ranks) -> None:
        """Raise for a call that this was not made for."""
        tokens, heads, dim = self.limits
        sizes = call.num_heads, call.head_dim_v
        if call.total_q > tokens or sizes != (heads, dim) or ranks.group != self.ranks.group:
            came = f"was made for {tokens} queries, {heads} heads of {dim} and its own group"
            fail(call.op, "combine", came, f"one for {call.total_q} queries, heads {sizes}")
        if self.next is None:
            fail(call.op, "combine", "has not begun a step", "combine.begin() before each step")

    def __call__(
        self, out: Tensor, lse: Tensor, ranks: Ranks, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        assert self.next is not None
        start = self.next * self.size
        self.next = 1 - self.next
        own = _own(out.shape[1], ranks)
        buffers = [self._buffers(rank, out, lse, start) for rank in range(ranks.size)]
        torch._foreach_copy_(list(buffers[ranks.rank]), [out, lse])
        self.handle.barrier(channel=0)
        outs, lses = [x[:, own] for x, _ in buffers], [x[own] for _, x in buffers]
        return merge_states(outs, lses, out_dtype=out_dtype)

    def _buffers(self, rank: int, out: Tensor, lse: Tensor, start: int) -> tuple[Tensor, Tensor]:
        get = self.handle.get_buffer
        behind = start + out.numel()
        return get(rank, out.shape, out.dtype, start), get(rank, lse.shape, lse.dtype, behind)


def _own(heads: int, ranks: Ranks) -> slice:
    each = heads // ranks.size
    return slice(ranks.rank * each, (ranks.rank + 1) * each)
