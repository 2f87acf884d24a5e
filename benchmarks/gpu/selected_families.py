"""What the other model families select: QSA, NSA, MoBA, Quest, and DeepSeek V4's two caches.

As in `selected.py`; DeepSeek V4 and NSA are whole calls, made of several operators.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE, take_turns
from selected import BF16, INT32, LATENT, Blocks, attended, rows_of, timed, without_gradients

import torch_paged_attn
from torch_paged_attn.integrations.fla import native_sparse_attention


@functools.cache
def bounds_of(count: int) -> torch.Tensor:
    """Those of one sequence."""
    return INT32([0, count])


@dataclasses.dataclass(frozen=True)
class TwoCaches:
    """V4: a window of 128 keys with the sinks, `top` entries of a second cache, and their merge."""

    name: str
    num_tokens: int
    top: int
    is_decode: bool
    num_heads: int = 64
    context: int = 16384  # entries of the second cache
    window: int = 128

    def measure(self, peers: dict[str, Any]) -> dict[str, Any]:
        n, scale = self.num_tokens, LATENT**-0.5
        q = torch.randn(n, self.num_heads, LATENT, device=DEVICE, dtype=BF16)
        second = torch.randn(self.context, 1, LATENT, device=DEVICE, dtype=BF16)
        sinks = torch.randn(self.num_heads, device=DEVICE)
        drawn = torch.stack(
            [torch.randperm(self.context, device=DEVICE)[: self.top] for _ in "123"]
        )
        lists = drawn.repeat(-(-n // 3), 1)[:n, None].int().contiguous()
        first, near = self.window_call(q, sinks)

        cu, cu_second = INT32([0, n]), INT32([0, self.context])

        def selected() -> tuple[torch.Tensor, torch.Tensor]:
            return torch_paged_attn.selected_attention(
                *(q, second, second, lists, cu, cu_second), causal=False, softmax_scale=scale
            )

        def ours() -> tuple[torch.Tensor, torch.Tensor]:
            return torch_paged_attn.merge_states(*first(), *selected())

        tokens, rows = rows_of(n), []
        for t in tokens:
            keys = torch.cat([near(t), second[lists[t, 0].long(), 0]]).float()
            logits = torch.cat([q[t].float() @ keys.mT * scale, sinks[:, None]], 1)
            rows.append(torch.softmax(logits, 1)[:, :-1] @ keys)
        kv, both = self.joint(second, lists, near)
        calls = {"ours": ours, "one list": lambda: self.by_one_list(q, kv, both, sinks)}
        if (peer := self.flash_mla(peers.get("FlashMLA"), q, kv, both, sinks)) is not None:
            calls["FlashMLA"] = peer
        found = timed(calls, torch.stack(rows), lambda found: found[0][list(tokens)])
        listed = both[..., : self.window].contiguous()

        def window_by_list() -> tuple[torch.Tensor, torch.Tensor]:
            return self.by_one_list(q, kv, listed, sinks)

        parts = take_turns(
            {"window": first, "window by list": window_by_list, "selected": selected}
        )
        return found | {f"{name}, ms": ms for name, ms in parts.items()}

    def window_call(
        self, q: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[Callable, Callable[[int], torch.Tensor]]:
        """Attention to the window, and the keys of a token's window."""
        n, options = self.num_tokens, {"causal": True, "sinks": sinks}
        if self.is_decode:  # a page holds a sequence's window
            cache = torch.randn(n, 1, self.window, LATENT, device=DEVICE, dtype=BF16)
            table, used = INT32([[i] for i in range(n)]), INT32([self.window] * n)
            cu = INT32(range(n + 1))
            args = q, cache, cache, cu, None, 1, self.window, used, table
            return functools.partial(torch_paged_attn.flash_varlen, *args, **options), (
                lambda t: cache[t, 0]
            )
        keys = torch.randn(n, 1, LATENT, device=DEVICE, dtype=BF16)
        args = q, keys, keys, INT32([0, n])
        options["window_size_left"] = self.window - 1
        return functools.partial(torch_paged_attn.flash_varlen, *args, **options), (
            lambda t: keys[max(t + 1 - self.window, 0) : t + 1, 0]
        )

    def joint(
        self,
        second: torch.Tensor,
        lists: torch.Tensor,
        near: Callable[[int], torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches one behind the other, and lists of window and entries."""
        n, window = self.num_tokens, self.window
        if self.is_decode:
            keys = torch.stack([near(t) for t in range(n)]).view(-1, 1, LATENT)
            own = torch.arange(n * window, device=DEVICE).view(n, 1, window)
        else:
            keys = torch.cat([near(t)[-1:] for t in range(n)])[:, None]
            own = torch.arange(n, device=DEVICE)[:, None] - torch.arange(window, device=DEVICE)
            own = own.clamp(min=-1)[:, None]
        kv = torch.cat([keys, second])
        return kv, torch.cat([own.int(), lists + len(keys)], -1).contiguous()

    def by_one_list(
        self, q: torch.Tensor, kv: torch.Tensor, lists: torch.Tensor, sinks: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of caches that share their memory: the window's keys are listed, too."""
        bounds = bounds_of(len(q)), bounds_of(len(kv))
        return torch_paged_attn.selected_attention(
            *(q, kv, kv, lists, *bounds), causal=False, softmax_scale=LATENT**-0.5, sinks=sinks
        )

    def flash_mla(
        self,
        peer: Any,
        q: torch.Tensor,
        kv: torch.Tensor,
        lists: torch.Tensor,
        sinks: torch.Tensor,
    ) -> Callable | None:
        """One call for both caches; None if the library refuses it."""
        if peer is None:
            return None
        args = q, kv, lists, LATENT**-0.5, LATENT, sinks, None, None
        try:
            peer.sparse_prefill_fwd(*args)
        except Exception as error:
            print(f"# {self.name}: no FlashMLA: {str(error).splitlines()[0][:200]}", flush=True)
            return None
        return functools.partial(peer.sparse_prefill_fwd, *args)


@dataclasses.dataclass(frozen=True)
class ThreeBranches:
    """NSA as a whole: compressed keys, the blocks that they select, and a window."""

    name: str
    num_tokens: int
    num_heads: int = 64
    num_kv_heads: int = 4
    head_dim: int = 128
    size: int = 64
    top: int = 16
    window: int = 512

    def measure(self, peers: dict[str, Any]) -> dict[str, Any]:
        n, groups, size = self.num_tokens, self.num_kv_heads, self.size
        q = torch.randn(1, n, self.num_heads, self.head_dim, device=DEVICE, dtype=BF16)
        k, v = torch.randn(2, 1, n, groups, self.head_dim, device=DEVICE, dtype=BF16)
        gates = torch.rand(3, 1, n, self.num_heads, device=DEVICE, dtype=BF16)
        scale = self.head_dim**-0.5

        def ours() -> torch.Tensor:
            return native_sparse_attention(
                *(q, k, v, *gates),
                block_counts=self.top,
                block_size=size,
                window_size=self.window,
            )[0]

        short_k, short_v = (
            x[0].unflatten(0, (-1, size)).mean(1, dtype=torch.float32) for x in (k, v)
        )
        short_k, short_v = short_k.to(BF16), short_v.to(BF16)

        def formula(t: int) -> torch.Tensor:
            rows = []
            finished, own = (t + 1) // size, t // size
            for g, queries in enumerate(q[0, t].view(groups, -1, self.head_dim)):
                keys, values = short_k[:finished, g], short_v[:finished, g]
                first = attended(queries, keys, values, scale)
                shares = torch.softmax(queries.float() @ keys.float().mT * scale, -1).sum(0)[:own]
                best = shares.topk(min(self.top - 1, own)).indices
                places = (best[:, None] * size + torch.arange(size, device=DEVICE)).flatten()
                places = torch.cat([places, torch.arange(own * size, t + 1, device=DEVICE)])
                near = slice(max(t + 1 - self.window, 0), t + 1)
                second = attended(queries, k[0, places, g], v[0, places, g], scale)
                third = attended(queries, k[0, near, g], v[0, near, g], scale)
                rows.append(torch.stack([first, second, third]))
            return (torch.cat(rows, 1) * gates[:, 0, t, :, None].float()).sum(0)

        tokens = rows_of(n)
        want = torch.stack([formula(t) for t in tokens])
        return timed({"ours": ours}, want, lambda found: found[list(tokens)])


QSA: dict[str, Any] = {
    "num_heads": 24,
    "num_kv_heads": 2,
    "head_dim": 256,
    "unit": 4,
    "top": 512,
    "shared": True,
}
NSA: dict[str, Any] = {"unit": 64, "page_size": 64}
MOBA: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 32, "unit": 256, "top": 8}
QUEST: dict[str, Any] = {
    "num_heads": 32,
    "num_kv_heads": 8,
    "unit": 16,
    "page_size": 16,
    "top": 128,
}

CASES = (
    TwoCaches("V4 prefill, 4,096 tokens, 64 heads, window 128 + 512", 4096, 512, False),
    TwoCaches("V4 decode, batch of 64, 64 heads, window 128 + 512", 64, 512, True),
    TwoCaches("V4 decode, batch of 64, 64 heads, window 128 + 1,024", 64, 1024, True),
    # the own unit ends at the token: a tail of 3 keys at most, by the causal mask
    Blocks("QSA prefill, 4,096 tokens at 65,536", 1, 4096, 65536, near=True, page_size=64, **QSA),
    Blocks("QSA decode, batch of 64", 64, 1, 16384, near=True, page_size=64, **QSA),
    ThreeBranches("NSA prefill, 8,192 tokens, three branches", 8192),
    Blocks("NSA prefill, 8,192 tokens, selected blocks", 1, 8192, 8192, near=True, **NSA),
    Blocks(
        "MoBA prefill, 8,192 tokens at 32,768", 1, 8192, 32768, near=True, page_size=256, **MOBA
    ),
    Blocks("Quest decode, batch of 64", 64, 1, 16384, **QUEST),
)


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {case.name: functools.partial(without_gradients, case, peers) for case in CASES}
