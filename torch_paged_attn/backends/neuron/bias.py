"""`attn_bias` as rows that the kernel gathers: one row of `tile_k` keys, in their order."""

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_paged_attn.planning.work_list import WorkList


def lay_out_bias(
    attn_bias: Tensor, items: WorkList, group_size: int, start: Tensor, stop: Tensor
) -> tuple[Tensor, int, Tensor, Tensor]:
    """Rows, elements from one KV head to the next, row of each query row, keys that nobody sees.

    `start` and `stop` `(total_q,)` bound what tokens see without the bias. The last two are
    `(num_items, tile_q, 1)` and `(num_items, tile_q, tile_k / tile_q)`; key `c * tile_q + p` of an
    item is column c of line p.
    """
    num_heads, total_q, columns = attn_bias.shape
    if attn_bias.dtype == torch.bool:
        attn_bias = torch.zeros(attn_bias.shape, device=attn_bias.device).masked_fill(
            ~attn_bias, float("-inf")
        )
    bias = F.pad(attn_bias.float(), (0, -columns % items.tile_k))
    tiles = bias.shape[2] // items.tile_k
    # an item that shows no key may lie past the last tile
    tile = (items.first_key // items.tile_k).clamp(max=max(tiles - 1, 0))
    token, head = items.rows // group_size, items.rows % group_size
    is_shared = num_heads == 1
    row = (token if is_shared else head * total_q + token) * tiles + tile[:, None]

    keys = torch.arange(bias.shape[2])
    seen = (bias != float("-inf")).any(0).cpu()
    seen &= (keys >= start[:, None]) & (keys < stop[:, None])
    # how many of the tokens before t see a key: two of these bound a tile's tokens
    before = F.pad(seen.cumsum(0, dtype=torch.int32), (0, 0, 1, 0))
    key = tile[:, None] * items.tile_k + torch.arange(items.tile_k)
    first, last = token[:, :1], token[:, -1:]
    absent = before[last + 1, key] == before[first, key]
    return (
        bias.reshape(-1, items.tile_k),
        0 if is_shared else group_size * total_q * bias.shape[2],
        row[..., None],
        absent.unflatten(1, (-1, items.tile_q)).transpose(1, 2),
    )
