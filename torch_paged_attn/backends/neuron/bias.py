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
class BiasRows:
    """A bias as the kernel reads it: `rows` of `tile_k` keys, and each item's rows among them.

    `absent` (num_items, tile_k) says which columns it hides from every row of an item.
    """

    rows: Tensor
    index: Tensor  # (num_items, P, depth) int32
    head_stride: int  # elements from one KV head's rows to the next's
    absent: Tensor
    lines: "Lines"


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
        item, rank = count_up((last - first + 1)[work.stack])
        start = torch.nn.functional.pad(
            torch.bincount(item, minlength=work.num_items).cumsum(0), (1, 0)
        )
        place = work.token - work.token[:, :1, :1]
        keys = (work.keys[..., None] + torch.arange(work.run)).flatten(1)
        return cls(
            item,
            first[work.stack][item] + rank,
            start[:-1, None, None] + place[work.stack],
            keys[item],
        )


def lay_out_bias(attn_bias: Tensor, info: WorkInfo, heads: Heads) -> BiasRows:
    """The bias in rows of (head, item, token of the item's stack): every head where all go
    together, else the heads of an item's group.
    """
    work, device = info.work, attn_bias.device
    is_shared, alone = attn_bias.shape[0] == 1, heads.planes > 1
    lines = Lines.of(work)
    token, num_lines = lines.token, len(lines.token)
    keys = lines.keys.clamp(max=max(attn_bias.shape[2] - 1, 0))
    plane = work.plane[work.stack]

    if is_shared:
        sources = [torch.zeros_like(token)]
    elif alone:
        first = heads.head_of(plane) * heads.group_size
        members = (torch.tensor(member) for member in range(heads.members))
        sources = [(first + heads.member_of(plane, m))[lines.item] for m in members]
    else:
        sources = [torch.full_like(token, head) for head in range(heads.num_heads)]
    if attn_bias.shape[2] == 0:  # no sequence has a key
        rows = torch.zeros(len(sources), num_lines, work.tile_k, device=device)
    else:
        at_token, at_key = token[:, None].to(device), keys.to(device)
        rows = torch.stack([attn_bias[h[:, None].to(device), at_token, at_key] for h in sources])
    if rows.dtype == torch.bool:
        rows = torch.zeros(rows.shape, device=device).masked_fill(~rows, float("-inf"))
    rows = rows.float()

    # a column is absent where no head of no token that may see it has a bias above -inf
    row_start, row_stop = (
        torch.zeros(num_lines, dtype=torch.long).scatter_reduce(
            0, lines.of_row.flatten(), edge.flatten(), "amax"
        )
        for edge in (work.row_start, work.row_stop)
    )
    column = torch.arange(work.tile_k)
    may_see = (column >= row_start[:, None]) & (column < row_stop[:, None])
    seen = (rows != float("-inf")).any(0) & may_see.to(device)
    some = torch.zeros(work.num_items, work.tile_k, device=device)
    some.index_add_(0, lines.item.to(device), seen.float())

    row = lines.of_row
    if not is_shared:  # where heads go together, the kernel adds the KV head's own offset
        row = row + (work.member * num_lines)[work.stack]
    return BiasRows(
        rows=rows.reshape(-1, work.tile_k),
        index=row[info.items].transpose(1, 2).to(torch.int32),
        # where heads go together, the kernel moves from one KV head's rows to the next
        head_stride=0 if is_shared or alone else heads.group_size * num_lines * work.tile_k,
        absent=(some == 0)[info.items.to(device)],
        lines=lines,
    )


@dataclasses.dataclass
class BiasTask:
    """A launch's tables with the columns of a bias, its rows, and rows for its gradient."""

    info: WorkInfo
    rows: Tensor
    gradient: Tensor  # (members of the group * lines, tile_k), or one row where it is not asked for
    lines: Lines | None

    @classmethod
    def of(cls, call: AttentionCall, info: WorkInfo, heads: Heads, is_asked: bool) -> "BiasTask":
        """The task of a launch; without a bias, rows that the kernel does not look at."""
        nothing = torch.zeros(1, info.work.tile_k, device=call.q.device)
        if call.attn_bias is None:
            return cls(info, nothing, nothing, None)
        laid_out = lay_out_bias(call.attn_bias, info, heads)
        lines, gradient = laid_out.lines, nothing
        if is_asked:
            num_lines = heads.group_size * len(lines.item)
            gradient = torch.zeros(num_lines, info.work.tile_k, device=call.q.device)
        return cls(_with_columns(info, laid_out, is_asked), laid_out.rows, gradient, lines)

    def add_to(self, dbias: Tensor, heads: Heads) -> None:
        """Add each head's rows (member, line, column) where their tokens and keys are in `dbias`.

        Heads go one after the other: no element is added to twice at once.
        """
        work, lines = self.info.work, self.lines
        assert lines is not None
        column = torch.arange(work.tile_k)
        is_seen = column >= work.key_start[lines.item, None]
        is_seen &= column < work.key_stop[lines.item, None]
        rows = self.gradient.view(heads.group_size, -1, work.tile_k)
        plane = work.plane[work.stack][lines.item]
        for kv_head in range(heads.num_kv_heads):
            line, column = (is_seen & (plane == kv_head)[:, None]).nonzero(as_tuple=True)
            places = lines.token[line], lines.keys[line, column], line, column
            token, key, line, column = (x.to(dbias.device) for x in places)
            for member in range(heads.group_size):
                head = 0 if dbias.shape[0] == 1 else kv_head * heads.group_size + member
                dbias[head, token, key] += rows[member, line, column]


def _with_columns(info: WorkInfo, laid_out: BiasRows, is_asked: bool) -> WorkInfo:
    """The tables with the rows of a bias, of its gradient if asked for, and what it hides."""
    work, lines, device = info.work, laid_out.lines, info.indices.device
    absent = laid_out.absent.unflatten(1, (-1, P)).transpose(1, 2)
    columns = [info.indices, laid_out.index.to(device)]
    if is_asked:  # each head has rows of its own, whichever heads share the bias
        row = lines.of_row + (work.member * len(lines.item))[work.stack]
        row = row.where(work.is_row[work.stack], torch.tensor(-1))[info.items]
        row = row.where(~info.is_idle[:, None, None], torch.tensor(-1))
        columns.append(row.transpose(1, 2).to(torch.int32).to(device))
    return dataclasses.replace(
        info,
        indices=torch.cat(columns, 2),
        bounds=torch.cat([info.bounds, absent.float()], 2),
    )
