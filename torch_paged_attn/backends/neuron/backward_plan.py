"""The launches of a backward, planned on the host from a call's metadata.

A span's rows (one sequence, one KV head) are cut into stacks as deep as SBUF holds them, its keys
into stretches. Each stack meets each stretch of which it sees a key in one rectangle: the rows that
see any of the stretch, and the keys that they see. Rectangle (i, j) of n by m goes to launch
(i - j) modulo the larger, so that no launch has a row, or a key, in two rectangles; launches that a
span does not need are left out. All this depends on the sequence alone, and so do the bits of its
gradients.

In a rectangle on the diagonal the first row is the first that sees the first key. There the kernel
skips pairs of tiles by what it is compiled for.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.kernels.backward_groups import BackwardOptions
from torch_paged_attn.backends.neuron.kernels.query_tile import BANK, P
from torch_paged_attn.backends.neuron.key_columns import count_up
from torch_paged_attn.backends.neuron.paged_kv import PagedKV
from torch_paged_attn.backends.neuron.plan import PlanCache, batch_of, on_host, planned
from torch_paged_attn.backends.neuron.runtime import num_programs
from torch_paged_attn.backends.neuron.tables import Heads, TokenMajor, WorkInfo, lay_out
from torch_paged_attn.backends.neuron.tile_sizes import TileSizes
from torch_paged_attn.backends.neuron.work_list import (
    Batch,
    KeyTile,
    Stacks,
    WorkList,
    list_items,
    spans_of,
)

# a factor of scores that keeps what is masked far below every other score
SMALLEST_FACTOR = 1e-6

# what rectangles are rounded up to
DEPTHS = (1, 2, 3, 4, 8, 12, 16, 24, 32, 48, 64)
KEY_TILES = (128, 256, 384, 512, 1024, 1536, 2048, 3072, 4096)
SHORTEST = 1024  # keys of the longest tile, where there is room for them

# pairs of a tile of rows and one of scores in an item, all of them unrolled
MOST_PAIRS = 256

# of a partition: for an item's keys and values and their transposes, and for what a stack keeps
KEY_BYTES, STACK_BYTES = 48 * 1024, 112 * 1024
PSUM_BANKS = 8

# keys for which dropout's bits are drawn together: those of positions 0 to 3, 4 to 7, ...
QUAD = 4

# what launches of one kernel have in common, columns of a tensor: the launch, how deep stacks and
# how long tiles of keys are, whether the first row sees the first key first, and whether an earlier
# launch has a row of it, or a key
KINDS = "launch", "depth", "tile_k", "is_diagonal", "adds_dq", "adds_dkv"


@dataclasses.dataclass(frozen=True)
class BackwardLaunch:
    """The tables of a launch, and what its kernel is compiled for."""

    info: WorkInfo
    options: BackwardOptions
    sees_all_keys: bool  # no item has a key that none of its rows sees


plan_cache: PlanCache[list[BackwardLaunch]] = PlanCache(16)


def plan_backward(
    call: AttentionCall, tiles: TileSizes, rows: tuple[PagedKV, PagedKV], wants: tuple[bool, ...]
) -> list[BackwardLaunch]:
    """The launches of a call in order; `rows` are those of k and v, and `wants` says which of dq,
    of dk and dv, and of dbias are asked for."""
    host, has_bias = on_host(call), call.attn_bias is not None
    is_shaped = call.softcap > 0.0 or call.alibi_slopes is not None or has_bias
    is_shaped = is_shaped or call.scale < SMALLEST_FACTOR

    def make() -> list[BackwardLaunch]:
        """One launch for each of `KINDS`, in order."""
        batch, heads = batch_of(host, tiles.heads), tiles.heads
        stacks, kinds = cut(
            batch,
            [n for n in DEPTHS if n <= tiles.deepest],
            [n for n in KEY_TILES if n <= tiles.key_tiles[0].keys],
            QUAD if host.dropout_p > 0.0 else 1,
        )
        launches = []
        for kind in kinds.unique(dim=0):
            _, depth, tile_k, is_diagonal, adds_dq, adds_dkv = kind.tolist()
            alike = dataclasses.replace(stacks.of((kinds == kind).all(1)), depth=depth)
            work = list_items(batch, alike, KeyTile(tile_k, 1, depth))
            info = lay_out(work, host, heads, rows, tiles.item_programs, loads_all=True)
            width = score_width(host.head_dim, host.head_dim_v, tile_k)
            seen = visible_tiles(bool(is_diagonal), batch, work, width)
            one_item = bool(work.is_first.all())
            backward = BackwardOptions(
                width=width,
                visible_tiles=seen,
                out_scale=float(call.scale),
                is_shaped=is_shaped,
                wants_dq=wants[0],
                wants_dkv=wants[1],
                wants_dbias=wants[2],
                adds_dq=bool(adds_dq),
                adds_dkv=bool(adds_dkv),
                one_item=one_item,
                one_product=one_item and [len(part) for part in seen] == [depth],
            )
            sees_all_keys = bool(work.is_seen.all()) and not has_bias
            info = _with_key_rows(info, heads).to(host.q.device)
            launches.append(BackwardLaunch(info, backward, sees_all_keys))
        return launches

    given = wants, call.scale, is_shaped, has_bias
    return planned(plan_cache, host, tiles, rows, make, given)


def score_width(head_dim: int, head_dim_v: int, tile_k: int) -> int:
    """Columns of a tile of scores, as many as PSUM has room for: it holds the sums over queries of
    both products (dk, dv), the scores, their gradient, a transposed tile, and the sum over keys.
    """
    steps = -(-head_dim // P), -(-head_dim_v // P)

    def banks(width: int) -> int:
        return sum(-(-n // (BANK // width)) for n in steps)

    widths = (n for n in (512, 384, 256, 128) if tile_k % n == 0)
    return next(n for n in widths if banks(n) <= PSUM_BANKS - 4)


def backward_tile_sizes(call: AttentionCall) -> TileSizes:
    """The deepest stack and the longest tile of keys that SBUF has room for."""
    heads = TokenMajor(call.num_kv_heads, call.group_size, call.num_kv_heads)
    dims = call.head_dim, call.head_dim_v
    steps = [-(-dim // P) for dim in dims]
    # of each partition: a key or query, its gradient or value, both also transposed
    row = (sum(dims) + sum(steps) * P) * call.q.itemsize
    # a query's result besides, and its gradient in float32
    kept = row + call.head_dim_v * call.q.itemsize + steps[0] * P * 4
    depths = [n for n in DEPTHS if n * kept <= STACK_BYTES or n == 1]
    key_tiles = [n for n in KEY_TILES if n // P * row <= KEY_BYTES or n == P]
    # a stretch of keys is as long as a stack of queries, so that the diagonal runs through both
    tokens = max(SHORTEST, depths[-1] * P // heads.members)
    tile_k = max(n for n in key_tiles if n <= tokens)
    parts = tile_k // score_width(*dims, tile_k)
    return TileSizes(
        heads=heads,
        key_tiles=(KeyTile(tile_k, 1, depths[0]),),
        deepest=max(n for n in depths if n * parts <= MOST_PAIRS or n == 1),
        splits_heads=False,
        loaded=1,
        item_programs=num_programs(),
    )


def _with_key_rows(info: WorkInfo, heads: Heads) -> WorkInfo:
    """The tables with the rows of dk and dv, (token, KV head): -1 where no row sees the key."""
    work, items = info.work, info.items
    row = info.slot * heads.num_kv_heads + work.plane[work.stack[items], None]
    row = row.where(work.is_seen[items] & ~info.is_idle[:, None], -1)
    columns = row.unflatten(1, (-1, P)).transpose(1, 2).to(torch.int32)
    return dataclasses.replace(info, indices=torch.cat([info.indices, columns], 2).contiguous())


def cut(
    batch: Batch, depths: Sequence[int], key_tiles: Sequence[int], grid: int
) -> tuple[Stacks, Tensor]:
    """The rectangles of all spans but the padding tokens', as stacks, and their `KINDS`; keys begin
    at multiples of `grid`.

    Of `depths`, a rectangle takes the first that holds its rows; of `key_tiles` the same for its
    keys, of which there may be several of the last.
    """
    spans, group_size = spans_of(batch), batch.group_size
    _, lengths, key_lens = batch.sequences()
    left, right = batch.window_size_left, batch.window_size_right
    length, key_len = spans.length, key_lens[spans.sequence]
    past = key_len - lengths[spans.sequence]
    stack_rows = depths[-1] * P
    num_stacks = -(-length * group_size // stack_rows)
    stretch = key_len.clamp(min=1)
    if left >= 0 or right >= 0:
        stretch = stretch.clamp(max=key_tiles[-1])
    num_stretches = -(-key_len // stretch)

    span, rank = count_up(num_stacks * num_stretches)
    i, j = rank // num_stretches[span], rank % num_stretches[span]
    start = j * stretch[span]
    stop = torch.minimum(start + stretch[span], key_len[span])
    # the tokens that see some key of [start, stop)
    first, last = torch.zeros_like(start), length[span]
    if right >= 0:
        first = (start - right - past[span]).clamp(min=0)
    if left >= 0:
        last = torch.minimum(last, stop + left - past[span])
    first_row = torch.maximum(i * stack_rows, first * group_size)
    stop_row = torch.minimum((i + 1) * stack_rows, last * group_size)
    sees = first_row < stop_row
    span, i, j, start, stop, first_row, stop_row = (
        part[sees] for part in (span, i, j, start, stop, first_row, stop_row)
    )
    # the keys that these rows see
    position = past[span] + first_row // group_size
    last_position = past[span] + (stop_row - 1) // group_size
    low, _ = batch.visible(position, key_len[span])
    _, high = batch.visible(last_position, key_len[span])
    key_start = torch.maximum(start, low) // grid * grid
    key_stop = torch.minimum(stop, high)

    num_tiles, num_keys = -(-(stop_row - first_row) // P), key_stop - key_start
    turns = torch.maximum(num_stacks, num_stretches)[span]
    launch = _ranks(span, (i - j) % turns)
    is_diagonal = torch.zeros_like(sees[sees])
    if right >= 0:
        is_diagonal = (position + right == key_start) & (first_row % group_size == 0)
    of_rows, of_keys = (span * (rank.max() + 1) + x if len(span) else span for x in (i, j))
    kinds = (
        launch,
        _first_that_holds(num_tiles, depths),
        _first_that_holds(num_keys, key_tiles),
        is_diagonal,
        launch > _least(launch, of_rows),
        launch > _least(launch, of_keys),
    )
    stacks = Stacks(
        **vars(spans.of(span)),
        first_row=first_row,
        stop_row=stop_row,
        key_start=key_start,
        key_stop=key_stop,
        depth=depths[-1],
        grid=grid,
    )
    return stacks, torch.stack([x.long() for x in kinds], 1)


def visible_tiles(
    is_diagonal: bool, batch: Batch, work: WorkList, width: int
) -> tuple[tuple[tuple[int, int, bool, bool], ...], ...]:
    """For every `width` keys of a tile, the tiles of rows that may see some: (level, columns,
    hides_first, hides_last).

    Such a tile sees none of the part's keys from `columns` on, a multiple of P. The last level
    comes first, and counts as one that sees all: it writes the sums to which the others add. The
    last two say whether some row is hidden its first, or its last columns: where all rows of all
    items see them all, nothing needs a mask.
    """
    left, right, group_size = batch.window_size_left, batch.window_size_right, batch.group_size
    # of each tile of rows: from where on, and to where, all rows of all items see keys
    start, stop = work.row_start.amax((0, 2)).tolist(), work.row_stop.amin((0, 2)).tolist()
    found = []
    for first in range(0, work.tile_k, width):
        begin, end = 0, work.depth
        if is_diagonal:  # the first row sees the first key, and each group_size rows one more
            begin = first * group_size // P
        if is_diagonal and left >= 0:
            end = min(end, -(-(first + width + left + right) * group_size // P))
        seen: list[tuple[int, int, bool, bool]] = []
        for level in reversed(range(begin, end)):
            columns = width
            if is_diagonal and seen:
                keys = ((level + 1) * P - 1) // group_size + 1 - first
                columns = min(-(-keys // P) * P, width)
            hides = start[level] > first, stop[level] < first + columns
            seen.append((level, columns, *hides))
        found.append(tuple(seen))
    return tuple(found)


def _first_that_holds(count: Tensor, sizes: Sequence[int]) -> Tensor:
    """The smallest of `sizes`, which ascend, that is not below each count; else the largest."""
    limits = torch.tensor(sizes)
    return limits[torch.searchsorted(limits, count).clamp(max=len(sizes) - 1)]


def _ranks(group: Tensor, value: Tensor) -> Tensor:
    """The rank of each value among the different ones of its group."""
    if not len(group):
        return group
    size = int(value.max()) + 1
    different, place = (group * size + value).unique(return_inverse=True)
    owner = different // size
    return place - torch.searchsorted(owner, group)


def _least(value: Tensor, group: Tensor) -> Tensor:
    """The smallest value of each one's group."""
    _, place = group.unique(return_inverse=True)
    least = torch.full_like(place, 2**62).scatter_reduce(0, place, value, "amin")
    return least[place] if len(group) else value
