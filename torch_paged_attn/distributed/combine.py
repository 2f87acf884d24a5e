"""Merging the partial results of several ranks, each of which attended to its own keys.

Every function takes a rank's partial `out` `(tokens, num_heads, head_dim_v)` float32 and
`softmax_lse` `(num_heads, tokens)`, and returns the merged results, in `out_dtype`, for this rank's
`num_heads / W` heads, where W is the number of ranks. A row whose part saw no key (lse -inf) has
weight 0. The functions differ in the collective. Which is fastest depends on its latency rather
than on bandwidth: with 32 sequences and 32 heads of 128, half a megabyte is sent.
"""

import datetime
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.distributed.ranks import Ranks
from torch_paged_attn.distributed.shards import all_gather
from torch_paged_attn.distributed.symmetric import TIMEOUT, symmetric_memory
from torch_paged_attn.ops import merge_states
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.checks import fail, refuse

OP, INSTEAD = "SymmetricCombine", "combine='all_to_all'"


def by_all_gather(
    out: Tensor, lse: Tensor, ranks: Ranks, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Each rank gets all parts of all heads, and merges those of its own heads."""
    flat = torch.cat([out.flatten(), lse.flatten()])
    parts = all_gather(flat, ranks).unflatten(0, (ranks.size, -1))
    own = _own(out.shape[1], ranks)
    outs = [part[: out.numel()].view(out.shape)[:, own] for part in parts]
    lses = [part[out.numel() :].view(lse.shape)[own] for part in parts]
    return merge_states(outs, lses, out_dtype=out_dtype)


def by_reduce_scatter(
    out: Tensor, lse: Tensor, ranks: Ranks, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Each rank weights its parts, and a reduce-scatter adds them up."""
    lses = all_gather(lse, ranks).unflatten(0, (ranks.size, -1))
    whole = lses.logsumexp(0)
    saw_none = whole == float("-inf")
    # not exp(lse - whole): beside numbers of 1e8 the logarithm in `whole` is lost
    shift = lses.amax(0).masked_fill(saw_none, 0.0)
    total = (lses - shift).exp().sum(0).masked_fill(saw_none, 1.0)
    weight = ((lse - shift).exp() / total)[..., None]
    # heads are the first dimension, so that each rank's share is contiguous
    scaled = torch.where(weight == 0.0, 0.0, weight * out.transpose(0, 1))
    own = scaled.new_empty(scaled.shape[0] // ranks.size, *scaled.shape[1:])
    reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    reduce_scatter(own, scaled, group=ranks.group)
    heads = _own(out.shape[1], ranks)
    return own.transpose(0, 1).to(out_dtype).contiguous(), whole[heads].contiguous()


def by_all_to_all(
    out: Tensor, lse: Tensor, ranks: Ranks, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Each rank gets the parts of its own heads, `out` and `softmax_lse` in one message."""
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
    """Merge through symmetric memory, which all GPUs of a group can read and write: one kernel
    writes this rank's parts into the other ranks' memory and merges the parts that they wrote here.
    It does not use NVLink multicast.

    Make one object per group and use it in all layers. All ranks have to call it in the same order.
    Calls can be captured in a CUDA graph.

    Args:
        group: a process group, or a mesh of one dimension, of GPUs with access to each other's
            memory.
        max_tokens: the largest number of queries of a step.
        num_heads, head_dim_v: of the whole model, all ranks together.
        device: this rank's GPU.
        timeout: how long a rank waits for the others. After that its kernel fails: the next
            `decode_attention` names the rank that is missing; any other CUDA call reports a failed
            launch.

    Raises:
        ValueError: num_heads is not divisible by the number of ranks.
        NotImplementedError: the device or this torch has no symmetric memory, or Triton is missing.
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
            fail(OP, "num_heads", num_heads, f"a multiple of the {ranks.size} ranks")
        backend, reason = serving_device(device)
        self.kernel: Any = None if backend is None else backend.remote_merge()
        if self.kernel is None:
            refuse(OP, reason or f"no kernel for {device.type}", f"use {INSTEAD}")
        elements = max_tokens * num_heads // ranks.size
        slots = self.kernel.Slots.of(ranks.size, elements, head_dim_v)
        self.calls = torch.zeros(slots.programs, dtype=torch.int32, device=device)
        self.missing = torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True)
        self.said = self.missing.numpy()
        made = []
        for size, dtype in ((slots.elements, torch.float32), (slots.flags, torch.int32)):
            own = memory.empty(size, dtype=dtype, device=device)
            own.zero_()
            handle = memory.rendezvous(own, ranks.group)
            made.append([handle.get_buffer(rank, (size,), dtype) for rank in range(ranks.size)])
            # no rank may set a flag before its owner has cleared it
            handle.barrier(channel=0)
            self.kept = [*getattr(self, "kept", []), own, handle]
        self.slots, self.flags = made

    def check(self, call: AttentionCall, ranks: Ranks) -> None:
        """Raise ValueError for a call of other sizes or another group than this was made for."""
        tokens, heads, dim = self.limits
        sizes = call.num_heads, call.head_dim_v
        if call.total_q > tokens or sizes != (heads, dim) or ranks.group != self.ranks.group:
            got = f"one for {tokens} queries, {heads} heads of {dim} and its own group"
            expected = f"a SymmetricCombine for {call.total_q} queries, heads {sizes}"
            fail(call.op, "combine", got, expected)

    def check_all_came(self) -> None:
        """Raise RuntimeError if a kernel has timed out waiting for a rank. It reads host memory
        only, since the device reports no more than a failed launch then.
        """
        if late := int(self.said[0]):
            problem = f"rank {late - 1} did not answer within {self.seconds:g} s"
            refuse(OP, problem, "make the same calls on all ranks", RuntimeError)

    def __call__(
        self, out: Tensor, lse: Tensor, ranks: Ranks, out_dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        given = out, lse, self.calls, self.missing, self.slots, self.flags
        options: dict[str, Any] = {"rank": ranks.rank, "out_dtype": out_dtype}
        return self.kernel.merge_remote(*given, **options, seconds=self.seconds)


def _own(heads: int, ranks: Ranks) -> slice:
    each = heads // ranks.size
    return slice(ranks.rank * each, (ranks.rank + 1) * each)
