"""`attn_bias` as rows that the kernel gathers: one row of `tile_k` keys per item and token."""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.backends.neuron.columns import count_up
from torch_paged_attn.backends.neuron.work_info import Heads, WorkInfo
from torch_paged_attn.backends.neuron.work_list import WorkList


@dataclasses.dataclass(frozen=True)
class BiasRows:
    """A bias as the kernel reads it: `rows` of `tile_k` keys, and each item's rows among them.

    `absent` (num_items, tile_k) says which columns it hides from every row of an item.
    """

    rows: Tensor
    index: Tensor  # (num_items, P, depth) int32
    head_stride: int  # elements from one KV head's rows to the next's
    absent: Tensor


def lay_out_bias(attn_bias: Tensor, info: WorkInfo, heads: Heads, run: int) -> BiasRows:
    """The bias in rows of (bias head, item, token of the item's stack)."""
    work, device = info.work, attn_bias.device
    is_shared = attn_bias.shape[0] == 1
    first, last = work.token[:, 0, 0], work.token[:, -1, -1]
    item, rank = count_up((last - first + 1)[work.stack])
    token = first[work.stack][item] + rank
    start = torch.nn.functional.pad(
        torch.bincount(item, minlength=work.num_items).cumsum(0), (1, 0)
    )
    keys = (work.keys[..., None] + torch.arange(run)).flatten(1)
    keys = keys.clamp(max=max(attn_bias.shape[2] - 1, 0))

    if attn_bias.shape[2] == 0:  # no sequence has a key
        rows = torch.zeros(attn_bias.shape[0], len(item), work.tile_k, device=device)
    else:
        at = token.to(device)[:, None], keys[item].to(device)
        rows = torch.stack([head[at] for head in attn_bias])
    if rows.dtype == torch.bool:
        rows = torch.zeros(rows.shape, device=device).masked_fill(~rows, float("-inf"))
    rows = rows.float()

    # a column is absent where no head of no token that may see it has a bias above -inf
    row_start, row_stop = (
        torch.zeros(len(item), dtype=torch.long).scatter_reduce(
            0, _row_of(work, start), edge.flatten(), "amax"
        )
        for edge in (work.row_start, work.row_stop)
    )
    column = torch.arange(work.tile_k)
    may_see = (column >= row_start[:, None]) & (column < row_stop[:, None])
    planes = 1 if is_shared else heads.planes
    shows = (rows != float("-inf")).unflatten(0, (planes, -1)).any(1)
    plane = (work.plane[work.stack][item] if planes > 1 else torch.zeros_like(item)).to(device)
    seen = shows[plane, torch.arange(len(item), device=device)] & may_see.to(device)
    some = torch.zeros(work.num_items, work.tile_k, device=device)
    some.index_add_(0, item.to(device), seen.float())

    row = _row_of(work, start).view(work.row_start.shape)
    plane, member = work.plane[:, None, None], work.member
    if not is_shared:
        # where heads go together, the kernel adds the KV head's own offset
        head = heads.head_of(plane) * (heads.planes > 1) * heads.group_size
        head = head + heads.member_of(plane, member)
        row = row + head[work.stack] * len(item)
    return BiasRows(
        rows=rows.reshape(-1, work.tile_k),
        index=row[info.items].transpose(1, 2).to(torch.int32),
        # where heads go together, the kernel moves from one KV head's rows to the next
        head_stride=0
        if is_shared or heads.planes > 1
        else heads.group_size * len(item) * work.tile_k,
        absent=(some == 0)[info.items.to(device)],
    )


def _row_of(work: WorkList, start: Tensor) -> Tensor:
    """Which line of the bias each (item, level, row) takes, flat."""
    place = work.token - work.token[:, :1, :1]
    return (start[:-1, None, None] + place[work.stack]).flatten()
