"""The launches of a backward, planned on the host from a call's metadata."""

import dataclasses

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.kernels.query_tile import P
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
from torch_paged_attn.backends.neuron.rectangles import cut
from torch_paged_attn.backends.neuron.runtime import num_programs
from torch_paged_attn.backends.neuron.tile_sizes import STACK_BYTES, TileSizes
from torch_paged_attn.backends.neuron.work_info import TokenMajor, WorkInfo, lay_out
from torch_paged_attn.backends.neuron.work_list import list_items, spans_of

# tiles of a stack: rectangles take the first that holds them
DEPTHS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64)

KEY_TILES = (128, 512, 1024)
KEY_BYTES = 48 * 1024  # of a partition, for an item's keys and values and their transposes
PSUM_BANKS, BANK_FLOATS = 8, 512


@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """The tables of each launch, in order, and whether launches add to what others left."""

    launches: list[WorkInfo]
    adds_dq: bool
    adds_dkv: bool


def plan_backward(call: AttentionCall, rows: tuple[PagedKV, PagedKV]) -> BackwardPlan:
    """The launches of a call; `rows` are those of k and v."""
    host, device = Metadata.of(call).on_host(), call.q.device
    heads = TokenMajor(call.num_kv_heads, call.group_size, call.num_kv_heads)
    options = PlanOptions.of(call, _tile_sizes(call, heads))
    tensors = host.cu_seqlens_q, host.cu_seqlens_k, host.seqused_k

    def make() -> BackwardPlan:
        plan = _make(host, options, rows)
        return dataclasses.replace(plan, launches=[t.to(device) for t in plan.launches])

    return plan_cache(tensors, (options, places_of(rows), device), make)


plan_cache: PlanCache[BackwardPlan] = PlanCache(16)


def score_width(head_dim: int, head_dim_v: int, tile_k: int) -> int:
    """Columns of a tile of scores: the sums over queries of both products fit in PSUM beside the
    scores, their gradient, what is transposed, and the sum over keys.
    """

    def banks(width: int) -> int:
        return sum(-(--(-dim // P) * width // BANK_FLOATS) for dim in (head_dim, head_dim_v))

    return next(n for n in (512, 256, 128) if n <= tile_k and banks(n) <= PSUM_BANKS - 4)


def _tile_sizes(call: AttentionCall, heads: TokenMajor) -> TileSizes:
    """The deepest stack and the longest tile of keys that SBUF has room for."""
    steps = -(-call.head_dim // P), -(-call.head_dim_v // P)
    item = call.q.itemsize
    # rows and transposes of q and dout, the sum of dq
    kept = (call.head_dim + call.head_dim_v + sum(steps) * P) * item + steps[0] * P * 4
    token = (call.head_dim + call.head_dim_v + sum(steps) * P) * item  # of each partition's key
    return TileSizes(
        heads=heads,
        tile_k=next(n for n in reversed(KEY_TILES) if n // P * token <= KEY_BYTES or n == P),
        run=1,
        deepest=next(n for n in reversed(DEPTHS) if n * kept <= STACK_BYTES or n == 1),
        splits_heads=False,
        loaded=1,
        item_programs=num_programs(),
    )


def _make(host: Metadata, options: PlanOptions, rows: tuple[PagedKV, PagedKV]) -> BackwardPlan:
    batch, tiles = batch_of(host, options), options.tiles
    spans = spans_of(batch, tiles.heads.planes, None)
    group_size, key_tiles = tiles.heads.members, [n for n in KEY_TILES if n <= tiles.tile_k]
    cuts = cut(batch, spans, group_size, tiles.deepest * P, tuple(key_tiles))
    num_tiles = -(-(cuts.stop_row - cuts.first_row) // P)
    depth = torch.tensor(DEPTHS)[torch.searchsorted(torch.tensor(DEPTHS), num_tiles)]
    in_sequence = tokens_in_sequence(batch, options)
    launches = []
    kinds = torch.stack([cuts.launch, cuts.tile_k, depth], 1)
    for kind in kinds.unique(dim=0):
        _, tile_k, stack_depth = kind.tolist()
        stacks = cuts.chosen((kinds == kind).all(1), stack_depth)
        work = list_items(batch, spans, stacks, group_size, P, tile_k, 1, None)
        slots = slots_of(work, host, options)
        info = lay_out(work, tiles.heads, rows, slots, in_sequence, 1, tiles.item_programs, True)
        launches.append(_with_key_rows(info, tiles.heads, slots[1]))
    return BackwardPlan(launches, cuts.adds_dq, cuts.adds_dkv)


def _with_key_rows(info: WorkInfo, heads: TokenMajor, slots: Tensor) -> WorkInfo:
    """The tables with the rows of dk and dv, (token, KV head): -1 for what no row of an item sees."""
    work, items = info.work, info.items
    column = torch.arange(work.tile_k)
    is_seen = (column >= work.key_start[:, None]) & (column < work.key_stop[:, None])
    row = slots * heads.num_kv_heads + work.plane[work.stack, None]
    row = row.where(is_seen, torch.tensor(-1))[items].where(~info.is_idle[:, None], torch.tensor(-1))
    columns = row.unflatten(1, (-1, P)).transpose(1, 2).to(torch.int32)
    return dataclasses.replace(info, indices=torch.cat([info.indices, columns], 2).contiguous())
