"""What the backward of `selected_attention` does token by token, beside the products: before them,
D of each query row,

    D = rowsum(dout * out) - dlse

and the numbers of the units that the token's list names (`inverse_lists.py`), and after them, dq as
the sum of the parts that units left. One kernel does all of it, as all have a token and some heads
of a KV head's group.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.common.dequant import (
    decode,
    encode,
    stored_format,
)
from torch_paged_attn.backends.triton.common.inverse_lists import ListShape, NumberedEntries
from torch_paged_attn.backends.triton.common.seqlen_info import is_bound
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.common.unit_items import ROW_FIELDS
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedPointers,
    SelectedSizes,
    find_token,
)
from torch_paged_attn.backends.triton.portable.selected.part_rows import load_part
from torch_paged_attn.backends.triton.portable.selected.unit_numbers import number_units, rows_seen
from torch_paged_attn.backends.triton.runtime.contiguous import with_whole_rows
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
    # (total_q, num_kv_heads, ROW_FIELDS, group_size) float32, for a kernel that loads the rows of a
    # token at once; else None
    statistics: Any = None


class DqParts(NamedTuple):
    """Parts of dq of the entries of a run of tokens, and their sum."""

    rows: Any  # (entries * cuts * group_size, head_dim)
    scales: Any  # (rows, blocks of columns), of parts in float16
    numbers: Any  # of all tokens, see `NumberedEntries`
    dq: Any


class RowStrides(NamedTuple):
    """Strides in elements; 0 without dlse, and of lists that all KV heads share."""

    dout_token: int
    dout_head: int
    out_token: int
    out_head: int
    dlse_head: int
    dlse_token: int
    index_group: int
    index_entry: int
    count_group: int


class RunSizes(NamedTuple):
    """Numbers of a launch, for which no kernel is compiled."""

    is_after: Any  # 0 for what is done before the products, 1 for the sum of parts
    first_row: Any  # of a run of tokens
    own_lists: Any  # 0 if all KV heads share lists, else 1
    units: Any  # these three: of `ListShape`
    step: Any
    runs: Any


class RowOptions(NamedTuple):
    """Compile-time constants."""

    GROUP_SIZE: int
    HEAD_DIM: int
    HEAD_DIM_V: int
    ROWS: int  # heads of a program
    SIZE: int  # keys of a numbered unit; 0: units have no numbers
    PIECES: int  # numbered units of a unit of the lists
    HAS_LEFT: bool
    HAS_RIGHT: bool
    WIDTH: int  # columns of dq that a program has
    BLOCKS: int  # of so many columns
    CUTS: int  # parts of an entry; 0: there are no parts
    IS_BY_LANE: bool  # of 32 columns, parts have the order (lane, eight, pair)
    FORMAT: str  # of dout and out
    FORMAT_DQ: str
    PAGE_SIZE: int = 0  # keys are packed
    IS_SLOTS: bool = False


@triton.jit
def _write_deltas(
    row, kv_head, in_group, low, high, pointers, total_q, strides, OPTIONS: tl.constexpr
):  # fmt: skip
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
        ends = (low.to(tl.int32) + 0 * in_group, high.to(tl.int32) + 0 * in_group)
        tl.store(to + 2 * GROUP_SIZE, ends[0].to(tl.float32, bitcast=True), mask=is_head)
        tl.store(to + 3 * GROUP_SIZE, ends[1].to(tl.float32, bitcast=True), mask=is_head)


@triton.jit
def _add_parts(
    local, row, kv_head, in_group, block, parts, sizes, run, scale, OPTIONS: tl.constexpr
):  # fmt: skip
    """dq of a token's heads: the sum of the parts of its entries, in their order."""
    FORMAT: tl.constexpr = OPTIONS.FORMAT_DQ
    GROUP_SIZE: tl.constexpr = OPTIONS.GROUP_SIZE
    HEAD_DIM: tl.constexpr = OPTIONS.HEAD_DIM
    WIDTH: tl.constexpr = OPTIONS.WIDTH
    is_head = in_group < GROUP_SIZE
    of_group = (kv_head * run.own_lists).to(tl.int64) * sizes.total_q
    numbers_ptr = parts.numbers + (of_group + row) * sizes.entries
    first = (kv_head.to(tl.int64) * run.step + local) * sizes.entries
    ROWS: tl.constexpr = OPTIONS.ROWS
    CUTS: tl.constexpr = OPTIONS.CUTS
    dq = tl.zeros([ROWS, WIDTH], tl.float32)
    for e in tl.range(0, sizes.entries, loop_unroll_factor=4):
        is_part = tl.load(numbers_ptr + e) >= 0
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


