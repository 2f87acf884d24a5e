"""Training steps whose lengths grow, and what a backward alone calls."""

from typing import Any

import torch
from growing_tensors import DIM, HEADS, New, Step

import torch_paged_attn as tpa
from torch_paged_attn.integrations.flash_attn import flash_attn_func


def training(new: New, is_dense: bool = False, **options: Any) -> Step:
    """Packs of a growing number of tokens, forward and backward."""

    def step(i: int) -> Any:
        tokens = 700 + 131 * i
        q, k, v = (x.requires_grad_() for x in new.qkv(tokens))
        bounds = new.bounds([tokens] if is_dense else [300, tokens - 300])
        out, _ = tpa.flash_varlen(q, k, v, cu_seqlens_q=bounds, causal=True, **options)
        out.backward(torch.empty_like(out))

    return step


def masked_training(new: New) -> Step:
    """A row under a mask of all pairs, as Transformers' DeepSeek V3.2 has it."""

    def step(i: int) -> Any:
        tokens = 300 + 37 * i
        q, k, v = (x.requires_grad_() for x in new.qkv(tokens))
        mask = new(1, tokens, tokens, dtype=torch.bool)
        bounds = new.bounds([tokens])
        out, _ = tpa.flash_varlen(q, k, v, cu_seqlens_q=bounds, attn_bias=mask)
        out.backward(torch.empty_like(out))

    return step


def dense_training(new: New) -> Step:
    def step(i: int) -> Any:
        tensors = [x.requires_grad_() for x in new.qkv(2, 100 + 37 * i)]
        out = flash_attn_func(*tensors, causal=True)
        out.backward(torch.empty_like(out))

    return step


def blocksparse_training(new: New) -> Step:
    def step(i: int) -> Any:
        length = 512 + 64 * i
        layout = tpa.layouts.local_strided(
            1, length, 64, local_blocks=4, vert_stride=8, device=new.device
        )
        q, k, v = (x.requires_grad_() for x in new.qkv(length))
        bounds = new.bounds([length])
        out, _ = tpa.blocksparse(q, k, v, cu_seqlens_q=bounds, causal=True, **layout.arguments())
        out.backward(torch.empty_like(out))

    return step


def merge_training(new: New) -> Step:
    """The backward of merging two partial results."""

    def step(i: int) -> Any:
        tokens = 1 + 7 * i
        out = new(tokens, HEADS, DIM).requires_grad_()
        lse = new(HEADS, tokens, dtype=torch.float32).requires_grad_()
        merged, _ = tpa.merge_states(out, lse, out, lse)
        merged.backward(torch.empty_like(merged))

    return step
