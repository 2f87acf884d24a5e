"""The launches of a backward, planned on the host from a call's metadata."""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.backward_tiles import Sizes, cut, visible_tiles
from torch_paged_attn.backends.neuron.kernels.query_tile import BANK, P
from torch_paged_attn.backends.neuron.paged_kv import PagedKV
from torch_paged_attn.backends.neuron.plan import (
    Metadata,
    PlanOptions,
    batch_of,
    places_of,
    slots_of,
    tokens_in_sequence,
)
from torch_paged_attn.backends.neuron.plan_cache import PlanCache
from torch_paged_attn.backends.neuron.runtime import num_programs
from torch_paged_attn.backends.neuron.tables import Heads, TokenMajor, WorkInfo, lay_out
from torch_paged_attn.backends.neuron.tile_sizes import TileSizes
from torch_paged_attn.backends.neuron.work_list import KeyTile, WorkList, list_items, spans_of

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


@dataclasses.dataclass(frozen=True)
class BackwardLaunch:
    """The tables of a launch, and what its kernel is compiled for: see `BackwardOptions`."""

    info: WorkInfo
    width: int  # columns of a tile of scores
    visible_tiles: tuple[tuple[tuple[int, int, bool, bool], ...], ...]
    adds_dq: bool  # to what earlier launches have left in dq
    adds_dkv: bool  # or in dk and dv

    @property
    def one_item(self) -> bool:
        """Whether every stack has a single item."""
        return bool(self.info.work.is_first.all())

    @property
    def one_product(self) -> bool:
        """Whether every stack has a single item, which is one tile of scores wide and of which each
        tile of rows sees some key."""
        return self.one_item and [len(seen) for seen in self.visible_tiles] == [
            self.info.work.depth
        ]

    @property
    def sees_all_keys(self) -> bool:
        """Whether no item has a key that none of its rows sees."""
        work = self.info.work
        return bool((work.key_start == 0).all() and (work.key_stop == work.tile_k).all())


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The launches in order, and whether several of them add to one gradient."""

    launches: list[BackwardLaunch]
    adds_dq: bool
    adds_dkv: bool


def plan_backward(call: AttentionCall, rows: tuple[PagedKV, PagedKV]) -> BackwardPlan:
    """The launches of a call; `rows` are those of k and v."""
    host, device = Metadata.of(call).on_host(), call.q.device
    heads = TokenMajor(call.num_kv_heads, call.group_size, call.num_kv_heads)
    options = PlanOptions.of(call, _tile_sizes(call, heads))
    tensors = host.cu_seqlens_q, host.cu_seqlens_k, host.seqused_k
    dims = call.head_dim, call.head_dim_v

    def make() -> BackwardPlan:
        plan = _make(host, options, rows, dims)
        on_device = [dataclasses.replace(x, info=x.info.to(device)) for x in plan.launches]
        return dataclasses.replace(plan, launches=on_device)

    return plan_cache(tensors, (options, places_of(rows), dims, device), make)


plan_cache: PlanCache[BackwardPlan] = PlanCache(16)


def score_width(head_dim: int, head_dim_v: int, tile_k: int) -> int:
    """Columns of a tile of scores, as many as PSUM has room for: it holds the sums over queries of
    both products (dk, dv), the scores, their gradient, a transposed tile, and the sum over keys.
    """

    steps = -(-head_dim // P), -(-head_dim_v // P)

    def banks(width: int) -> int:
        return sum(-(-n // (BANK // width)) for n in steps)

    widths = (n for n in (512, 384, 256, 128) if tile_k % n == 0)
    return next(n for n in widths if banks(n) <= PSUM_BANKS - 4)


def _tile_sizes(call: AttentionCall, heads: TokenMajor) -> TileSizes:
    """The deepest stack and the longest tile of keys that SBUF has room for."""
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


def _make(
    host: Metadata, options: PlanOptions, rows: tuple[PagedKV, PagedKV], dims: tuple[int, int]
) -> BackwardPlan:
    """The plan of equal metadata and options, on the host; `dims` are head_dim and head_dim_v.

    One launch for each kind of rectangles, in the order of `Kinds.launch`.
    """
    batch, tiles = batch_of(host, options), options.tiles
    heads, group_size = tiles.heads, tiles.heads.members
    spans = spans_of(batch, heads.planes, None)
    sizes = Sizes(
        depths=tuple(n for n in DEPTHS if n <= tiles.deepest),
        key_tiles=tuple(n for n in KEY_TILES if n <= tiles.key_tiles[0].keys),
    )
    cuts = cut(batch, spans, group_size, sizes, QUAD if options.has_dropout else 1)
    in_sequence = tokens_in_sequence(batch, options)
    kinds, launches = cuts.kind.stacked(), []
    for kind in kinds.unique(dim=0):
        _, depth, tile_k, is_diagonal, adds_dq, adds_dkv = kind.tolist()
        stacks = cuts.stacks((kinds == kind).all(1), depth)
        work = list_items(batch, spans, stacks, group_size, P, KeyTile(tile_k, 1, depth), None)
        slots = slots_of(work, host, options)
        info = lay_out(work, heads, rows, slots, in_sequence, tiles.item_programs, loads_all=True)
        width = score_width(*dims, tile_k)
        seen = visible_tiles(bool(is_diagonal), batch, group_size, depth, tile_k, width)
        launches.append(
            BackwardLaunch(
                info=_with_key_rows(info, heads, slots[1]),
                width=width,
                visible_tiles=_with_edges(seen, work, width),
                adds_dq=bool(adds_dq),
                adds_dkv=bool(adds_dkv),
            )
        )
    adds = (any(x.adds_dq for x in launches), any(x.adds_dkv for x in launches))
    return BackwardPlan(launches, *adds)


def _with_edges(
    seen: tuple[tuple[tuple[int, int], ...], ...], work: WorkList, width: int
) -> tuple[tuple[tuple[int, int, bool, bool], ...], ...]:
    """The tiles of `visible_tiles`, and whether some row of one is hidden its first, or its last,
    columns.

    Where all rows of all items see them all, nothing needs a mask.
    """
    # of each tile of rows: from where on, and to where, all rows of all items see keys
    start, stop = work.row_start.amax((0, 2)).tolist(), work.row_stop.amin((0, 2)).tolist()
    return tuple(
        tuple(
            (level, columns, start[level] > part * width, stop[level] < part * width + columns)
            for level, columns in tiles
        )
        for part, tiles in enumerate(seen)
    )


def _with_key_rows(info: WorkInfo, heads: Heads, slots: Tensor) -> WorkInfo:
    """The tables with the rows of dk and dv, (token, KV head): -1 where no row sees the key."""
    work, items = info.work, info.items
    column = torch.arange(work.tile_k)
    is_seen = (column >= work.key_start[:, None]) & (column < work.key_stop[:, None])
    row = slots * heads.num_kv_heads + work.plane[work.stack, None]
    is_seen = is_seen[items] & ~info.is_idle[:, None]
    row = row[items].where(is_seen, torch.tensor(-1))
    columns = row.unflatten(1, (-1, P)).transpose(1, 2).to(torch.int32)
    return dataclasses.replace(info, indices=torch.cat([info.indices, columns], 2).contiguous())
