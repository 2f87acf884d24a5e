"""Backward of attention to selected keys, beside attention-gym's and beside dense attention.

*dense* is the backward of `flash_varlen` for the same queries and as many keys as each of them
selects, so that it has the same number of products. attention-gym's has the lists of each key's
queries, which ours makes. Gradients are compared with those of a float32 formula before they are
timed; medians of bursts that take turns.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE, relative_error
from backward import MOST_ERROR, in_turns
from selected import BF16, INT32
from torch import Tensor

import torch_paged_attn


@dataclasses.dataclass(frozen=True)
class Gradients:
    """One sequence of `context` keys, whose values are their first `head_dim_v` columns; random
    lists of `top` units of `size` keys, one for each KV head.
    """

    name: str
    num_tokens: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context: int
    top: int
    size: int = 1
    head_dim_v: int = 0

    def measure(self, peers: dict[str, Any]) -> dict[str, Any]:
        n, width = self.num_tokens, self.head_dim_v or self.head_dim
        q = torch.randn(n, self.num_heads, self.head_dim, device=DEVICE, dtype=BF16)
        kv = torch.randn(self.context, self.num_kv_heads, self.head_dim, device=DEVICE, dtype=BF16)
        dout = torch.randn(n, self.num_heads, width, device=DEVICE, dtype=BF16)
        scores = torch.rand(n, self.num_kv_heads, self.context // self.size, device=DEVICE)
        lists = scores.topk(self.top, -1).indices.int().contiguous()
        cu = INT32([0, n])

        def ours(q: Tensor, kv: Tensor) -> Tensor:
            return self.forward(q, kv, lists)[0]

        def dense(q: Tensor, kv: Tensor) -> Tensor:
            keys = INT32([0, len(kv)])
            return torch_paged_attn.flash_varlen(q, kv, kv[..., :width], cu, keys)[0]

        want = self.formula(q, kv, dout, lists)
        torch.cuda.synchronize()
        print(f"# {self.name}", flush=True)
        calls = {"ours": backward_of(ours, q, kv, dout)}
        errors = {"ours": error_of(calls["ours"](), want)}
        gym = peers.get("attention-gym")
        if gym and self.num_kv_heads == self.size == 1 and width == self.head_dim:
            calls["attention-gym"] = self.backward_of_gym(gym, q, kv, dout, lists)
            gradients = [x[0].transpose(0, 1) for x in calls["attention-gym"]()]
            errors["attention-gym"] = error_of(gradients, want)
        assert max(errors.values()) < MOST_ERROR, f"relative errors {errors}"
        if self.head_dim <= 256:
            calls["dense"] = backward_of(dense, q, kv[: self.top * self.size], dout)
        figures = in_turns(calls, rounds=5, each_ms=10)
        products = 2 * n * self.num_heads * self.top * self.size * (self.head_dim + width)
        rate = 2.5 * products / figures["ours"] * 1e-9
        return {"unit": "ms", "figures": figures, "error": errors["ours"], "TFLOP/s": rate}

    def forward(self, q: Tensor, kv: Tensor, lists: Tensor) -> tuple[Tensor, Tensor]:
        values = kv[..., : self.head_dim_v or self.head_dim]
        sizes = INT32([0, len(q)]), INT32([0, len(kv)])
        return torch_paged_attn.selected_attention(
            *(q, kv, values, lists, *sizes), select_size=self.size, causal=False
        )

    def backward_of_gym(
        self, gym: Any, q: Tensor, kv: Tensor, dout: Tensor, lists: Tensor
    ) -> Callable[[], tuple[Tensor, ...]]:
        """attention-gym's backward, of one KV head, behind our forward: its own takes minutes to
        compile for sm_90. Lists of each key's queries, which ours makes, are made before."""
        out, lse = self.forward(q, kv, lists)
        query, keys, dout, out = (x.transpose(0, 1)[None].contiguous() for x in (q, kv, dout, out))
        shared = keys.expand(-1, self.num_heads, -1, -1)
        local = torch.zeros_like(query[:, :1]).expand_as(query)  # of a window of no token
        chosen = lists[None, :, 0].long()
        queries = gym._build_index_query_map(chosen, len(kv))
        sink = torch.full((self.num_heads,), -torch.inf, device=DEVICE, dtype=BF16)
        given = query, shared, local, chosen, *queries, sink, None, out, lse[None], dout, 0, True
        return lambda: gym._launch_backward(*given)[:2]

    def formula(self, q: Tensor, kv: Tensor, dout: Tensor, lists: Tensor) -> tuple[Tensor, ...]:
        """dq and dkv, head after head in float32."""
        group, width = self.num_heads // self.num_kv_heads, dout.shape[-1]
        queries, keys = (x.float().requires_grad_() for x in (q, kv))
        for head in range(self.num_heads):
            places = lists[:, head // group].long()[..., None] * self.size
            places = (places + torch.arange(self.size, device=DEVICE)).flatten(1)
            unseen = torch.ones(len(q), len(kv), dtype=torch.bool, device=DEVICE)
            unseen.scatter_(1, places, False)
            own = keys[:, head // group]
            logits = queries[:, head] @ own.mT * self.head_dim**-0.5
            out = torch.softmax(logits.masked_fill(unseen, float("-inf")), -1) @ own[:, :width]
            out.backward(dout[:, head].float())
        assert queries.grad is not None and keys.grad is not None
        return queries.grad, keys.grad


def backward_of(forward: Callable[..., Tensor], q: Tensor, kv: Tensor, dout: Tensor) -> Callable:
    """The gradients of q and of keys that are values, too, of a forward that has run."""
    leaves = [x.detach().requires_grad_() for x in (q, kv)]
    out = forward(*leaves)
    return lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True)


def error_of(gradients: Any, want: tuple[Tensor, ...]) -> float:
    return max(relative_error(g, w) for g, w in zip(gradients, want, strict=True))


CASES = (
    Gradients("4,096 tokens, 32/1 heads of 128, top 512 of 4,096", 4096, 32, 1, 128, 4096, 512),
    Gradients("4,096 tokens, 32/1 heads of 64, top 256 of 4,096", 4096, 32, 1, 64, 4096, 256),
    Gradients("M3: 4,096 tokens, 64/4 heads of 128, 16 of 128", 4096, 64, 4, 128, 16384, 16, 128),
    Gradients("DSA: 2,048 tokens, 16 heads, top 2048", 2048, 16, 1, 576, 8192, 2048, 1, 512),
)


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {case.name: functools.partial(case.measure, peers) for case in CASES}
