"""Attention to selected keys (DeepSeek's DSA, MiniMax M3) and their selection.

Peers are FlashMLA's sparse kernel, whose library takes 64 heads or 128 (fewer are padded), vLLM's
Triton kernels for M3 and QSA, which are causal, torch's matmul, relu and topk in chunks, and our
own portable kernel. Results are compared with a float32
formula before they are timed; medians of CUDA-graph replays that take turns.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import vllm_triton
from attention import DEVICE, check, relative_error, take_turns

import torch_paged_attn
from torch_paged_attn.backends.triton import selected_attention as op
from torch_paged_attn.backends.triton.runtime import launch_cache

BF16 = torch.bfloat16
INT32 = functools.partial(torch.tensor, dtype=torch.int32, device=DEVICE)
LATENT = 512  # columns of values
SCALE = 576**-0.5
UNIT = 128  # keys in a block of M3


@contextlib.contextmanager
def portable_kernel() -> Iterator[None]:
    """Within it, no call takes a kernel for Hopper."""

    def refused(call: Any) -> str:
        return "the portable kernel is asked for"

    launch_cache.clear()  # a call that was planned would keep its kernel
    with contextlib.ExitStack() as stack:
        for module in (op.hopper, op.selected_units):
            stack.enter_context(mock.patch.object(module, "unsupported", refused))
        yield
    launch_cache.clear()


def portably(run: Callable) -> Callable:
    def call() -> Any:
        with portable_kernel():
            return run()

    return call


def rows_of(num_tokens: int) -> tuple[int, ...]:
    """The tokens whose results are compared."""
    return 0, num_tokens // 2, num_tokens - 1


def attended(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """`(heads, head_dim)` attends to `(keys, head_dim)` in float32."""
    return torch.softmax(q.float() @ k.float().mT * scale, -1) @ v.float()


def timed(calls: dict[str, Callable], want: torch.Tensor, found: Callable) -> dict[str, Any]:
    errors = {name: relative_error(found(call()), want) for name, call in calls.items()}
    check(errors)
    return {"unit": "ms", "figures": take_turns(calls), "error": errors["ours"]}


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Single latents, as DSA selects them: `heads` share a list of `top` keys."""

    name: str
    num_tokens: int
    num_heads: int
    top: int
    context: int
    head_dim: int = 576

    def measure(self, peers: dict[str, Any]) -> dict[str, Any]:
        n, dim = self.num_tokens, self.head_dim
        kv = torch.randn(self.context, 1, dim, device=DEVICE, dtype=BF16)
        q = torch.randn(n, self.num_heads, dim, device=DEVICE, dtype=BF16)
        # a few random lists, shifted: lists of all tokens would take longer to draw than to time
        drawn = [torch.randperm(self.context, device=DEVICE)[: self.top] for _ in range(min(n, 64))]
        lists = torch.stack(drawn)[torch.randint(0, len(drawn), (n,), device=DEVICE)]
        lists = (lists + 7 * torch.arange(n, device=DEVICE)[:, None]) % self.context
        lists = lists.int()[:, None].contiguous()
        cu, cu_k = INT32([0, n]), INT32([0, self.context])

        def ours() -> tuple[torch.Tensor, torch.Tensor]:
            return torch_paged_attn.selected_attention(
                *(q, kv, kv[..., :LATENT], lists, cu, cu_k), causal=False, softmax_scale=SCALE
            )

        calls = {"ours": ours, "portable": portably(ours)}
        if (flash_mla := peers.get("FlashMLA")) and dim == 576:
            missing = -self.num_heads % 64
            padded = torch.cat([q, q.new_zeros(n, missing, dim)], 1)
            calls["FlashMLA"] = lambda: flash_mla.sparse_prefill_fwd(
                padded, kv, lists, SCALE, LATENT, None, None, None
            )
        tokens = rows_of(n)
        keys = [kv[lists[t, 0].long(), 0] for t in tokens]
        want = [attended(q[t], k, k[:, :LATENT], SCALE) for t, k in zip(tokens, keys, strict=True)]
        return timed(
            calls, torch.stack(want), lambda found: found[0][list(tokens), : self.num_heads]
        )


