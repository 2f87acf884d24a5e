"""Loops whose lengths grow with each step, one or more for each front end. `LOOPS[name](device)`
returns a function of the step's number; what it computes is worth nothing.
"""

import functools
from collections.abc import Callable
from typing import Any

import growing_engines
import growing_selected
import torch
from growing_tensors import BATCH, DIM, HEADS, KV_HEADS, New, Step
from growing_training import (
    blocksparse_training,
    dense_training,
    masked_training,
    merge_training,
    training,
)

import torch_paged_attn as tpa
from torch_paged_attn.integrations import torch_attention, torch_sdpa
from torch_paged_attn.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch_paged_attn.ops.append_and_attend import append_and_attend as append
from torch_paged_attn.ops.attend_cache import attend_cache as attend


def dense_prefill(new: New, **options: Any) -> Step:
    return lambda i: flash_attn_func(*new.qkv(2, 100 + 37 * i), causal=True, **options)


def dense_decode(new: New) -> Step:
    def step(i: int) -> Any:
        q, _, _ = new.qkv(BATCH, 1)
        _, k, v = new.qkv(BATCH, 1000 + i)
        return flash_attn_func(q, k, v, causal=True)

    return step


def remade_cache(new: New, least: int, growth: int, **options: Any) -> Step:
    """A dense cache made anew each step, as one that is concatenated."""

    def step(i: int) -> Any:
        q, _, _ = new.qkv(BATCH, 1)
        _, k, v = new.qkv(BATCH, least + growth * i)
        seqlens = new.ints([least + growth * i] * BATCH)
        return flash_attn_with_kvcache(q, k, v, cache_seqlens=seqlens, causal=True, **options)

    return step


