"""Cache writes beside index_put and a copy of as many bytes.

What was written is compared bit for bit before it is timed. Medians of CUDA-graph replays.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from attention import DEVICE, check
from triton.testing import do_bench_cudagraph

import torch_paged_attn


def measure(num_tokens: int, dtype: torch.dtype) -> dict[str, Any]:
    """Microseconds to write 8 heads of 128 for so many tokens to random slots of pages of 16."""
    new = torch.randn(2, num_tokens, 8, 128, device=DEVICE, dtype=torch.bfloat16)
    rows = torch.zeros(2, 2048 * 16, 8, 128, device=DEVICE, dtype=dtype)
    cache = rows.view(2, 2048, 16, 8, 128).transpose(2, 3)
    slots = torch.randperm(2048 * 16, device=DEVICE)[:num_tokens]
    write = functools.partial(torch_paged_attn.reshape_and_cache, *new, cache, slots)
    write()
    want = new.clamp(-448, 448).to(dtype) if dtype.itemsize == 1 else new
    wrong = (rows[:, slots].view(torch.uint8) != want.view(torch.uint8)).sum().item()
    check({"ours": float(wrong)})
    stored, copied = want.clone(), torch.empty_like(want)

    def index_put() -> None:
        rows.view(torch.uint8)[:, slots] = stored.view(torch.uint8)

    calls = {"ours": write, "index_put": index_put, "copy": lambda: copied.copy_(stored)}
    timed = functools.partial(do_bench_cudagraph, rep=100, return_mode="median")
    return {"unit": "us", "figures": {name: timed(call) * 1e3 for name, call in calls.items()}}


def problems(peers: dict[str, Any]) -> dict[str, Callable[[], dict[str, Any]]]:
    return {
        f"{num_tokens}x8x128 {str(dtype).split('.')[1]}": functools.partial(
            measure, num_tokens, dtype
        )
        for num_tokens in (64, 1024, 16384)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    }
