"""Layouts made from a BlockMask of `torch.nn.attention.flex_attention`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torch_paged_attn.layouts.layout import BlockSparseLayout, from_dense_mask

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


# masks that need no layout
INSTEAD = (
    "A mask of documents or of a sliding window needs no layout: pass cu_seqlens_q with the "
    "documents' lengths, or window_size_left, to flash_varlen"
)


def from_block_mask(
    block_mask: BlockMask, *, causal: bool = False, widen_partial: bool = False
) -> BlockSparseLayout:
    """The layout with the blocks of a BlockMask. It has a batch if that of the BlockMask is not 1.

    A layout can only list whole blocks, while the mask_mod of a BlockMask also hides keys inside of
    its partial blocks. So one of these must hold:

    - There is no mask_mod, or no partial block. The layout is then exact.
    - causal=True: the layout is for `blocksparse(..., causal=True)`. The mask_mod is evaluated in
      the partial blocks and must be the causal mask there, q_idx >= kv_idx.
    - widen_partial=True: partial blocks are listed whole, and queries see keys that mask_mod hides.
      A window or attn_bias may hide them again.

    Raises:
        ValueError: none of these holds; BLOCK_SIZE is not a pair of the op's block sizes; or Q_LEN
            and KV_LEN differ (flex_attention counts query positions from 0, the ops from Lk - Lq).
    """
    q_len, kv_len = block_mask.seq_lengths
    if q_len != kv_len:
        raise ValueError(
            "block_mask must have equal Q_LEN and KV_LEN (its rows stand for positions), "
            f"got {q_len} and {kv_len}"
        )
    q_block_size, k_block_size = block_mask.BLOCK_SIZE
    num_cols = max(block_mask.kv_indices.size(-1), -(-kv_len // k_block_size))
    partial = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, num_cols)
    full = torch.zeros_like(partial)
    if block_mask.full_kv_num_blocks is not None and block_mask.full_kv_indices is not None:
        full = _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, num_cols)
    if _masks_nothing(block_mask):
        full, partial = full | partial, torch.zeros_like(partial)

    if causal:
        _check_causal(block_mask, full, partial)
    elif not widen_partial and bool(partial.any()):
        raise ValueError(
            f"block_mask has {int(partial.sum())} partial blocks, inside which its mask_mod hides "
            "keys, and a layout cannot. Pass causal=True if mask_mod is the causal mask there and "
            "call blocksparse with causal=True, or widen_partial=True to see these blocks whole. "
            f"{INSTEAD}"
        )
    mask = full | partial
    mask = mask[0] if mask.size(0) == 1 else mask
    return from_dense_mask(mask, q_block_size, k_block_size)


def _listed(num_blocks: Tensor, indices: Tensor, num_cols: int) -> Tensor:
    """Bool (batch, H, rows, cols): True for the first `num_blocks` column indices of each row."""
    indices = indices[(None,) * (4 - indices.dim())]  # batch and H may be missing
    entry = torch.arange(indices.size(-1), device=indices.device)
    # later entries may hold anything: they go to an extra column, which is cut off at the end
    column = torch.where(entry < num_blocks[..., None], indices, num_cols).long()
    mask = torch.zeros(*indices.shape[:-1], num_cols + 1, dtype=torch.bool, device=indices.device)
    return mask.scatter_(-1, column, True)[..., :num_cols]


def _masks_nothing(block_mask: BlockMask) -> bool:
    from torch.nn.attention.flex_attention import noop_mask

    return block_mask.mask_mod is noop_mask


def _check_causal(block_mask: BlockMask, full: Tensor, partial: Tensor) -> None:
    """Raise ValueError unless the listed blocks with a causal mask mean the same as block_mask."""
    q_len, kv_len = block_mask.seq_lengths
    q_block_size, k_block_size = block_mask.BLOCK_SIZE
    first_q = torch.arange(full.size(-2), device=full.device)[:, None] * q_block_size
    last_k = (torch.arange(full.size(-1), device=full.device) + 1) * k_block_size - 1
    cut = full & (last_k.clamp(max=kv_len - 1) > first_q)
    if bool(cut.any()):
        raise ValueError(
            f"causal=True, but {int(cut.sum())} full blocks of block_mask reach past the diagonal"
        )
    batch, head, row, col = partial.nonzero(as_tuple=True)
    q_idx = row[:, None] * q_block_size + torch.arange(q_block_size, device=full.device)
    kv_idx = col[:, None] * k_block_size + torch.arange(k_block_size, device=full.device)
    inside = (q_idx < q_len)[:, :, None] & (kv_idx < kv_len)[:, None]
    # a mask_mod may index tensors with these positions: those past the end of the sequence are
    # clamped, and their results ignored
    over_k = torch.vmap(block_mask.mask_mod, in_dims=(None, None, None, 0))
    over_q = torch.vmap(over_k, in_dims=(None, None, 0, None))
    visible = torch.vmap(over_q)(
        batch, head, q_idx.clamp(max=q_len - 1), kv_idx.clamp(max=kv_len - 1)
    )
    differs = inside & (visible != (q_idx[:, :, None] >= kv_idx[:, None]))
    count = int(differs.flatten(1).any(1).sum())
    if count:
        raise ValueError(
            f"causal=True, but in {count} of {len(batch)} partial blocks of block_mask the "
            "mask_mod is not the causal mask; widen_partial=True sees these blocks whole. "
            f"{INSTEAD}"
        )