@triton.jit(do_not_specialize=(*RunSizes._fields, *SelectedSizes._fields))
def _token_rows_kernel(
    pointers, given, numbered, parts, is_after, first_row, own_lists, units, step, runs,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, scalars, OPTIONS: tl.constexpr,
):  # fmt: skip
    """One of the two steps for a token and ROWS heads of a KV head's group. given: the call's
    tensors; numbered: `NumberedEntries`; both None if no entry is numbered."""
    run = RunSizes(is_after, first_row, own_lists, units, step, runs)
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    local, kv_head, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = (first_row + local).to(tl.int64)
    r = tl.arange(0, OPTIONS.ROWS)
    if is_after == 0:
        in_group = tile * OPTIONS.ROWS + r
        low = tl.zeros([], tl.int64)
        high = low
        if OPTIONS.SIZE > 0:
            token = find_token(row, kv_head, given, strides, sizes, OPTIONS)
            low, high = rows_seen(token, scalars, OPTIONS)
            if (tile == 0) & ((own_lists != 0) | (kv_head == 0)):
                number_units(token, kv_head, low, high, numbered, strides, sizes, run, OPTIONS)
        _write_deltas(row, kv_head, in_group, low, high, pointers, total_q, strides, OPTIONS)
    elif OPTIONS.CUTS > 0:
        in_group = tile // OPTIONS.BLOCKS * OPTIONS.ROWS + r
        block = tile % OPTIONS.BLOCKS
        _add_parts(local, row, kv_head, in_group, block, parts, sizes, run, scalars.scale, OPTIONS)


class TokenRows:
    """The launches of calls like one. lists: None for kernels that take no inverse lists. Of parts
    of dq there are `cuts` of an entry (0: another kernel computes dq), which have a scale for each
    of so many `blocks` of columns."""

    def __init__(
        self, call: BackwardCall, lists: ListShape | None = None, blocks: int = 1, cuts: int = 0,
        is_by_lane: bool = False,
    ) -> None:  # fmt: skip
        forward = call.forward
        target, total_q = target_of(forward.q.device), forward.total_q
        width = next_power_of_2(forward.head_dim) // blocks
        rows = max(AT_ONCE // max(width, next_power_of_2(forward.head_dim_v)), 1)
        rows = min(next_power_of_2(forward.group_size), rows)
        tiles = cdiv(forward.group_size, rows)
        of_lists = selected.strides_of(forward)
        strides = (
            *with_whole_rows(call.dout).stride()[:2],
            *with_whole_rows(call.out).stride()[:2],
            *((0, 0) if call.dlse is None else call.dlse.stride()),
            *(of_lists.index_group, of_lists.index_entry, of_lists.count_group),
        )
        self._before = Launch(
            _token_rows_kernel,
            (total_q, forward.num_kv_heads, tiles),
            is_after=0,
            first_row=0,
            own_lists=int(forward.lists.key_indices.shape[1] > 1),
            units=0 if lists is None else lists.units,
            step=total_q if lists is None else lists.step,
            runs=1 if lists is None else lists.runs,
            **selected.sizes_of(forward)._asdict(),
            strides=RowStrides._make(strides),
            scalars=selected.scalars_of(forward),
            OPTIONS=RowOptions(
                GROUP_SIZE=forward.group_size,
                HEAD_DIM=forward.head_dim,
                HEAD_DIM_V=forward.head_dim_v,
                ROWS=rows,
                SIZE=0 if lists is None else lists.size,
                PIECES=1 if lists is None else lists.pieces,
                HAS_LEFT=is_bound(forward.window_size_left),
                HAS_RIGHT=is_bound(forward.window_right),
                WIDTH=width,
                BLOCKS=blocks,
                CUTS=cuts,
                IS_BY_LANE=is_by_lane,
                FORMAT=stored_format(call.dout.dtype, target),
                FORMAT_DQ=stored_format(forward.q.dtype, target),
            ),
            num_warps=4,
        )
        self._after = []
        if cuts > 0:
            assert lists is not None
            for first in range(0, total_q, lists.step):
                grid = min(lists.step, total_q - first), forward.num_kv_heads, tiles * blocks
                self._after.append(self._before.resized(grid, is_after=1, first_row=first))

    def before(
        self,
        pointers: RowPointers,
        given: SelectedPointers | None = None,
        numbered: NumberedEntries | None = None,
        parts: DqParts | None = None,
    ) -> None:
        """Write D, and what else there is memory for."""
        self._before(pointers, given, numbered, parts)

    def after(
        self,
        run: int,
        pointers: RowPointers,
        given: SelectedPointers,
        numbered: NumberedEntries,
        parts: DqParts,
    ) -> None:
        """Write dq of a run of tokens, with the arguments of `before`."""
        self._after[run](pointers, given, numbered, parts)
