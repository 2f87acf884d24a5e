"""Decode of latent attention (MLA): one KV head of 576 columns, whose first 512 are the values.

Peers are FlashAttention-3 with `q_v`, with the scheduler metadata that vLLM gives it, and our own
portable kernel. Results are compared with a float32 formula before they are timed; medians of
CUDA-graph replays that take turns, over caches that are rotated out of L2.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE, check, paged, relative_error, take_turns, without_pages

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.flash_varlen import flash_varlen
from torch_paged_attn.backends.triton.portable.forward.plan import attend

HEAD_DIM, HEAD_DIM_V = 576, 512

# of DeepSeek-V3: 192 ** -0.5, with its factor for long contexts
SCALE = 0.1352

# bytes of caches that take turns
COLD = 300e6


@dataclasses.dataclass(frozen=True)
class Latent:
    """So many queries a sequence over these many keys, pages in random order."""

    contexts: tuple[int, ...]
    num_heads: int
    queries: int = 1
    page_size: int = 64

    def __str__(self) -> str:
        same = len(set(self.contexts)) == 1
        name = f"b{len(self.contexts)} ctx{self.contexts[0]}" if same else "ragged"
        tokens = f" {self.queries} tokens" if self.queries > 1 else ""
        return f"latent {name} {self.num_heads} heads{tokens} p{self.page_size}"

    @property
    def flops(self) -> float:
        """Causal masks hide next to nothing."""
        rows = sum(self.contexts) * self.queries * self.num_heads
        return 2 * rows * (HEAD_DIM + HEAD_DIM_V)

    @property
    def bytes(self) -> float:
        """Keys, read once."""
        return sum(self.contexts) * HEAD_DIM * 2


LATENT = (
    Latent((4096,) * 32, 128),
    Latent((4096,) * 32, 128, page_size=16),
    Latent((4096,) * 32, 16),
    Latent((8192,) * 128, 128),
    Latent((32768,), 128),
    Latent((4096,) * 32, 128, queries=2),
    Latent((1151,) * 128, 128),
    Latent((2048,) * 64, 64),
    Latent((4096,), 16),
    Latent(tuple(200 + 577 * i % 16000 for i in range(48)), 128),
)


def calls_of(p: Latent, has_fa3: bool) -> tuple[dict[str, Callable], torch.Tensor]:
    """Contenders, each of which takes the next cache when it is called, and what the first is."""
    batch, longest = len(p.contexts), max(p.contexts)
    copies = max(1, round(COLD / p.bytes))
    caches = [paged(p.contexts, p.page_size, 1, HEAD_DIM, torch.bfloat16) for _ in range(copies)]
    _, _, table, used = caches[0]
    q = torch.randn(batch * p.queries, p.num_heads, HEAD_DIM, device=DEVICE, dtype=torch.bfloat16)
    cu = torch.arange(batch + 1, device=DEVICE, dtype=torch.int32) * p.queries
    options = dict(causal=True, softmax_scale=SCALE)

    def in_turn(run: Callable) -> Callable:
        rotated = itertools.cycle([(k, table) for k, _, table, _ in caches])
        return lambda: run(*next(rotated))

    def arguments_of(k: torch.Tensor, table: torch.Tensor) -> tuple[Any, ...]:
        keys = k.transpose(1, 2)
        return q, keys, keys[..., :HEAD_DIM_V], cu, None, p.queries, longest, used, table

    def ours(k: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return flash_varlen(*arguments_of(k, table), **options)[0]

    def portable(k: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return attend(AttentionCall.flash_varlen(*arguments_of(k, table), **options))[0]

    def fa3(k: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        (q_latent, q_rope), (latent, rope) = (x.split([HEAD_DIM_V, 64], -1) for x in (q, k))
        return torch.ops._vllm_fa3_C.fwd(
            q_rope, rope, latent, None, None, q_latent, None, cu, None, None, None, used,
            p.queries, longest, table, None, None, None, None, None, None, None, None,
            SCALE, True, -1, -1, 0.0, True, metadata, 0, None, 0, None, 1, 0, None,
        )[0]  # fmt: skip

    calls = {"ours": in_turn(ours), "portable": in_turn(portable)}
    if has_fa3:
        metadata = torch.ops._vllm_fa3_C.get_scheduler_metadata(
            batch, p.queries, longest, p.num_heads, 1, 64, HEAD_DIM_V, q.dtype,
            used, cu, None, None, None, None, p.page_size, 0, True, -1, -1, False, 0, None, 0,
        )  # fmt: skip
        calls["FA3"] = in_turn(fa3)
    keys = without_pages(caches[0][0], table, p.contexts)
    rows = [
        formula(rows, x[:, 0].float()) for rows, x in zip(q.split(p.queries), keys, strict=True)
    ]
    return calls, torch.cat(rows)


def formula(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """The result of a sequence in float32."""
    scores = q.float() @ k.mT * SCALE
    last = len(k) - len(q) + torch.arange(len(q), device=DEVICE)
    hidden = torch.arange(len(k), device=DEVICE) > last[:, None, None]
    return scores.masked_fill_(hidden, float("-inf")).softmax(-1) @ k[:, :HEAD_DIM_V]


def measure(p: Latent, has_fa3: bool) -> dict[str, Any]:
    calls, want = calls_of(p, has_fa3)
    errors = {name: relative_error(call(), want) for name, call in calls.items()}
    check(errors)
    times = {name: ms * 1e3 for name, ms in take_turns(calls).items()}
    return {
        "unit": "us",
        "figures": times,
        "error": errors["ours"],
        "TFLOP/s": p.flops / times["ours"] * 1e-6,
        "TB/s": p.bytes / times["ours"] * 1e-6,
    }


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {str(p): functools.partial(measure, p, "FA3" in peers) for p in LATENT}
