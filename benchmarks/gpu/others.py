"""Cache writes and block-sparse attention on one GPU.

    python benchmarks/gpu/others.py [--json OUT]

Every result is compared before it is timed: cache writes bit for bit, block-sparse rows with a
float32 formula. Medians of CUDA-graph replays for cache writes, of events for attention.
"""

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from attention import DEVICE, Prefill, prefill_calls, relative_error
from triton.testing import do_bench, do_bench_cudagraph

import torch_paged_attn
from torch_paged_attn.layouts import local_strided


@dataclasses.dataclass(frozen=True)
class BlockSparse:
    """One sequence under a local band and every `stride`-th block column, another for each head."""

    length: int
    block_size: int
    local: int
    stride: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128

    def __str__(self) -> str:
        return f"blocksparse 1x{self.length} block {self.block_size} {self.local}+1/{self.stride}"


BLOCKSPARSE = (
    BlockSparse(16384, 64, 16, 8),
    BlockSparse(16384, 128, 8, 8),
    BlockSparse(32768, 64, 16, 16),
    BlockSparse(32768, 128, 8, 16),
)


def milliseconds(call: Callable, in_graph: bool) -> float:
    return (do_bench_cudagraph if in_graph else do_bench)(call, rep=100, return_mode="median")


def cache_write(num_tokens: int, dtype: torch.dtype) -> dict[str, float]:
    """Microseconds to write 8 heads of 128 for so many tokens to random slots of pages of 16."""
    new = torch.randn(2, num_tokens, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    rows = torch.zeros(2, 2048 * 16, 8, 128, device=DEVICE, dtype=dtype)
    cache = rows.view(2, 2048, 16, 8, 128).transpose(2, 3)
    slots = torch.randperm(2048 * 16, device=DEVICE)[:num_tokens]
    write = functools.partial(torch_paged_attn.reshape_and_cache, *new, cache, slots)
    write()
    want = new.clamp(-448, 448).to(dtype) if dtype.itemsize == 1 else new
    wrong = (rows[:, slots].view(torch.uint8) != want.view(torch.uint8)).sum().item()
    stored, copied = want.clone(), torch.empty_like(want)

    def index_put() -> None:
        rows.view(torch.uint8)[:, slots] = stored.view(torch.uint8)

    calls = {"ours": write, "index_put": index_put, "copy": lambda: copied.copy_(stored)}
    return {"error": float(wrong)} | {n: milliseconds(c, True) * 1e3 for n, c in calls.items()}


def blocksparse(p: BlockSparse) -> dict[str, float]:
    """Useful TFLOP/s, beside the rate of dense causal attention over the same sequence."""
    layout = local_strided(p.num_heads, p.length, p.block_size, p.local, p.stride, device=DEVICE)
    shape = (p.length, p.num_heads, p.head_dim)
    q = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
    k, v = torch.randn(2, p.length, p.num_kv_heads, p.head_dim, device=DEVICE, dtype=q.dtype)
    cu = torch.tensor([0, p.length], device=DEVICE, dtype=torch.int32)

    def ours() -> torch.Tensor:
        return torch_paged_attn.blocksparse(q, k, v, cu_seqlens_q=cu, **layout.arguments())[0]

    some = torch.randint(0, p.length, (64,), device=DEVICE)
    columns = torch.arange(p.length, device=DEVICE)
    # (heads, some, length): blocks listed for the row, and keys up to its own
    seen = layout.dense()[:, some // p.block_size].repeat_interleave(p.block_size, 2)
    seen = seen[..., : p.length] & (columns <= some[:, None])
    group = p.num_heads // p.num_kv_heads
    keys, values = (x.float().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    scores = q[some].float().transpose(0, 1) @ keys.transpose(1, 2) * p.head_dim**-0.5
    want = scores.masked_fill(~seen, float("-inf")).softmax(-1) @ values
    row = {"error": relative_error(ours()[some].transpose(0, 1), want)}
    dense = Prefill((p.length,), p.num_heads, p.num_kv_heads, p.head_dim)
    density = layout.density()
    row["of causal"] = density
    row["ours"] = density * dense.flops / milliseconds(ours, False) * 1e-9
    row["dense"] = dense.flops / milliseconds(prefill_calls(dense, None)[0]["ours"], False) * 1e-9
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="OUT")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows: dict[str, Callable[[], dict[str, float]]] = {}
    for num_tokens in (64, 1024, 16384):
        for dtype in (torch.bfloat16, torch.float8_e4m3fn):
            name = f"cache write, us: {num_tokens}x8x128 {str(dtype).split('.')[1]}"
            rows[name] = functools.partial(cache_write, num_tokens, dtype)
    for p in BLOCKSPARSE:
        rows[f"TFLOP/s: {p}"] = functools.partial(blocksparse, p)
    results = {}
    for name, measure in rows.items():
        results[name] = row = measure()
        flag = "  WRONG" * (row.get("error", 0.0) >= 0.01)
        print(f"{name:56}", "  ".join(f"{k} {v:.4g}" for k, v in row.items()) + flag, flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
