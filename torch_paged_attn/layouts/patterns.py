"""Functions that build common block-sparse patterns.

Each takes `max_seqlen`, the length in tokens of the longest sequence. The layout covers every
position below that, so that the same layout is used in prefill, chunked prefill and decode.
`device` None is torch's default device. Wrong arguments raise ValueError.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torch_paged_attn.layouts.layout import BlockSparseLayout, check_block_size, from_dense_mask


def local_strided(
    num_heads: int,
    max_seqlen: int,
    block_size: int = 64,
    local_blocks: int = 16,
    vert_stride: int = 8,
    homo_head: bool = False,
    *,
    q_block_size: int | None = None,
    device: torch.device | str | None = None,
) -> BlockSparseLayout:
    """Phi-3-small's pattern: a local band and every vert_stride-th column (arXiv 2404.14219).

    Block row r of head h sees block column c <= r if

    - r - c < local_blocks, or
    - (c + h * step + 1) % vert_stride == 0, with step = max(1, vert_stride // num_heads).

    With homo_head, step is 0: all heads have the same pattern, and the layout has one head (H = 1).

    num_heads: of the whole model, over all tensor-parallel ranks; take a rank's share with
        `.heads(start, stop)`. Give num_kv_heads instead for one pattern per KV head, which the
        query heads of its group share (vLLM's homo_head_group).
    q_block_size: positions per row; None: block_size. If it is smaller, the mask is the same in
        finer rows. If it is larger, a row sees the union of what its blocks see, as in vLLM.
    """
    _check_at_least("num_heads", num_heads, 1)
    _check_at_least("local_blocks", local_blocks, 0)
    _check_at_least("vert_stride", vert_stride, 1)
    blocks = torch.arange(_num_blocks(max_seqlen, "block_size", block_size), device=device)
    step = 0 if homo_head else max(1, vert_stride // num_heads)
    shift = torch.arange(1 if homo_head else num_heads, device=device) * step % vert_stride
    # heads whose shifts are equal share a pattern: build each one once
    shift, pattern_of_head = torch.unique(shift, return_inverse=True)
    strided = (blocks + shift[:, None] + 1) % vert_stride == 0  # (patterns, cols)
    distance = blocks[:, None] - blocks  # (rows, cols)
    mask = (distance >= 0) & ((distance < local_blocks) | strided[:, None])
    q_block_size = block_size if q_block_size is None else q_block_size
    layout = from_dense_mask(_resize_rows(mask, block_size, q_block_size), q_block_size, block_size)
    return BlockSparseLayout(
        layout.crow_indices[pattern_of_head],
        layout.col_indices[pattern_of_head],
        q_block_size,
        block_size,
        layout.num_cols,
    )


def sliding_window(
    max_seqlen: int,
    window_size_left: int,
    window_size_right: int = 0,
    q_block_size: int = 64,
    k_block_size: int | None = None,
    *,
    device: torch.device | str | None = None,
) -> BlockSparseLayout:
    """All blocks that contain a pair of a query at p and a key at j with
    p - window_size_left <= j <= p + window_size_right.

    Window sizes are in tokens, inclusive; -1 is unbounded, as in the ops. The layout has one head
    (H = 1). The blocks at the window's edges also contain keys outside of it: pass the same window
    to the op to mask these.
    """
    _check_at_least("window_size_left", window_size_left, -1)
    _check_at_least("window_size_right", window_size_right, -1)
    k_block_size = q_block_size if k_block_size is None else k_block_size
    rows = torch.arange(_num_blocks(max_seqlen, "q_block_size", q_block_size), device=device)
    cols = torch.arange(_num_blocks(max_seqlen, "k_block_size", k_block_size), device=device)
    first_q, first_k = rows[:, None] * q_block_size, cols * k_block_size
    mask = torch.ones(len(rows), len(cols), dtype=torch.bool, device=device)
    if window_size_left >= 0:
        mask &= first_k + k_block_size - 1 >= first_q - window_size_left
    if window_size_right >= 0:
        mask &= first_k <= first_q + q_block_size - 1 + window_size_right
    return from_dense_mask(mask, q_block_size, k_block_size)


def bigbird(
    num_heads: int,
    max_seqlen: int,
    block_size: int = 64,
    global_blocks: int = 2,
    window_blocks: int = 3,
    random_blocks: int = 3,
    *,
    causal: bool = False,
    seed: int = 0,
    device: torch.device | str | None = None,
) -> BlockSparseLayout:
    """BigBird's pattern: global, window and random blocks (arXiv 2007.14062).

    global_blocks: so many first rows list all columns, and so many first columns are in all rows
    window_blocks: columns centred on the row's diagonal block; odd, or 0
    random_blocks: further columns, drawn for each head and row without repetition; all that are
        left if there are fewer
    causal: whether only columns up to the diagonal are listed and drawn
    seed: of the random columns, which are the same on every device
    """
    _check_at_least("num_heads", num_heads, 1)
    _check_at_least("global_blocks", global_blocks, 0)
    _check_at_least("random_blocks", random_blocks, 0)
    if window_blocks < 0 or (window_blocks and window_blocks % 2 == 0):
        raise ValueError(f"window_blocks must be 0 or an odd number, got {window_blocks}")
    # drawn on the CPU, whatever torch's default device is, so that every device gets the same
    blocks = torch.arange(_num_blocks(max_seqlen, "block_size", block_size), device="cpu")
    row, col = blocks[:, None], blocks
    fixed = (row < global_blocks) | (col < global_blocks)
    fixed |= 2 * (row - col).abs() < window_blocks
    allowed = (col <= row) if causal else torch.ones_like(fixed)
    fixed &= allowed

    generator = torch.Generator("cpu").manual_seed(seed)
    order = torch.rand(num_heads, *fixed.shape, generator=generator, device="cpu")
    order.masked_fill_(fixed | ~allowed, -1)
    drawn = order.topk(min(random_blocks, len(blocks)), dim=-1)
    mask = torch.zeros_like(order, dtype=torch.bool)
    mask.scatter_(-1, drawn.indices, drawn.values >= 0)
    layout = from_dense_mask(mask | fixed, block_size)
    return layout.to(torch.get_default_device() if device is None else device)


def _resize_rows(mask: Tensor, block_size: int, q_block_size: int) -> Tensor:
    """A mask (..., rows, cols) over rows of `block_size` positions, for rows of `q_block_size`.

    Larger rows see the union of what the smaller ones see.
    """
    check_block_size("q_block_size", q_block_size)
    if q_block_size <= block_size:
        return mask.repeat_interleave(block_size // q_block_size, dim=-2)
    merged = q_block_size // block_size
    missing = -mask.size(-2) % merged
    mask = torch.nn.functional.pad(mask, (0, 0, 0, missing))
    merged_rows = mask.size(-2) // merged
    return mask.reshape(*mask.shape[:-2], merged_rows, merged, mask.size(-1)).any(-2)


def _num_blocks(max_seqlen: int, name: str, block_size: int) -> int:
    check_block_size(name, block_size)
    _check_at_least("max_seqlen", max_seqlen, 0)
    return -(-max_seqlen // block_size)


def _check_at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")