def near_lists(scores: torch.Tensor, own: torch.Tensor, top: int) -> torch.Tensor:
    """Lists of neighbours alike, as a model's are: scores drawn for every 64th token, those between
    interpolated; the first block and the token's own always.
    """
    t = torch.arange(len(own), device=DEVICE)
    share = (t % 64 / 64)[:, None, None]
    scores = scores[t // 64] * (1 - share) + scores[t // 64 + 1] * share
    own, unit = own[:, None, None], torch.arange(scores.shape[-1], device=DEVICE)
    scores = scores.masked_fill(unit > own, -1e9).masked_fill((unit == own) | (unit == 0), 1e9)
    return scores.topk(top, -1).indices.int()


@dataclasses.dataclass(frozen=True)
class Blocks:
    """Units of `unit` keys in pages, `top` a KV head; by default as M3 selects them: 16 pages of
    128 keys, 64 query and 4 KV heads of 128.
    """

    name: str
    batch: int
    tokens_each: int
    context: int
    near: bool = False
    num_heads: int = 64
    num_kv_heads: int = 4
    top: int = 16
    unit: int = UNIT
    page_size: int = UNIT
    head_dim: int = 128
    shared: bool = False  # one list for all KV heads

    def measure(self, peers: dict[str, Any]) -> dict[str, Any]:
        n, pages = self.batch * self.tokens_each, self.context // self.page_size
        shape = self.batch * pages, self.num_kv_heads, self.page_size, self.head_dim
        k, v = (torch.randn(shape, device=DEVICE, dtype=BF16) for _ in range(2))
        q = torch.randn(n, self.num_heads, self.head_dim, device=DEVICE, dtype=BF16)
        t = torch.arange(n, device=DEVICE)
        position = self.context - self.tokens_each + t % self.tokens_each
        units, groups = self.context // self.unit, 1 if self.shared else self.num_kv_heads
        if self.near:
            scores = torch.randn(n // 64 + 2, groups, units, device=DEVICE)
            lists = near_lists(scores, position // self.unit, self.top)
        else:
            scores = torch.rand(n, groups, units, device=DEVICE)
            lists = scores.topk(self.top, -1).indices.int()
        table = INT32(range(self.batch * pages)).view(self.batch, pages)
        cu = INT32(range(0, n + 1, self.tokens_each))
        used = INT32([self.context] * self.batch)

        def ours() -> tuple[torch.Tensor, torch.Tensor]:
            return torch_paged_attn.selected_attention(
                *(q, k, v, lists, cu, None, self.tokens_each, self.context, used, table),
                select_size=self.unit,
                causal=self.near,
            )

        def formula(t: int) -> torch.Tensor:
            results, width = [], self.head_dim
            pages_of = table[t // self.tokens_each].long()
            for head, rows in enumerate(q[t].view(self.num_kv_heads, -1, width)):
                places = lists[t, head % groups].long()[:, None] * self.unit
                places = (places + torch.arange(self.unit, device=DEVICE)).flatten()
                if self.near:
                    places = places[places <= position[t]]
                at = pages_of[places // self.page_size], head, places % self.page_size
                results.append(attended(rows, k[at], v[at], width**-0.5))
            return torch.cat(results)

        tokens = rows_of(n)
        want = torch.stack([formula(t) for t in tokens])
        calls: dict[str, Callable] = {"ours": ours, "portable": portably(ours)}
        vllm = peers.get("vLLM's Triton")
        if vllm and (self.near or self.tokens_each == 1):
            args = vllm, q, k, v, lists
            if self.shared:
                run = vllm_triton.qsa(*args, table, position, self.unit, self.tokens_each)
                calls["vLLM"] = lambda: (run(),)
            elif self.unit == self.page_size == UNIT:
                run = vllm_triton.minimax_m3(*args, cu, used, table, self.tokens_each)
                calls["vLLM"] = lambda: (run(),)
        return timed(calls, want, lambda found: found[0][list(tokens)])


@dataclasses.dataclass(frozen=True)
class Selection:
    """`select_keys` of DSA: 64 heads of 128 for the queries, one for the keys, relu, weights."""

    name: str
    num_tokens: int
    context: int
    top: int = 2048

    def measure(self, peers: dict[str, Any]) -> dict[str, Any]:
        n = self.num_tokens
        q = torch.randn(n, 64, 128, device=DEVICE, dtype=BF16)
        k = torch.randn(self.context, 1, 128, device=DEVICE, dtype=BF16)
        weights = torch.randn(n, 64, device=DEVICE).abs()
        cu, cu_k = INT32([0, n]), INT32([0, self.context])

        def ours() -> torch.Tensor:
            return torch_paged_attn.select_keys(
                *(q, k, weights, cu, cu_k, n, self.context), num_units=self.top, causal=False
            )[0][:, 0]

        def by_torch() -> torch.Tensor:
            found = []
            for rows, w in zip(q.split(256), weights.to(BF16).split(256), strict=True):
                scores = torch.einsum("thd,kd->thk", rows, k[:, 0]).relu_()
                found.append(torch.einsum("thk,th->tk", scores, w).topk(self.top, -1).indices)
            return torch.cat(found)

        # bfloat16 moves the last of the list: nearly all of it is that of float32
        scores = torch.einsum("hd,kd->hk", q[-1].float(), k[:, 0].float()).relu().mT @ weights[-1]
        want = set(scores.topk(self.top).indices.tolist())
        check({"ours": 1 - len(want & set(ours()[-1].tolist())) / self.top})
        calls = {"ours": ours, "torch": by_torch}
        figures = take_turns(calls, rounds=5, each_ms=1)
        megabytes = {f"{name}, MB": peak_megabytes(call) for name, call in calls.items()}
        return {"unit": "ms", "figures": figures, **megabytes}


def peak_megabytes(call: Callable) -> float:
    """Memory that a call takes while it runs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


CASES = (
    Tokens("DSA prefill, 4,096 tokens, 128 heads, top 2048", 4096, 128, 2048, 32768),
    Tokens("DSA decode, 256 tokens, 128 heads, top 2048", 256, 128, 2048, 65536),
    Tokens("DSA decode, 32 tokens, 128 heads, top 2048", 32, 128, 2048, 65536),
    Tokens("DSA prefill, 4,096 tokens, 64 heads, top 512", 4096, 64, 512, 32768),
    Tokens("DSA prefill, 4,096 tokens, 8 heads, top 2048", 4096, 8, 2048, 32768),
    Tokens("DSA decode, 64 tokens, 8 heads, top 2048", 64, 8, 2048, 65536),
    Tokens("DSA decode, 32 tokens, 16 heads, top 2048", 32, 16, 2048, 65536),
    Tokens("V4 prefill, 512/512, 128 heads, top 1024", 4096, 128, 1024, 32768, 512),
    Blocks("M3 prefill, 8,192 tokens at a context of 98,304", 1, 8192, 98304),
    Blocks("the same, lists of neighbours alike", 1, 8192, 98304, near=True),
    Blocks("M3 decode, batch of 64", 64, 1, 16384),
    Blocks("M3 decode, batch of 64, 4 draft tokens each", 64, 4, 16384),
    Selection("select_keys: 4,096 tokens of 65,536 keys, top 2048", 4096, 65536),
    Selection("select_keys: 64 tokens of 65,536 keys, top 2048", 64, 65536),
)


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {case.name: functools.partial(without_gradients, case, peers) for case in CASES}


def without_gradients(case: Any, peers: dict[str, Any]) -> dict[str, Any]:
    with torch.inference_mode():
        return case.measure(peers)
