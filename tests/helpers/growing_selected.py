"""Calls for selected keys whose lengths grow with each step: attention and its backward, the mass
of units, and the selection; single keys of latents, and blocks of keys for each KV head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from growing_tensors import BATCH, New, Step
from torch import Tensor

import torch_paged_attn as tpa


class Lists(NamedTuple):
    """A model's lists of keys."""

    heads: int
    kv_heads: int
    dims: tuple[int, int]  # of keys and values
    entries: int
    select_size: int
    page_size: int


# DeepSeek's lists of tokens, and those of models with few heads; MiniMax M3's blocks
TOKENS = Lists(64, 1, (576, 512), 512, 1, 64)
FEW_HEADS = TOKENS._replace(heads=16)
BLOCKS = Lists(64, 4, (128, 128), 16, 128, 128)
INDEX_HEADS, INDEX_DIM = 32, 128


class Batch(NamedTuple):
    """Sequences, as `selected_attention` takes them: keys and values are pages or packed."""

    q: Tensor
    kv: tuple[Tensor, Tensor]
    key_indices: Tensor
    lengths: dict[str, Any]


def a_batch(new: New, of: Lists, queries: list[int], keys: list[int], is_paged: bool) -> Batch:
    dim, dim_v = of.dims
    units = torch.arange(of.entries, dtype=torch.int32, device=new.device)
    indices = units.expand(sum(queries), of.kv_heads, -1).contiguous()
    lengths = {
        "cu_seqlens_q": new.bounds(queries),
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(keys),
    }
    if is_paged:
        width = -(-max(keys) // of.page_size)
        k = new(1024, of.page_size, of.kv_heads, dim).transpose(1, 2)
        table = new.ints(range(len(keys) * width)).view(len(keys), -1) % 1024
        lengths |= {"seqused_k": new.ints(keys), "block_table": table}
    else:
        k = new(sum(keys), of.kv_heads, dim)
        lengths |= {"cu_seqlens_k": new.bounds(keys)}
    v = k[..., :dim_v] if of.kv_heads == 1 else torch.empty_like(k[..., :dim_v])
    return Batch(new(sum(queries), of.heads, dim), (k, v), indices, lengths)


def decode(new: New, of: Lists) -> Step:
    def step(i: int) -> Any:
        batch, keys = BATCH + i // 20, 1000 + 7 * i
        x = a_batch(new, of, [1] * batch, [keys] * batch, is_paged=True)
        options = {"select_size": of.select_size, "causal": True}
        return tpa.selected_attention(x.q, *x.kv, x.key_indices, **x.lengths, **options)

    return step


def prefill(new: New, of: Lists, is_paged: bool) -> Step:
    def step(i: int) -> Any:
        tokens = [60 + 9 * i, 30 + i]
        x = a_batch(new, of, tokens, tokens, is_paged)
        options = {"select_size": of.select_size, "causal": True}
        return tpa.selected_attention(x.q, *x.kv, x.key_indices, **x.lengths, **options)

    return step


def in_training(of: Lists) -> Lists:
    """Shorter ones: the mathematics of the sort is PyTorch's, and takes its time on a CPU."""
    return of._replace(heads=4 * of.kv_heads, entries=4)


def training(new: New, of: Lists) -> Step:
    of = in_training(of)

    def step(i: int) -> Any:
        tokens = [60 + 9 * i, 30 + i]
        x = a_batch(new, of, tokens, tokens, is_paged=False)
        q, k = x.q.requires_grad_(), x.kv[0].requires_grad_()
        v = k[..., : of.dims[1]] if of.kv_heads == 1 else x.kv[1].requires_grad_()
        options = {"select_size": of.select_size, "causal": True}
        out, _ = tpa.selected_attention(q, k, v, x.key_indices, **x.lengths, **options)
        out.backward(torch.empty_like(out))

    return step


def mass(new: New, of: Lists) -> Step:
    def step(i: int) -> Any:
        tokens = [60 + 9 * i, 30 + i]
        x = a_batch(new, of, tokens, tokens, is_paged=True)
        lse = new(of.heads, sum(tokens), dtype=torch.float32)
        options = {"select_size": of.select_size, "causal": True}
        return tpa.selected_mass(x.q, x.kv[0], lse, x.key_indices, **x.lengths, **options)

    return step


def keys(new: New, of: Lists, is_decode: bool) -> Step:
    """The selection: index keys of one head, in pages."""
    of_index = of._replace(kv_heads=1, dims=(INDEX_DIM, INDEX_DIM), heads=INDEX_HEADS)

    def step(i: int) -> Any:
        count = [1] * BATCH if is_decode else [60 + 9 * i, 30 + i]
        most = [1000 + 30 * i] * BATCH if is_decode else count
        x = a_batch(new, of_index, count, most, is_paged=True)
        weights = new(sum(count), INDEX_HEADS, dtype=torch.float32)
        options = {"select_size": of.select_size, "num_units": of.entries, "causal": True}
        return tpa.select_keys(x.q, x.kv[0], weights, **x.lengths, **options)

    return step


KINDS = {"tokens": TOKENS, "few_heads": FEW_HEADS, "blocks": BLOCKS}

LOOPS: dict[str, Callable[[New], Step]] = {}
for _name, _of in KINDS.items():
    LOOPS |= {
        f"selected/decode_{_name}": lambda new, of=_of: decode(new, of),
        f"selected/prefill_{_name}": lambda new, of=_of: prefill(new, of, is_paged=True),
    }
for _name in ("tokens", "blocks"):
    _of = KINDS[_name]
    LOOPS |= {
        f"selected/prefill_packed_{_name}": lambda new, of=_of: prefill(new, of, is_paged=False),
        f"selected/training_{_name}": lambda new, of=_of: training(new, of),
        f"selected/mass_{_name}": lambda new, of=_of: mass(new, of),
        f"selected/keys_decode_{_name}": lambda new, of=_of: keys(new, of, is_decode=True),
        f"selected/keys_prefill_{_name}": lambda new, of=_of: keys(new, of, is_decode=False),
    }
