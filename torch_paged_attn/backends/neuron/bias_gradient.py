"""The gradient of `attn_bias`: rows that the backward kernel stores, put where they belong."""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.bias import BiasRows, Lines, lay_out_bias
from torch_paged_attn.backends.neuron.kernels.query_tile import P
from torch_paged_attn.backends.neuron.tables import Heads, WorkInfo


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
