"""Plain PyTorch `blocksparse`: the formula of `flash_varlen` with one more mask."""

import functools
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.reference.attention import FLOAT32, Precision, attend


def blocksparse(*args: Any, precision: Precision = FLOAT32, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.blocksparse`, plus `precision`."""
    call = AttentionCall.blocksparse(*args, **kwargs)
    return attend(call, precision, functools.partial(layout_mask, call))


def layout_mask(call: AttentionCall, b: int, positions: Tensor, keys: Tensor) -> Tensor:
    """Bool `(num_heads, Lq, Lk)`: whether the block of each query and key is in the layout.

    b: the sequence; positions: (Lq,) of its queries; keys: (Lk,) positions of its keys
    """
    if keys.numel() == 0:
        return positions.new_ones(call.num_heads, positions.numel(), 0, dtype=torch.bool)
    layout = call.layout
    assert layout is not None
    crow, col = (t[b] if t.dim() == 3 else t for t in (layout.crow_indices, layout.col_indices))
    heads, num_rows = crow.shape[0], crow.shape[1] - 1
    num_cols = int(keys[-1]) // layout.k_block_size + 1
    listed = torch.zeros(heads, num_rows, num_cols, dtype=torch.bool, device=crow.device)
    for h in range(heads):
        bounds = crow[h].tolist()
        for row in range(num_rows):
            columns = col[h, bounds[row] : bounds[row + 1]].long()
            listed[h, row, columns[columns < num_cols]] = True
    row_of = positions.div(layout.q_block_size, rounding_mode="floor").clamp(min=0)
    mask = listed[:, row_of][..., keys // layout.k_block_size] & (positions >= 0)[:, None]
    return mask.repeat_interleave(call.num_heads // heads, 0)
