"""`attn_bias` as rows that the kernel gathers: one row of `tile_k` keys per item and token; and its
gradient as rows that the backward's stores, put where they belong."""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.kernels.query_tile import P
from torch_paged_attn.backends.neuron.key_columns import count_up
from torch_paged_attn.backends.neuron.tables import Heads, WorkInfo
from torch_paged_attn.backends.neuron.work_list import WorkList


@dataclasses.dataclass(frozen=True)
class Lines:
    """The lines that each head of a group, or all heads, have in the rows: (num_lines,) tensors."""

    item: Tensor
    token: Tensor
    of_row: Tensor  # (num_items, depth, P): which line each row takes
    keys: Tensor  # (num_lines, tile_k) of the columns

    @classmethod
    def of(cls, work: WorkList) -> "Lines":
        """A line for each item and token of the item's stack."""
        first, last = work.token[:, 0, 0], work.token[:, -1, -1]
        counts = (last - first + 1)[work.stack]
        (item, rank), start = count_up(counts), counts.cumsum(0) - counts
        place = work.token - work.token[:, :1, :1]
        keys = (work.keys[..., None] + torch.arange(work.run)).flatten(1)
        return cls(
            item,
            first[work.stack][item] + rank,
            start[:, None, None] + place[work.stack],
            keys[item],
        )


@dataclasses.dataclass
class BiasTask:
    """A launch's tables with the columns of a bias, its rows, and rows for its gradient."""

    info: WorkInfo
    rows: Tensor
    gradient: Tensor  # (members of the group * lines, tile_k), or one row where it is not asked for
    head_stride: int = 0  # elements from one KV head's rows to the next's
    absent: Tensor | None = None  # (num_items, tile_k): which columns it hides from all rows
    lines: Lines | None = None

    @classmethod
    def of(
        cls, call: AttentionCall, info: WorkInfo, heads: Heads, is_asked: bool = False
    ) -> "BiasTask":
        """The task of a launch; without a bias, rows that the kernel does not look at."""
        work, device = info.work, call.q.device
        nothing = torch.zeros(1, work.tile_k, device=device)
        if call.attn_bias is None:
            return cls(info, nothing, nothing)
        lines = Lines.of(work)
        rows = _rows(call.attn_bias, lines, work, heads)
        absent = _absent(rows, lines, work)[info.items.to(device)]
        num_lines, is_shared = len(lines.item), call.attn_bias.shape[0] == 1
        of_head = lines.of_row + (work.member * num_lines)[work.stack]
        index = [(lines.of_row if is_shared else of_head)[info.items]]
        gradient = nothing
        if is_asked:  # each head has rows of its own, whichever heads share the bias
            gradient = torch.zeros(heads.group_size * num_lines, work.tile_k, device=device)
            stored = of_head.where(work.is_row[work.stack], -1)[info.items]
            index.append(stored.where(~info.is_idle[:, None, None], -1))
        columns = torch.cat(index, 1).transpose(1, 2).to(device, torch.int32)
        hidden = absent.unflatten(1, (-1, P, work.run)).transpose(1, 2).flatten(2)
        info = dataclasses.replace(
            info,
            indices=torch.cat([info.indices, columns], 2),
            bounds=torch.cat([info.bounds, hidden.float()], 2),
        )
        # where heads go together, the kernel moves from one KV head's rows to the next
        joint = not is_shared and heads.planes == 1
        head_stride = heads.group_size * num_lines * work.tile_k if joint else 0
        return cls(info, rows.reshape(-1, work.tile_k), gradient, head_stride, absent, lines)

    def add_to(self, dbias: Tensor, heads: Heads) -> None:
        """Add each head's rows (member, line, column) where their tokens and keys are in `dbias`.

        Heads go one after the other: no element is added to twice at once.
        """
        work, lines = self.info.work, self.lines
        assert lines is not None
        is_seen = work.is_seen[lines.item]
        rows = self.gradient.view(heads.group_size, -1, work.tile_k)
        plane = work.plane[work.stack][lines.item]
        for kv_head in range(heads.num_kv_heads):
            line, column = (is_seen & (plane == kv_head)[:, None]).nonzero(as_tuple=True)
            places = lines.token[line], lines.keys[line, column], line, column
            token, key, line, column = (x.to(dbias.device) for x in places)
            for member in range(heads.group_size):
                head = 0 if dbias.shape[0] == 1 else kv_head * heads.group_size + member
                dbias[head, token, key] += rows[member, line, column]


def _rows(attn_bias: Tensor, lines: Lines, work: WorkList, heads: Heads) -> Tensor:
    """The bias in float32 rows of (head, item, token of the item's stack): every head where all go
    together, else the heads of an item's group.
    """
    device = attn_bias.device
    if attn_bias.shape[0] == 1:
        sources = [torch.zeros_like(lines.token)]
    elif heads.planes > 1:
        plane = work.plane[work.stack]
        first = heads.head_of(plane) * heads.group_size
        members = (torch.tensor(member) for member in range(heads.members))
        sources = [(first + heads.member_of(plane, m))[lines.item] for m in members]
    else:
        sources = [torch.full_like(lines.token, head) for head in range(heads.num_heads)]
    if attn_bias.shape[2] == 0:  # no sequence has a key
        return torch.zeros(len(sources), len(lines.token), work.tile_k, device=device)
    token = lines.token[:, None].to(device)
    key = lines.keys.clamp(max=attn_bias.shape[2] - 1).to(device)
    rows = torch.stack([attn_bias[head[:, None].to(device), token, key] for head in sources])
    if rows.dtype == torch.bool:
        return torch.zeros(rows.shape, device=device).masked_fill(~rows, float("-inf"))
    return rows.float()


def _absent(rows: Tensor, lines: Lines, work: WorkList) -> Tensor:
    """Which columns no head of no token that may see them has a bias above -inf at, `(num_items,
    tile_k)`.
    """
    row_start, row_stop = (
        torch.zeros(len(lines.token), dtype=torch.long).scatter_reduce(
            0, lines.of_row.flatten(), edge.flatten(), "amax"
        )
        for edge in (work.row_start, work.row_stop)
    )
    column = torch.arange(work.tile_k)
    may_see = (column >= row_start[:, None]) & (column < row_stop[:, None])
    seen = (rows != float("-inf")).any(0) & may_see.to(rows.device)
    some = torch.zeros(work.num_items, work.tile_k, device=rows.device)
    return some.index_add_(0, lines.item.to(rows.device), seen.float()) == 0
