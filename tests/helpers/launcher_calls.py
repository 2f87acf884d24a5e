"""Calls whose launches tests look at: each is a function and its tensors."""

import functools

import torch

import torch_paged_attn

BF16 = torch.bfloat16


def prefill(num_heads):
    """Hopper's kernel, whose tensor maps are arguments."""
    q = torch.zeros(512, num_heads, 64, dtype=BF16)
    kv = torch.zeros(2, 32, 8, 16, 64, dtype=BF16)
    cu_seqlens = torch.tensor([0, 512], dtype=torch.int32)
    table = torch.arange(32, dtype=torch.int32).view(1, 32)
    used = torch.tensor([512], dtype=torch.int32)
    call = (q, *kv, cu_seqlens, None, 512, 512)
    options = {"causal": True, "seqused_k": used, "block_table": table}
    return functools.partial(torch_paged_attn.flash_varlen, *call, **options), (q, *kv, cu_seqlens)


def decode():
    """The portable kernel, whose arguments are groups with None among them."""
    q = torch.zeros(3, 8, 128, dtype=BF16)
    kv = torch.zeros(2, 24, 2, 16, 128, dtype=BF16)
    cu_seqlens = torch.arange(4, dtype=torch.int32)
    table = torch.arange(24, dtype=torch.int32).view(3, 8)
    used = torch.full((3,), 90, dtype=torch.int32)
    call = (q, *kv, cu_seqlens, None, 1, 128)
    options = {"causal": True, "seqused_k": used, "block_table": table, "softmax_scale": 0.3}
    tensors = q, *kv, cu_seqlens, table, used
    return functools.partial(torch_paged_attn.flash_varlen, *call, **options), tensors


def write():
    """Numbers of several kinds, and scales."""
    key = torch.zeros(5, 2, 128, dtype=BF16)
    cache = torch.zeros(2, 4, 2, 16, 128, dtype=torch.float8_e4m3fn)
    slots, scale = torch.arange(5), torch.ones(1)
    write = functools.partial(torch_paged_attn.reshape_and_cache, key, key, cache, slots)
    return functools.partial(write, scale, scale), (key, cache, slots, scale)