def one_cache(new: New, tokens: int = 1, is_rotated: bool = False, **options: Any) -> Step:
    """One dense cache, to which each step appends."""
    _, *cache = new.qkv(BATCH, 8192)
    rotary = (new(8192, DIM // 2),) * 2 if is_rotated else ()

    def step(i: int) -> Any:
        q, k, v = new.qkv(BATCH, tokens)
        seqlens = new.ints([1000 + 30 * i] * BATCH)
        return flash_attn_with_kvcache(
            q, *cache, k, v, *rotary, cache_seqlens=seqlens, causal=True, **options
        )

    return step


def padded_cache(new: New) -> Step:
    """Rows of a dense cache with padding on the left."""
    _, *cache = new.qkv(BATCH, 8192)

    def step(i: int) -> Any:
        q, k, v = new.qkv(BATCH, 1)
        seqlens, padding = new.ints([1000 + 30 * i] * BATCH), new.ints(range(BATCH))
        return flash_attn_with_kvcache(
            q, *cache, k, v, cache_seqlens=seqlens, cache_leftpad=padding, causal=True
        )

    return step


def paged_with_kvcache(new: New, page_size: int = 16) -> Step:
    """Pages of which each step's table has more, and new keys and values."""
    pages = new(2, 4096, page_size, KV_HEADS, DIM)

    def step(i: int) -> Any:
        q, k, v = new.qkv(BATCH, 1)
        table = new.ints(range(BATCH * (70 + i))).view(BATCH, -1)
        seqlens = new.ints([page_size * (60 + i)] * BATCH)
        return flash_attn_with_kvcache(
            q, *pages, k, v, cache_seqlens=seqlens, block_table=table, causal=True
        )

    return step


def append_and_attend(new: New, page_size: int = 16) -> Step:
    """What `flash_attn_with_kvcache` calls for such calls on a GPU."""
    pages = new(2, 4096, page_size, KV_HEADS, DIM)

    def step(i: int) -> Any:
        batch = 1 + i
        q, k, v = new.qkv(batch, 1)
        table = new.ints(range(batch * (20 + i))).view(batch, -1) % 4096
        seqlens = new.ints([page_size * (10 + i)] * batch)
        return append(q, *pages, k, v, seqlens, table, causal=True)

    return step


def append_to_rows(new: New) -> Step:
    """The same with a rotary embedding, and a cache without pages that is made anew each step."""
    angles = new(4096, DIM // 2)

    def step(i: int) -> Any:
        batch = 1 + i
        cache = new(2, batch, 100 + 13 * i, KV_HEADS, DIM)
        q, k, v = new.qkv(batch, 1)
        rotary = *(None,) * 6, angles, angles
        return append(q, *cache, k, v, new.ints([10 + i] * batch), *rotary, causal=True)

    return step


def attend_cache(new: New, page_size: int = 0) -> Step:
    """What `flash_attn_with_kvcache` calls on a GPU for calls without new tokens: pages, or a dense
    cache that is made anew each step.
    """

    def step(i: int) -> Any:
        batch, keys = 1 + i, 100 + 13 * i
        width = -(-keys // page_size) if page_size else 1
        _, *cache = new.qkv(*((1024, page_size) if page_size else (batch, keys)))
        table = new.ints(range(batch * width)).view(batch, -1) % 1024 if page_size else None
        return attend(new.qkv(batch, 1)[0], *cache, new.ints([keys] * batch), table, causal=True)

    return step


def paged_kv_cache(new: New) -> Step:
    """A sequence more each step, while the others decode."""
    cache = tpa.PagedKVCache(1, 1 << 15, KV_HEADS, 16, DIM, dtype=torch.bfloat16, device=new.device)

    def step(i: int) -> Any:
        queries = [1] * i + [300 + 5 * i]
        for sequence, count in enumerate(queries):
            cache.append(sequence, count)
        batch = cache.batch(list(range(1 + i)), queries)
        q, k, v = new.qkv(sum(queries))
        tpa.reshape_and_cache(k, v, cache.kv_cache[0], batch.slot_mapping)
        return tpa.flash_varlen(q, *cache.kv_cache[0], **batch.arguments(), causal=True)

    return step


def paged_decode(new: New, page_size: int, said: bool = True, **options: Any) -> Step:
    """One batch decodes; `said`: with the hint on its longest sequence."""
    dtype = options.pop("kv_dtype", torch.bfloat16)
    pages = new.pages(6000, page_size, dtype)
    if dtype.itemsize == 1:
        options |= dict.fromkeys(("k_descale", "v_descale"), torch.ones((), device=new.device))

    def step(i: int) -> Any:
        keys = 500 + 11 * i
        q, _, _ = new.qkv(BATCH)
        width = -(-keys // page_size)
        return tpa.flash_varlen(
            q, *pages, cu_seqlens_q=new.ints(range(BATCH + 1)), max_seqlen_q=1,
            max_seqlen_k=keys if said else None, seqused_k=new.ints([keys] * BATCH),
            block_table=new.ints(range(BATCH * width)).view(BATCH, -1) % 6000, causal=True,
            **options,
        )  # fmt: skip

    return step


def paged_prefill(new: New, page_size: int, **options: Any) -> Step:
    """Prompts that grow, in pages whose table grows."""
    pages = new.pages(4096, page_size)

    def step(i: int) -> Any:
        tokens = [50 + 17 * i, 20 + 3 * i]
        width = -(-max(tokens) // page_size)
        q, _, _ = new.qkv(sum(tokens))
        return tpa.flash_varlen(
            q, *pages, cu_seqlens_q=new.bounds(tokens), max_seqlen_q=max(tokens),
            max_seqlen_k=max(tokens), seqused_k=new.ints(tokens),
            block_table=new.ints(range(2 * width)).view(2, -1) % 4096, causal=True, **options,
        )  # fmt: skip

    return step


def chunks(new: New) -> Step:
    """A prompt of many chunks, beside a few sequences that decode."""
    pages = new.pages(8192, 16)

    def step(i: int) -> Any:
        queries, keys = [512, *[1] * 7], [512 * (1 + i), *[100 + i] * 7]
        width = -(-max(keys) // 16)
        q, _, _ = new.qkv(sum(queries))
        return tpa.flash_varlen(
            q, *pages, cu_seqlens_q=new.bounds(queries), max_seqlen_q=max(queries),
            max_seqlen_k=max(keys), seqused_k=new.ints(keys),
            block_table=new.ints(range(8 * width)).view(8, -1) % 8192, causal=True,
        )  # fmt: skip

    return step


def packed(new: New, **options: Any) -> Step:
    """Packed sequences, one more each step, and each of them longer."""

    def step(i: int) -> Any:
        lengths = [64 + 19 * i // (1 + i)] * i + [64 + 3 * i]
        bounds, most = new.bounds(lengths), max(lengths)
        return flash_attn_varlen_func(
            *new.qkv(sum(lengths)), bounds, bounds, most, most, causal=True, **options
        )

    return step


def packed_unsaid(new: New) -> Step:
    """The same without hints, by the operator."""

    def step(i: int) -> Any:
        lengths = [64 + 19 * i // (1 + i)] * i + [64 + 3 * i]
        return tpa.flash_varlen(
            *new.qkv(sum(lengths)), cu_seqlens_q=new.bounds(lengths), causal=True
        )

    return step


def varlen_attn(new: New) -> Step:
    """The kernel behind `torch.nn.attention.varlen`."""

    def step(i: int) -> Any:
        lengths = [300 + 7 * i, 90 + i]
        bounds = new.bounds(lengths)
        return torch_attention.forward(
            *new.qkv(sum(lengths)), bounds, bounds, max(lengths), max(lengths), 0.0, True, False
        )

    return step


def sdpa(new: New, is_decode: bool) -> Step:
    """The kernel behind `scaled_dot_product_attention`."""

    def step(i: int) -> Any:
        q, k, v = (x.transpose(1, 2) for x in new.qkv(2, 200 + 13 * i))
        q = q[:, :, -1:] if is_decode else q
        return torch_sdpa.attend(q, k, v, not is_decode, None)

    return step


def blocksparse(new: New, heads: int = 1) -> Step:
    """Packed sequences that grow, under a layout that grows with them."""

    def step(i: int) -> Any:
        length = 512 + 64 * i
        layout = tpa.layouts.local_strided(
            heads, length, 64, local_blocks=4, vert_stride=8, device=new.device
        )
        return tpa.blocksparse(
            *new.qkv(length), cu_seqlens_q=new.bounds([length]), causal=True, **layout.arguments()
        )

    return step


def sharded_decode(new: New) -> Step:
    """A rank's share of a decode whose keys are on four ranks, and the sum of the parts."""
    pages = new.pages(4096, 16)

    def step(i: int) -> Any:
        keys = 100 + 5 * i
        width = -(-keys // 16)
        q, _, _ = new.qkv(BATCH)
        out, lse = tpa.flash_varlen(
            q, *pages, cu_seqlens_q=new.ints(range(BATCH + 1)), max_seqlen_q=1,
            seqused_k=new.ints([keys] * BATCH),
            block_table=new.ints(range(BATCH * width)).view(BATCH, -1), causal=True,
            q_position=new.ints([4 * keys] * BATCH), key_ranks=4, key_rank=1,
            out_dtype=torch.float32,
        )  # fmt: skip
        return tpa.merge_states([out] * 4, [lse] * 4, out_dtype=q.dtype)

    return step


def cache_writes(new: New) -> Step:
    """More tokens each step, into a cache that grows, too."""

    def step(i: int) -> Any:
        _, k, v = new.qkv(1 + 7 * i)
        pages = new(2, 100 + i, KV_HEADS, 16, DIM)
        slots = torch.arange(1 + 7 * i, device=new.device)
        return tpa.reshape_and_cache(k, v, pages, slots)

    return step


def merges(new: New, parts: int) -> Step:
    def step(i: int) -> Any:
        out, lse = new(1 + 7 * i, HEADS, DIM), new(HEADS, 1 + 7 * i, dtype=torch.float32)
        if parts == 2:
            return tpa.merge_states(out, lse, out, lse)
        return tpa.merge_states([out] * parts, [lse] * parts)

    return step


def latent(new: New, is_decode: bool, page_size: int = 64) -> Step:
    """Latent attention (MLA) over pages of one head of 576 numbers, whose first 512 are values."""
    pages = new(4096, 1, page_size, 576)

    def step(i: int) -> Any:
        lengths = [1] * BATCH if is_decode else [60 + 9 * i, 30 + i]
        keys = [500 + 21 * i] * BATCH if is_decode else lengths
        width = -(-max(keys) // page_size)
        return tpa.flash_varlen(
            new(sum(lengths), 16, 576), pages, pages[..., :512],
            cu_seqlens_q=new.bounds(lengths), max_seqlen_q=max(lengths), max_seqlen_k=max(keys),
            seqused_k=new.ints(keys),
            block_table=new.ints(range(len(keys) * width)).view(len(keys), -1) % 4096, causal=True,
        )  # fmt: skip

    return step


INT8 = {"kv_dtype": torch.int8}

LOOPS: dict[str, Callable[[New], Step]] = {
    "flash_attn_func/prefill": dense_prefill,
    "flash_attn_func/prefill_window": lambda new: dense_prefill(new, window_size=(256, 0)),
    "flash_attn_func/decode": dense_decode,
    "flash_attn_func/training": dense_training,
    "with_kvcache/remade_by_1": lambda new: remade_cache(new, 1000, 1),
    "with_kvcache/remade_by_16": lambda new: remade_cache(new, 1024, 16),
    "with_kvcache/remade_by_128": lambda new: remade_cache(new, 1024, 128),
    "with_kvcache/remade_window": lambda new: remade_cache(new, 1000, 1, window_size=(512, 0)),
    "with_kvcache/remade_from_1": lambda new: remade_cache(new, 1, 1),
    "with_kvcache/one_cache": one_cache,
    "with_kvcache/one_cache_rotary": lambda new: one_cache(new, is_rotated=True),
    "with_kvcache/one_cache_guessed": lambda new: one_cache(new, tokens=4),
    "with_kvcache/leftpad": padded_cache,
    "with_kvcache/paged": paged_with_kvcache,
    "append_and_attend": append_and_attend,
    "append_and_attend/rows": append_to_rows,
    "attend_cache/dense": attend_cache,
    "attend_cache/paged": lambda new: attend_cache(new, 16),
    "paged_kv_cache": paged_kv_cache,
    "flash_varlen/paged_decode": lambda new: paged_decode(new, 16),
    "flash_varlen/paged_decode_unsaid": lambda new: paged_decode(new, 16, said=False),
    "flash_varlen/paged_decode_odd": lambda new: paged_decode(new, 17),
    "flash_varlen/paged_decode_int8": lambda new: paged_decode(new, 16, **INT8),
    "flash_varlen/paged_decode_window": lambda new: paged_decode(new, 16, window_size_left=300),
    "flash_varlen/paged_prefill": lambda new: paged_prefill(new, 16),
    "flash_varlen/paged_prefill_odd": lambda new: paged_prefill(new, 17),
    "flash_varlen/chunks": chunks,
    "flash_varlen/packed_unsaid": packed_unsaid,
    "flash_varlen/training": training,
    "flash_varlen/training_dense": lambda new: training(new, is_dense=True),
    "flash_varlen/training_masked": masked_training,
    "flash_attn_varlen_func": packed,
    "varlen_attn": varlen_attn,
    "sdpa/prefill": lambda new: sdpa(new, is_decode=False),
    "sdpa/decode": lambda new: sdpa(new, is_decode=True),
    "blocksparse": blocksparse,
    "blocksparse/heads": lambda new: blocksparse(new, HEADS),
    "blocksparse/training": blocksparse_training,
    "sharded_decode": sharded_decode,
    "reshape_and_cache": cache_writes,
    "merge_states": lambda new: merges(new, 2),
    "merge_states/list": lambda new: merges(new, 4),
    "merge_states/training": merge_training,
    "latent/decode": lambda new: latent(new, is_decode=True),
    "latent/prefill": lambda new: latent(new, is_decode=False),
    **{
        f"latent/decode_{n}": functools.partial(latent, is_decode=True, page_size=n)
        for n in (1, 16, 17, 32, 128)
    },
    "latent/prefill_16": lambda new: latent(new, is_decode=False, page_size=16),
    **growing_engines.LOOPS,
    **growing_selected.LOOPS,
}


def run(name: str, steps: int, device: str = "cpu", stride: int = 1) -> None:
    """A loop of so many steps, or of each `stride`th of them."""
    step = LOOPS[name](New(torch.device(device)))
    for i in range(0, steps, stride):
        step(i)
