"""What the backward of `selected_attention` does token by token, beside the products: before them,
D of each query row,

    D = rowsum(dout * out) - dlse

and after them, dq as the sum of the parts that units left. One kernel does both, as both have a
token and some heads of a KV head's group.
"""

import dataclasses
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.common.dequant import (
    as_stored,
    decode,
    encode,
    stored_format,
)
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.common.unit_items import ROW_FIELDS
from torch_paged_attn.backends.triton.portable.common.named import named
from torch_paged_attn.backends.triton.portable.selected.part_rows import load_part
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2, target_of
from torch_paged_attn.backward_call import BackwardCall

# numbers of rows that a program takes
AT_ONCE = 2048


class RowPointers(NamedTuple):
    """Inputs of the first step, and its results."""

    dout: Any
    out: Any
    lse: Any
    dlse: Any
    d: Any  # (num_heads, total_q)
    # for a kernel that loads the rows of a token at once; else None
    statistics: Any = None  # (total_q, num_kv_heads, ROW_FIELDS, group_size) float32
    lows: Any = None  # these two: of `InverseLists`
    highs: Any = None


class DqParts(NamedTuple):
    """Parts of dq of the entries of a run of tokens, and their sum."""

    rows: Any  # (entries * cuts * group_size, head_dim)
    scales: Any  # (rows, blocks of columns), of parts in float16
    counts: Any  # which entries are in a list, of all tokens
    dq: Any


class RowStrides(NamedTuple):
    """Strides in elements; 0 without dlse."""

    dout_token: int
    dout_head: int
    out_token: int
    out_head: int
    dlse_head: int
    dlse_token: int


class RowOptions(NamedTuple):
    """Compile-time constants."""

    GROUP_SIZE: int
    HEAD_DIM: int
    HEAD_DIM_V: int
    ROWS: int  # heads of a program
    WIDTH: int  # columns of dq that a program has
    BLOCKS: int  # of so many columns
    CUTS: int  # parts of an entry; 0: there are no parts
    IS_BY_LANE: bool  # of 32 columns, parts have the order (lane, eight, pair)
    FORMAT: str  # of dout and out
    FORMAT_DQ: str


@triton.jit
def _write_deltas(row, kv_head, in_group, pointers, total_q, strides, OPTIONS: tl.constexpr):
    """D of a token's heads. A row that sees no key has 0, whatever its dout is."""
    FORMAT: tl.constexpr = OPTIONS.FORMAT
    GROUP_SIZE: tl.constexpr = OPTIONS.GROUP_SIZE
    is_head = in_group < GROUP_SIZE
    head = (kv_head * GROUP_SIZE + in_group).to(tl.int64)
    at = head * total_q + row
    lse = tl.load(pointers.lse + at, mask=is_head, other=float("-inf"))
    sees = lse > float("-inf")
    dims = tl.arange(0, triton.next_power_of_2(OPTIONS.HEAD_DIM_V))[None, :]
    inside = sees[:, None] & (dims < OPTIONS.HEAD_DIM_V)
    dout = row * strides.dout_token + head * strides.dout_head
    dout = tl.load(pointers.dout + dout[:, None] + dims, mask=inside, other=0)
    out = row * strides.out_token + head * strides.out_head
    out = tl.load(pointers.out + out[:, None] + dims, mask=inside, other=0)
    out = decode(out, FORMAT, tl.float32)
    # a row that sees only a sink has out 0, and its dout may be NaN
    d = tl.sum(tl.where(out == 0.0, 0.0, decode(dout, FORMAT, tl.float32) * out), 1)
    if pointers.dlse is not None:
        dlse = row * strides.dlse_token + head * strides.dlse_head
        d -= tl.load(pointers.dlse + dlse, mask=sees, other=0.0)
    d = tl.where(sees, d, 0.0)
    tl.store(pointers.d + at, d, mask=is_head)
    if pointers.statistics is not None:
        field = (row * tl.num_programs(1) + kv_head) * ROW_FIELDS * GROUP_SIZE + in_group
        to = pointers.statistics + field
        tl.store(to, tl.where(sees, lse * LOG2E, float("inf")), mask=is_head)
        tl.store(to + GROUP_SIZE, d, mask=is_head)
        same = row + 0 * in_group
        low = tl.load(pointers.lows + same).to(tl.float32, bitcast=True)
        high = tl.load(pointers.highs + same).to(tl.float32, bitcast=True)
        tl.store(to + 2 * GROUP_SIZE, low, mask=is_head)
        tl.store(to + 3 * GROUP_SIZE, high, mask=is_head)


