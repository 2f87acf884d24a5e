"""Attention under bool masks of all pairs, without and with the map of tiles that a mask shows.

    python benchmarks/gpu/masks.py

Two rows of TOKENS tokens, bfloat16, 16 heads. Results have to be equal bit by bit, forward and
backward. Figures are medians in milliseconds: without the map, then with it.
"""

import time
from unittest import mock

import torch
from torch import Tensor
from triton.testing import do_bench

import torch_paged_attn as tpa
from torch_paged_attn.backends.triton.portable.common import seen_tiles
from torch_paged_attn.backends.triton.runtime import launch_cache

ROWS, TOKENS, HEADS = 2, 2048, 16
# head_dim and head_dim_v
DIMS = (192, 128), (128, 128), (256, 256)
# more queries than any call has: no map is made then
NO_MAP = 1 << 60


def masks(device: str) -> dict[str, Tensor]:
    """(1, ROWS * TOKENS, TOKENS): causal, a band, 512 keys at random, all pairs."""
    i = torch.arange(TOKENS, device=device)
    causal = i[None, :] <= i[:, None]
    order = torch.rand(TOKENS, TOKENS, device=device).masked_fill(~causal, -1).topk(512).indices
    chosen = torch.zeros_like(causal).scatter(1, order, True) & causal
    found = {
        "causal": causal,
        "a band of 256 keys": causal & (i[:, None] - i[None, :] < 256),
        "512 keys of causal ones": chosen,
        "all pairs": torch.ones_like(causal),
    }
    return {name: x.repeat(ROWS, 1)[None] for name, x in found.items()}


def measure(mask: Tensor, dim: int, dim_v: int) -> tuple[list[float], list[float]]:
    """Milliseconds of the forward and of the backward, without and with a map."""

    def new(width: int) -> Tensor:
        return torch.randn(ROWS * TOKENS, HEADS, width, device=mask.device, dtype=torch.bfloat16)

    q, k, v = (new(x).requires_grad_() for x in (dim, dim, dim_v))
    bounds = torch.arange(0, ROWS * TOKENS + 1, TOKENS, dtype=torch.int32, device=mask.device)
    dout = new(dim_v)
    results, forward, backward = [], [], []
    for fewest in (NO_MAP, seen_tiles.FEWEST_QUERIES):
        with mock.patch.object(seen_tiles, "FEWEST_QUERIES", fewest):
            launch_cache.clear()

            def attend() -> tuple[Tensor, Tensor]:
                return tpa.flash_varlen(q, k, v, cu_seqlens_q=bounds, attn_bias=mask)

            out, lse = attend()

            def differentiate(out: Tensor = out) -> tuple[Tensor, ...]:
                return torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)

            results.append([out, lse, *differentiate()])
            forward.append(do_bench(attend, return_mode="median"))
            backward.append(do_bench(differentiate, return_mode="median"))
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True))
    return forward, backward


def main() -> None:
    device = torch.cuda.get_device_name()
    print(f"{device}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}\n")
    print("| mask | heads | forward | backward |\n|---|---|---:|---:|")
    for name, mask in masks("cuda").items():
        for dim, dim_v in DIMS:
            figures = (f"{old:.3f}, {new:.3f}" for old, new in measure(mask, dim, dim_v))
            heads = f"{dim}" if dim == dim_v else f"{dim}/{dim_v}"
            print(f"| {name} | {heads} |", " | ".join(figures), "|", flush=True)


if __name__ == "__main__":
    main()
