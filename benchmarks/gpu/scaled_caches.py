"""Steps over caches of 8 bits and int4 with a scale for each token and head, beside bfloat16.

    python benchmarks/gpu/run.py --only scaled_caches

32 query heads and 8 KV heads of 128, pages of 16 in any order. Keys and values are written by
`reshape_and_cache`; those of the peer, vLLM's TRITON_ATTN, by its own kernels. Some rows of each
result are compared with a float64 formula over the numbers that the cache holds before they are
timed; medians of bursts that take turns.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE, check, relative_error
from backward import in_turns
from torch import Tensor
from vllm_triton import TokenHeadCache

from torch_paged_attn import flash_varlen, reshape_and_cache
from torch_paged_attn.ops.checks import INT4

HEADS, KV_HEADS, DIM, PAGE = 32, 8, 128, 16
FORMATS = {
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "e4m3": torch.float8_e4m3fn,
    "int4": INT4,
}

# queries of each sequence and keys before them
Seqs = tuple[tuple[int, int], ...]


def between(count: int, first: int, last: int, queries: int = 1) -> Seqs:
    """Sequences with as many queries, behind numbers of keys that are evenly spaced."""
    step = (last - first) / max(count - 1, 1)
    return tuple((queries, first + round(i * step)) for i in range(count))


BATCHES: dict[str, Seqs] = {
    "32 decodes of 8,192 keys": between(32, 8191, 8191),
    "16 x 5 drafts": between(16, 8192, 16383, 5),
    "32 x 8 drafts": between(32, 8192, 16383, 8),
    "4 chunks of 512 behind 7,680 keys": between(4, 7680, 7680, 512),
    "a prompt of 8,192": ((8192, 0),),
    "4 prompts of 2,048": between(4, 0, 0, 2048),
    "31 decodes, 512 queries behind 12,000": (*between(31, 8192, 16112), (512, 12000)),
    "60 decodes, 256 queries behind 12,000": (*between(60, 8192, 15862), (256, 12000)),
    "15 decodes, 2 x 512 queries": (*between(15, 8192, 15612), (512, 9000), (512, 14000)),
    "100 decodes, 1,024 queries behind 3,000": (*between(100, 2000, 3980), (1024, 3000)),
    "8 decodes, 2,048 queries behind 4,000": (*between(8, 16000, 16007), (2048, 4000)),
}


@dataclasses.dataclass(frozen=True)
class Cache:
    """Keys and values of a batch in a format."""

    kv: tuple[Tensor, Tensor]  # (pages, KV_HEADS, PAGE, DIM), two numbers a byte in int4
    scales: tuple[Tensor, ...]  # (pages, KV_HEADS, PAGE); none of bfloat16
    table: Tensor
    slots: Tensor  # of each key

    @classmethod
    def of(cls, new: tuple[Tensor, Tensor], dtype: torch.dtype, keys: list[int]) -> "Cache":
        """`new`: keys and values (total, KV_HEADS, DIM) of sequences with so many keys each."""
        needed = [-(-n // PAGE) for n in keys]
        pages = torch.randperm(sum(needed), device=DEVICE).int()
        table = torch.zeros(len(keys), max(needed), dtype=torch.int32, device=DEVICE)
        for row, own in zip(table, pages.split(needed), strict=True):
            row[: len(own)] = own
        width = DIM // 2 if dtype == INT4 else DIM
        kv = [
            torch.zeros(len(pages), KV_HEADS, PAGE, width, dtype=dtype, device=DEVICE) for _ in "kv"
        ]
        has_scales = dtype != torch.bfloat16
        scales = [torch.ones(len(pages), KV_HEADS, PAGE, device=DEVICE) for _ in "kv" if has_scales]
        slots = torch.cat([
            (row[:, None].long() * PAGE + torch.arange(PAGE, device=DEVICE)).flatten()[:n]
            for row, n in zip(table, keys, strict=True)
        ])  # fmt: skip
        reshape_and_cache(*new, (kv[0], kv[1]), slots, *scales, quantize=has_scales)
        return cls((kv[0], kv[1]), (*scales,), table, slots)

    def numbers(self, b: int, keys: int) -> list[Tensor]:
        """Keys and values (KV_HEADS, keys, DIM) of a sequence, in float64."""
        found = []
        for i, x in enumerate(self.kv):
            rows = x[self.table[b, : -(-keys // PAGE)].long()].transpose(0, 1)
            if rows.dtype == INT4:
                rows = ((torch.stack([rows & 15, rows >> 4], -1).flatten(-2) ^ 8).double()) - 8.0
            rows = rows.double()
            if self.scales:
                scale = self.scales[i][self.table[b, : -(-keys // PAGE)].long()].transpose(0, 1)
                rows = rows * scale[..., None].double()
            found.append(rows.flatten(1, 2)[:, :keys])
        return found


def measure(seqs: Seqs, vllm: Any) -> dict[str, Any]:
    queries, keys = [n for n, _ in seqs], [n + before for n, before in seqs]
    bounds = [0, *itertools.accumulate(queries)]
    q = torch.randn(bounds[-1], HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, sum(keys), KV_HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    cu, used = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (bounds, keys))
    calls: dict[str, Callable[[], Tensor]] = {}
    errors: dict[str, float] = {}
    for name, dtype in FORMATS.items():
        cache = Cache.of((k, v), dtype, keys)
        scales = dict(zip(("k_descale", "v_descale"), cache.scales, strict=bool(cache.scales)))
        attend = functools.partial(
            flash_varlen, q, *cache.kv, cu, None, max(queries), max(keys), used, cache.table,
            causal=True, **scales,
        )  # fmt: skip
        calls[name] = lambda attend=attend: attend()[0]
        numbers = {name: cache.numbers}
        if vllm and cache.scales:
            peer = TokenHeadCache(vllm, dtype, len(cache.kv[0]), PAGE, k)
            peer.write(k, v, cache.slots)
            calls[f"vLLM {name}"] = functools.partial(
                peer.attend, q, cu, used, widened(cache.table), max(queries)
            )
            numbers[f"vLLM {name}"] = functools.partial(peer.numbers, cache.table)
        for called, own in numbers.items():
            out = calls[called]()
            errors[called] = max(
                error_of(out, q, own(b, keys[b]), bounds[b], seqs[b])
                for b in {0, len(seqs) // 2, len(seqs) - 1}
            )
    # a peer that is wrong takes no part
    wrong = {x: errors.pop(x) for x in list(errors) if x.startswith("vLLM") and errors[x] > 0.01}
    check(errors)
    figures = in_turns({x: calls[x] for x in errors}, rounds=5, each_ms=10)
    said = ", ".join(f"{x} is off by {error:.3f}" for x, error in wrong.items())
    return {"unit": "ms", "figures": figures, "error": max(errors.values()), "left out": said}


def widened(table: Tensor) -> Tensor:
    """vLLM's block tables have room for the longest context: here to a multiple of 64 pages, which
    spares compiling its kernels for other strides.
    """
    return torch.nn.functional.pad(table, (0, -table.shape[1] % 64))


def error_of(out: Tensor, q: Tensor, kv: list[Tensor], start: int, seq: tuple[int, int]) -> float:
    """The relative error of a sequence's first, middle and last rows."""
    count, before = seq
    rows = torch.tensor(sorted({0, count // 2, count - 1}), device=DEVICE)
    k, v = kv
    heads = q[start + rows].double().unflatten(1, (KV_HEADS, -1))
    scores = torch.einsum("rkgd,ksd->rkgs", heads, k) * DIM**-0.5
    unseen = torch.arange(count + before, device=DEVICE) > (before + rows)[:, None]
    p = scores.masked_fill(unseen[:, None, None], float("-inf")).softmax(-1)
    want = torch.einsum("rkgs,ksd->rkgd", p, v).flatten(1, 2)
    return relative_error(out[start + rows], want)


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    vllm = peers.get("vLLM's Triton")
    return {name: functools.partial(measure, seqs, vllm) for name, seqs in BATCHES.items()}