@triton.jit
def _add_parts(
    local, row, kv_head, in_group, block, parts, sizes, scale, OPTIONS: tl.constexpr
):  # fmt: skip
    """dq of a token's heads: the sum of the parts of its entries, in their order."""
    FORMAT: tl.constexpr = OPTIONS.FORMAT_DQ
    GROUP_SIZE: tl.constexpr = OPTIONS.GROUP_SIZE
    HEAD_DIM: tl.constexpr = OPTIONS.HEAD_DIM
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    is_head = in_group < GROUP_SIZE
    counts_ptr = parts.counts + (kv_head * sizes.own_lists).to(tl.int64) * sizes.listed
    counts_ptr += row * sizes.entries
    first = (kv_head.to(tl.int64) * sizes.step + local) * sizes.entries
    ROWS: tl.constexpr = OPTIONS.ROWS
    CUTS: tl.constexpr = OPTIONS.CUTS
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    for e in tl.range(0, sizes.entries, loop_unroll_factor=4):
        is_part = tl.load(counts_ptr + e) != 0
        for cut in tl.static_range(CUTS):
            at = ((first + e) * CUTS + cut) * GROUP_SIZE + in_group
            dq += load_part(parts.rows, parts.scales, at, is_head & is_part, block, HEAD_DIM, WIDTH)
    if OPTIONS.IS_BY_LANE:
        dq = tl.reshape(dq, [ROWS, WIDTH // 32, 4, 4, 2])
        dq = tl.reshape(tl.permute(dq, [0, 1, 3, 2, 4]), [ROWS, WIDTH])
    at = (row * tl.num_programs(1) + kv_head) * GROUP_SIZE + in_group
    d = block * WIDTH + tl.arange(0, WIDTH)
    stored = encode(dq * scale, parts.dq.dtype.element_ty, FORMAT)
    mask = is_head[:, None] & (d < HEAD_DIM)[None, :]
    tl.store(parts.dq + at[:, None] * HEAD_DIM + d[None, :], stored, mask=mask)


@triton.jit(
    do_not_specialize=("is_after", "first_row", "total_q", "step", "entries", "listed", "own_lists")
)
def _token_rows_kernel(
    pointers, parts, is_after, first_row, total_q, step, entries, listed, own_lists,
    strides, scale, OPTIONS: tl.constexpr,
):  # fmt: skip
    """One of the two steps for a token and ROWS heads of a KV head's group. is_after: 0 for D, 1
    for the sum of parts. own_lists: 0 if all KV heads share lists, else 1."""
    local, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (first_row + local).to(tl.int64)
    r = tl.arange(0, OPTIONS.ROWS)
    if is_after == 0:
        in_group = tile * OPTIONS.ROWS + r
        _write_deltas(row, kv_head, in_group, pointers, total_q, strides, OPTIONS)
    elif OPTIONS.CUTS > 0:
        in_group = tile // OPTIONS.BLOCKS * OPTIONS.ROWS + r
        sizes = named("step entries listed own_lists")(step, entries, listed, own_lists)
        block = tile % OPTIONS.BLOCKS
        _add_parts(local, row, kv_head, in_group, block, parts, sizes, scale, OPTIONS)


@dataclasses.dataclass(frozen=True)
class TokenRows:
    """The launches of a call. parts: of dq, `step` tokens at a time, with so many `blocks` of
    columns, which have a scale each, and `cuts` of an entry; None if another kernel computes dq."""

    call: BackwardCall
    dout: Tensor
    lse: Tensor
    d: Tensor
    parts: DqParts | None = None
    blocks: int = 1
    cuts: int = 1
    step: int = 0
    is_by_lane: bool = False

    @classmethod
    def of(cls, call: BackwardCall, dout: Tensor, lse: Tensor) -> "TokenRows":
        """dout: with rows of contiguous numbers; lse: contiguous."""
        return cls(call, dout, lse, torch.empty_like(lse))

    def write_deltas(
        self,
        statistics: Tensor | None = None,
        lows: Tensor | None = None,
        highs: Tensor | None = None,
    ) -> None:
        """Write D `(num_heads, total_q)` float32, and the statistics if these are given."""
        self._launch(False, self.call.forward.total_q, 0, 1, (statistics, lows, highs))

    def add_parts(self, first: int, statistics: tuple[Tensor | None, ...]) -> None:
        """Write dq of `step` tokens from query row `first` on, as far as there are some."""
        count = min(self.step, self.call.forward.total_q - first)
        self._launch(True, count, first, self.blocks, statistics)

    def _launch(
        self, is_after: bool, count: int, first: int, blocks: int,
        statistics: tuple[Tensor | None, ...],
    ) -> None:  # fmt: skip
        call, forward = self.call, self.call.forward
        target, dout = target_of(self.dout.device), self.dout
        out = call.out if call.out.stride(-1) == 1 else call.out.contiguous()
        indices = forward.lists.key_indices
        width = next_power_of_2(forward.head_dim) // self.blocks
        rows = max(AT_ONCE // max(width, next_power_of_2(forward.head_dim_v)), 1)
        rows = min(next_power_of_2(forward.group_size), rows)
        stored, format_ = as_stored(dout, target)
        Launch(
            _token_rows_kernel,
            (count, forward.num_kv_heads, cdiv(forward.group_size, rows) * blocks),
            is_after=int(is_after),
            first_row=first,
            total_q=forward.total_q,
            step=self.step,
            entries=indices.shape[2],
            listed=0 if self.parts is None else self.parts.counts.shape[1],
            own_lists=int(indices.shape[1] > 1),
            strides=RowStrides(
                *dout.stride()[:2],
                *out.stride()[:2],
                *((0, 0) if call.dlse is None else call.dlse.stride()),
            ),
            scale=float(forward.scale),
            OPTIONS=RowOptions(
                GROUP_SIZE=forward.group_size,
                HEAD_DIM=forward.head_dim,
                HEAD_DIM_V=forward.head_dim_v,
                ROWS=rows,
                WIDTH=width,
                BLOCKS=self.blocks,
                CUTS=0 if self.parts is None else self.cuts,
                IS_BY_LANE=self.is_by_lane,
                FORMAT=format_,
                FORMAT_DQ=stored_format(forward.q.dtype, target),
            ),
            num_warps=4,
        )(
            RowPointers(
                stored, as_stored(out, target)[0], self.lse, call.dlse, self.d, *statistics
            ),
            self.parts,
        )
