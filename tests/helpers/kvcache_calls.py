"""A good call of `flash_attn_with_kvcache`, and changes that keep it good."""

import torch
from sequences import DIM, HEADS, KV_HEADS, cumulative

BATCH, PAGES, PAGE_SIZE, NEW = 2, 6, 4, 2


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


def good_call():
    """Two sequences of 3 and 5 tokens, to which two more come."""
    g = torch.Generator().manual_seed(0)
    cache = torch.randn(2, PAGES, PAGE_SIZE, KV_HEADS, DIM, generator=g)
    return {
        "q": torch.randn(BATCH, NEW, HEADS, DIM, generator=g),
        "k_cache": cache[0],
        "v_cache": cache[1],
        "k": torch.randn(BATCH, NEW, KV_HEADS, DIM, generator=g),
        "v": torch.randn(BATCH, NEW, KV_HEADS, DIM, generator=g),
        "cache_seqlens": int32(3, 5),
        "block_table": int32(4, 1, 0, 2).view(2, 2),
        "causal": True,
    }


def ragged():
    call = good_call()
    new = {name: call[name].flatten(0, 1) for name in ("q", "k", "v")}
    return new | {"cu_seqlens_q": cumulative([2, 2]), "cu_seqlens_k_new": cumulative([2, 2])}


ROWS = {"block_table": None, "k_cache": torch.zeros(3, 8, KV_HEADS, DIM)}
ROWS["v_cache"] = ROWS["k_cache"].clone()
EIGHT_BITS = {x: torch.zeros(PAGES, PAGE_SIZE, KV_HEADS, DIM) for x in ("k_cache", "v_cache")}
EIGHT_BITS = {name: x.to(torch.float8_e4m3fn) for name, x in EIGHT_BITS.items()}
