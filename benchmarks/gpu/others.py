"""Cache writes on one GPU.

    python benchmarks/gpu/others.py [--json OUT]

What was written is compared bit for bit before it is timed. Medians of CUDA-graph replays.
"""

import argparse
import functools
import json
from collections.abc import Callable
from pathlib import Path

import torch
from attention import DEVICE, show
from triton.testing import do_bench_cudagraph

import torch_paged_attn


def microseconds(call: Callable) -> float:
    return do_bench_cudagraph(call, rep=100, return_mode="median") * 1e3


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
    return {"error": float(wrong)} | {n: microseconds(c) for n, c in calls.items()}


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
    results = {}
    for name, measure in rows.items():
        results[name] = row = measure()
        show(name, "us", row)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
