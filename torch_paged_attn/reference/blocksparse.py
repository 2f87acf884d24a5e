"""Plain PyTorch `blocksparse`: the formula of `flash_varlen` under one more mask."""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.reference.attention import attend


def blocksparse(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    crow_indices: Tensor,
    col_indices: Tensor,
    *args: Any,
    q_block_size: int = 64,
    k_block_size: int = 64,
    causal: bool = True,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.blocksparse`, plus `precision`."""

    def layout_mask(b: int, positions: Tensor, keys: Tensor) -> Tensor:
        crow, col = (t[b] if t.dim() == 3 else t for t in (crow_indices, col_indices))
        heads, num_rows = crow.shape[0], crow.shape[1] - 1
        num_cols = keys.numel() // k_block_size + 1
        listed = torch.zeros(heads, num_rows, num_cols, dtype=torch.bool)
        for h in range(heads):
            bounds = crow[h].tolist()
            for row in range(num_rows):
                columns = col[h, bounds[row] : bounds[row + 1]].long()
                listed[h, row, columns[columns < num_cols]] = True
        row_of = positions.div(q_block_size, rounding_mode="floor")
        mask = listed[:, row_of.clamp(min=0)][..., keys // k_block_size] & (positions >= 0)[:, None]
        return mask.repeat_interleave(q.shape[1] // heads, 0)

    return attend(q, k, v, *args, causal=causal, layout_mask=layout_mask, **kwargs)
