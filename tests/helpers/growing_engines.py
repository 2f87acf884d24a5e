"""Loops of calls as engines make them: strides of their caches, hints and tables."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from growing_tensors import DIM, HEADS, KV_HEADS, New, Step

import torch_paged_attn as tpa
from torch_paged_attn.integrations import diffusers
from torch_paged_attn.integrations.flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache

PAGES, MOST_PAGES, MOST_REQUESTS = 8192, 512, 64


def lengths(i: int, is_mixed: bool) -> tuple[list[int], list[int]]:
    """New tokens and keys of a step's requests, of which there are more all the time; with prompts,
    the last one is a prompt's second half.
    """
    decodes, prompt = 1 + i // 4, [64 + 17 * i] if is_mixed else []
    return [1] * decodes + prompt, [100 + 11 * i] * decodes + [2 * n for n in prompt]


def vllm(new: New, is_mixed: bool) -> Step:
    """A layer of a step of `integrations/_vllm_backend.py`: both halves of a cache's rows, slices
    of a fused projection, a table of as many columns at each step.
    """
    pages = new(PAGES, KV_HEADS, 16, 2 * DIM).split(DIM, -1)
    table = new.ints([0]).expand(MOST_REQUESTS, MOST_PAGES).contiguous()

    def step(i: int) -> Any:
        queries, keys = lengths(i, is_mixed)
        total = sum(queries)
        fused = new(total, HEADS + 2 * KV_HEADS, DIM)
        q, k, v = fused.split([HEADS, KV_HEADS, KV_HEADS], 1)
        slots = torch.arange(total, device=new.device)
        tpa.reshape_and_cache(k, v, pages, slots)
        return tpa.flash_varlen_out(
            new(total, HEADS, DIM), q, *pages, cu_seqlens_q=new.bounds(queries),
            max_seqlen_q=max(queries), max_seqlen_k=max(keys), seqused_k=new.ints(keys),
            block_table=table[: len(keys)], causal=True, softcap=0.0, softmax_scale=DIM**-0.5,
        )  # fmt: skip

    return step


def sglang(new: New, is_mixed: bool, page_size: int = 1) -> Step:
    """A layer of `integrations/_sglang_backend.py`: a pool of slots, a table cut to the longest
    request, no hints.
    """
    pool = new(2, PAGES * page_size, KV_HEADS, DIM)
    pages = pool.unflatten(1, (-1, page_size)).transpose(2, 3)

    def step(i: int) -> Any:
        queries, keys = lengths(i, is_mixed)
        width = -(-max(keys) // page_size)
        return tpa.flash_varlen(
            new(sum(queries), HEADS, DIM), *pages, new.bounds(queries), seqused_k=new.ints(keys),
            block_table=new.ints([0] * len(keys) * width).view(len(keys), -1), causal=True,
            softcap=0.0, softmax_scale=DIM**-0.5,
        )  # fmt: skip

    return step


def nano_vllm(new: New, is_decode: bool) -> Step:
    """nano-vLLM's two calls: of prompts with a cached prefix, and of decodes; pages of 256."""
    pages = new(2, 256, 256, KV_HEADS, DIM)

    def step(i: int) -> Any:
        queries, keys = lengths(i, not is_decode)
        table = new.ints([0] * len(keys) * -(-max(keys) // 256)).view(len(keys), -1)
        options = {"block_table": table, "softmax_scale": DIM**-0.5, "causal": True}
        if is_decode:
            q = new(len(keys), 1, HEADS, DIM)
            return flash_attn_with_kvcache(q, *pages, cache_seqlens=new.ints(keys), **options)
        bounds = new.bounds(queries), new.bounds(keys)
        q = new(sum(queries), HEADS, DIM)
        return flash_attn_varlen_func(q, *pages, *bounds, max(queries), max(keys), **options)

    return step


def pictures(new: New, is_masked: bool) -> Step:
    """diffusers' call, of pictures that grow; `is_masked`: beside the padding of their text."""

    def step(i: int) -> Any:
        q, k, v = new.qkv(2, 200 + 13 * i)
        mask = torch.ones(2, k.shape[1], dtype=torch.bool, device=new.device)
        return diffusers.attention(q, k, v, mask if is_masked else None, enable_gqa=True)

    return step


def position_bias(new: New) -> Step:
    """T5's call: a bias of each head that grows in both dimensions."""

    def step(i: int) -> Any:
        length = 100 + 3 * i
        q, k, v = new.qkv(2 * length)
        bias = new(HEADS, 2 * length, length)
        return tpa.flash_varlen(q, k, v, new.bounds([length] * 2), attn_bias=bias)

    return step


LOOPS: dict[str, Callable[[New], Step]] = {
    "vllm/decode": functools.partial(vllm, is_mixed=False),
    "vllm/mixed": functools.partial(vllm, is_mixed=True),
    "sglang/decode": functools.partial(sglang, is_mixed=False),
    "sglang/mixed": functools.partial(sglang, is_mixed=True),
    "sglang/mixed_pages": functools.partial(sglang, is_mixed=True, page_size=16),
    "nano_vllm/prefill": functools.partial(nano_vllm, is_decode=False),
    "nano_vllm/decode": functools.partial(nano_vllm, is_decode=True),
    "diffusers": functools.partial(pictures, is_masked=False),
    "diffusers/masked": functools.partial(pictures, is_masked=True),
    "position_bias": position_bias,
}
