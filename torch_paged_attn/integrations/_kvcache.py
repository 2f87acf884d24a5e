"""What `flash_attn_with_kvcache` does before it attends: cache rows as pages, new tokens stored.

Torch operators on the device alone: nothing is read on the host of an accelerator.
"""

import torch
from torch import Tensor

from torch_paged_attn.ops import reshape_and_cache

OP = "flash_attn_with_kvcache"


def multiples(seqlen: int, batch: int, device: torch.device) -> Tensor:
    """cu_seqlens of `batch` sequences of one length."""
    return torch.arange(batch + 1, dtype=torch.int32, device=device) * seqlen


def end_to_end(x: Tensor) -> bool:
    """Whether the rows of (batch, seqlen, ...) follow one another in memory."""
    return x.shape[0] <= 1 or x.numel() == 0 or x.stride(0) == x.shape[1] * x.stride(1)


def rows_as_pages(cache: Tensor, cache_batch_idx: Tensor | None, batch: int) -> Tensor:
    """The block table of a cache without pages: each of its rows is one."""
    if cache_batch_idx is not None:
        return cache_batch_idx.to(torch.int32)[:, None]
    if cache.shape[0] != batch:
        raise ValueError(
            f"{OP}: k_cache must have a row for each of {batch} sequences unless cache_batch_idx "
            f"or a block_table is given, got shape {tuple(cache.shape)}"
        )
    return torch.arange(batch, dtype=torch.int32, device=cache.device)[:, None]


def behind_leftpad(
    k_cache: Tensor, v_cache: Tensor, block_table: Tensor, cache_leftpad: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The same caches as pages of one slot, and the table that starts behind the padding."""
    num_slots, page_size = k_cache.shape[0] * k_cache.shape[1], k_cache.shape[1]
    if not (end_to_end(k_cache) and end_to_end(v_cache)) or num_slots >= 2**31:
        raise NotImplementedError(
            f"{OP}: cache_leftpad is offered only for caches of fewer than 2^31 slots whose rows "
            f"lie end to end, got k_cache of shape {tuple(k_cache.shape)}, "
            f"strides {k_cache.stride()}"
        )
    slot = torch.arange(block_table.shape[1] * page_size, device=k_cache.device)
    # what lies past the end is past every length as well: it is never looked up
    slot = (slot + cache_leftpad[:, None]).clamp(max=max(len(slot) - 1, 0))
    table = block_table.gather(1, slot // page_size) * page_size + (slot % page_size).int()
    return k_cache.flatten(0, 1)[:, None], v_cache.flatten(0, 1)[:, None], table


def positions(cu_seqlens: Tensor, starts: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """Sequence and position (total,) of tokens laid end to end, the first of each at starts.

    Tokens past cu_seqlens[-1] are padding: their position is -1.
    """
    token = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)
    padding = sequence == starts.shape[0]
    sequence = sequence.clamp(max=starts.shape[0] - 1)
    position = token - cu_seqlens[sequence] + starts[sequence]
    return sequence, position.masked_fill(padding, -1)


def rotate(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotary embedding (arXiv 2104.09864) of the first 2 * cos.shape[1] elements of each head.

    x: (total, heads, head_dim); cos, sin: (positions, rotary_dim / 2)
    interleaved: pairs are neighbours (GPT-J); otherwise the two halves (GPT-NeoX)
    """
    rotary_dim = 2 * cos.shape[1]
    row = position.clamp(0, cos.shape[0] - 1)  # padding has no position, and is not used either
    cos, sin = cos[row][:, None].float(), sin[row][:, None].float()
    turned = x[..., :rotary_dim].float()
    a, b = (turned[..., ::2], turned[..., 1::2]) if interleaved else turned.chunk(2, dim=-1)
    pairs = (a * cos - b * sin, a * sin + b * cos)
    turned = torch.stack(pairs, dim=-1).flatten(-2) if interleaved else torch.cat(pairs, dim=-1)
    return torch.cat([turned.to(x.dtype), x[..., rotary_dim:]], dim=-1)


def store(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    sequence: Tensor,
    position: Tensor,
    k_descale: Tensor | None,
    v_descale: Tensor | None,
) -> None:
    """Write each token at its position of its sequence; where the table has no page, nothing."""
    page_size = k_cache.shape[1]
    capacity = block_table.shape[1] * page_size
    inside = (position >= 0) & (position < capacity)
    entry = position.clamp(0, max(capacity - 1, 0)) // page_size
    # 64-bit: page * page_size may pass 2^31
    page = block_table[sequence, entry].long()
    slot = torch.where(inside & (page >= 0), page * page_size + position % page_size, -1)
    scales: list[Tensor | None] = [None, None]
    if k_cache.dtype.itemsize == 1:
        scales = [k_descale, v_descale]
        for name, scale in zip(("k_descale", "v_descale"), scales, strict=True):
            if scale is not None and scale.dim() > 1:
                raise NotImplementedError(
                    f"{OP}: {name} of shape (batch, num_kv_heads) is not offered with k and v"
                )
    reshape_and_cache(key, value, (k_cache.transpose(1, 2), v_cache.transpose(1, 2)), slot, *scales)


def check_room(seqlens: Tensor, capacity: int) -> None:
    """Raise where new tokens pass the end of the table, on the CPU, where reading is free."""
    if seqlens.device.type != "cpu" or torch.compiler.is_compiling() or not seqlens.numel():
        return
    longest = int(seqlens.max())
    if longest > capacity:
        raise RuntimeError(
            f"{OP}: cache_seqlens and the new tokens come to {longest}, past the end of the "
            f"cache: its block_table (or its rows) has room for {capacity}"
        )
