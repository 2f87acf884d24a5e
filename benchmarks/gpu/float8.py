"""Prefill of 8-bit queries, keys and values, and of 8-bit keys and values beside 16-bit queries.

Contenders get the same numbers: our kernel and FlashAttention-3's with float8, and both with the
same tensors in bfloat16, which holds each float8. Our results are compared with a float32 formula,
of the first head, before they are timed; FlashAttention-3's float8 rounds probabilities to 8 bits,
and its error is written down beside ours. Medians of CUDA-graph replays that take turns, over
inputs that are rotated out of L2.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from attention import (
    DEVICE,
    Prefill,
    check,
    cumulative,
    first_answer,
    paged,
    ragged,
    relative_error,
    take_turns,
    without_pages,
)
from torch.nn.functional import scaled_dot_product_attention

from torch_paged_attn.backends.triton.flash_varlen import flash_varlen

E4M3, BF16 = torch.float8_e4m3fn, torch.bfloat16

# bytes of inputs that take turns
COLD = 300e6


@dataclasses.dataclass(frozen=True)
class Prefill8(Prefill):
    """With `q_dtype` bfloat16, keys and values alone are of 8 bits."""

    q_dtype: torch.dtype = E4M3

    def __str__(self) -> str:
        kind = "q, k, v" if self.q_dtype == E4M3 else "k, v"
        return f"{super().__str__()} e4m3 {kind}"


FLOAT8 = (
    Prefill8((1024,), 32, 8, 128),
    Prefill8((4096,) * 4, 32, 8, 128),
    Prefill8((16384,), 32, 8, 128),
    Prefill8((16384,), 32, 8, 128, causal=False),
    Prefill8(ragged(16, 3, 8000, 16), 32, 8, 128),
    Prefill8((4096,) * 4, 32, 8, 64),
    Prefill8((8192,) * 2, 16, 16, 256),
    Prefill8((4096,) * 4, 32, 8, 128, page_size=16),
    Prefill8((16384,), 32, 8, 128, q_dtype=BF16),
    Prefill8((4096,) * 4, 32, 8, 128, page_size=16, q_dtype=BF16),
    Prefill8((4096,) * 4, 32, 8, 128, page_size=64, q_dtype=BF16),
)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """q, k and v of a call, packed or in caches (pages, slots, heads, dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    table: torch.Tensor | None = None
    used: torch.Tensor | None = None

    def to(self, q_dtype: torch.dtype, dtype: torch.dtype) -> "Inputs":
        q, k, v = self.q.to(q_dtype), self.k.to(dtype), self.v.to(dtype)
        return dataclasses.replace(self, q=q, k=k, v=v)


def inputs_of(p: Prefill8) -> Inputs:
    """Numbers that float8 holds, as float8."""
    total = sum(p.lengths)
    q = torch.randn(total, p.num_heads, p.head_dim, device=DEVICE).to(E4M3)
    if p.page_size:
        return Inputs(q, *paged(p.lengths, p.page_size, p.num_kv_heads, p.head_dim, E4M3))
    shape = total, p.num_kv_heads, p.head_dim
    k, v = (torch.randn(shape, device=DEVICE).to(E4M3) for _ in range(2))
    return Inputs(q, k, v)


def calls_of(p: Prefill8, fa3: Any) -> tuple[dict[str, Callable], torch.Tensor]:
    """Contenders, each of which takes the next inputs when it is called, and the first head's
    result of the first inputs."""
    longest, cu = max(p.lengths), cumulative(p.lengths)
    per_token = p.head_dim * (p.num_heads + 2 * p.num_kv_heads)
    copies = max(1, min(8, round(COLD / (sum(p.lengths) * per_token))))
    given = [inputs_of(p) for _ in range(copies)]
    descales: dict[str, torch.Tensor | None] = {
        name: 0.5 + torch.rand(len(p.lengths), p.num_kv_heads, device=DEVICE)
        for name in ("q_descale", "k_descale", "v_descale")
    }
    if p.q_dtype == BF16:
        descales["q_descale"] = None

    def ours(x: Inputs, *descales: Any, **options: Any) -> torch.Tensor:
        k, v = (x.k, x.v) if x.table is None else (x.k.transpose(1, 2), x.v.transpose(1, 2))
        given = x.q, k, v, cu, None, longest, longest, x.used, x.table, None, None, None, *descales
        return flash_varlen(*given, causal=p.causal, **options)[0]

    def theirs(x: Inputs, **options: Any) -> torch.Tensor:
        keys = dict(cu_k=cu) if x.table is None else dict(seqused_k=x.used, page_table=x.table)
        lengths = dict(cu_q=cu, max_q=longest, max_k=longest)
        return fa3.fwd(x.q, x.k, x.v, **lengths, **keys, causal=p.causal, **options)[0]

    def in_turn(
        run: Callable, q_dtype: torch.dtype, dtype: torch.dtype, *args: Any, **options: Any
    ):
        rotated = itertools.cycle([x.to(q_dtype, dtype) for x in given])
        return lambda: run(next(rotated), *args, **options)

    calls = {
        "ours": in_turn(ours, p.q_dtype, E4M3, *descales.values(), out_dtype=BF16),
        "ours bf16": in_turn(ours, BF16, BF16),
    }
    if fa3:
        calls["FA3 bf16"] = in_turn(theirs, BF16, BF16)
        if p.q_dtype == E4M3:
            calls["FA3"] = in_turn(theirs, E4M3, E4M3, **descales)
    return calls, formula(p, given[0], descales)


def formula(p: Prefill8, x: Inputs, descales: dict[str, Any]) -> torch.Tensor:
    """The first head of every row in float32."""
    one = torch.ones(len(p.lengths), 1, device=DEVICE)
    of_q, of_k, of_v = ((one if x is None else x)[:, 0] for x in descales.values())
    if x.table is None:
        keys, values = (t[:, 0].split(p.lengths) for t in (x.k, x.v))
    else:
        keys, values = (
            [t[:, 0] for t in without_pages(cache, x.table, p.lengths)] for cache in (x.k, x.v)
        )
    rows = []
    for b, q in enumerate(x.q[:, 0].split(p.lengths)):
        parts = q.float() * of_q[b], keys[b].float() * of_k[b], values[b].float() * of_v[b]
        rows.append(
            scaled_dot_product_attention(*(t[None, None] for t in parts), is_causal=p.causal)[0, 0]
        )
    return torch.cat(rows)


def measure(p: Prefill8, fa3: Any) -> dict[str, Any]:
    calls, want = calls_of(p, fa3)
    out, kernel = first_answer(calls["ours"])
    error = relative_error(out[:, 0], want)
    check({"ours": error})
    row: dict[str, Any] = {"unit": "TFLOP/s"}
    if "FA3" in calls:
        row["error of FA3"] = relative_error(calls["FA3"]()[:, 0], want)
    rates = {name: p.flops / ms * 1e-9 for name, ms in take_turns(calls).items()}
    return {**row, "figures": rates, "error": error, "kernel": kernel}


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {str(p): functools.partial(measure, p, peers.get("FA3")) for p in FLOAT8}
