"""The tables that the kernels load: those of each item of a work list, the numbers of each query
row and KV head (sink, slope, factors of its scores and result), and the words of dropout."""

import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, is_by_token
from torch_paged_attn.backends.neuron.kernels.load_item import NUM_SCALARS
from torch_paged_attn.backends.neuron.kernels.philox import NUM_WORDS, ROUNDS
from torch_paged_attn.backends.neuron.kernels.query_tile import LOWEST, MASKED, P
from torch_paged_attn.backends.neuron.paged_kv import PagedKV
from torch_paged_attn.backends.neuron.work_list import WorkList

# float32 counts exactly to here
EXACT = 2**24


@dataclasses.dataclass(frozen=True)
class Heads:
    """How heads are given to the kernel: all KV heads together, or each KV or query head alone."""

    num_kv_heads: int
    group_size: int  # query heads of a KV head
    planes: int  # 1, num_kv_heads, or all query heads

    @property
    def together(self) -> int:
        """KV heads in a row that the kernel loads."""
        return self.num_kv_heads if self.planes == 1 else 1

    @property
    def members(self) -> int:
        """Query heads of a row's group that share an item."""
        return 1 if self.planes == self.num_heads else self.group_size

    @property
    def num_heads(self) -> int:
        """Query heads."""
        return self.num_kv_heads * self.group_size

    def head_of(self, plane: Tensor) -> Tensor:
        """The KV head of a plane; the first of all where they go together."""
        return plane // self.group_size if self.members < self.group_size else plane

    def member_of(self, plane: Tensor, member: Tensor) -> Tensor:
        """Which head of its group a row belongs to."""
        return plane % self.group_size if self.members < self.group_size else member

    def row_of(self, plane: Tensor, token: Tensor, member: Tensor) -> Tensor:
        """Rows are (token, member of the group), then the KV head unless all go together."""
        row = token * self.group_size + self.member_of(plane, member)
        return row if self.planes == 1 else row * self.num_kv_heads + self.head_of(plane)


@dataclasses.dataclass(frozen=True)
class TokenMajor(Heads):
    """Each KV head alone, and rows as a contiguous q has them: (token, query head)."""

    def row_of(self, plane: Tensor, token: Tensor, member: Tensor) -> Tensor:
        """As in `Heads`, but a token's query heads in their order."""
        return token * self.num_heads + plane * self.group_size + member


@dataclasses.dataclass(frozen=True)
class WorkInfo:
    """`attention_kernel`'s arguments of the same names, and the work list they come from.

    Line i of the tables stands for `work`'s item `items[i]`, unless it `is_idle`. `page` and `slot`
    are those of its columns' keys, on the host.
    """

    work: WorkList
    indices: Tensor
    bounds: Tensor
    count: Tensor
    positions: Tensor
    items: Tensor
    is_idle: Tensor
    page: Tensor
    slot: Tensor

    @property
    def tables(self) -> dict[str, Any]:
        """What kernels are given of it, by the names of their arguments."""
        names = "indices", "bounds", "positions", "count"
        return {name: getattr(self, name) for name in names}

    def to(self, device: torch.device) -> "WorkInfo":
        """The tables on `device`; the rest stays on the host."""
        return dataclasses.replace(self, **{n: x.to(device) for n, x in self.tables.items()})


def bucket(num_items: int) -> int:
    """The next 2**n or 3 * 2**n: every new shape is a compilation."""
    power = 1 << (num_items - 1).bit_length()
    return power * 3 // 4 if power >= 4 and num_items <= power * 3 // 4 else power


def split_over_cores(work: WorkList, programs: int) -> tuple[Tensor, Tensor, int]:
    """Share the items among programs without splitting a stack; each program has as many lines.

    Returns each line's item, whether the line is idle, and the largest number of items.
    """
    cuts = [0]
    starts = work.is_first.nonzero()[:, 0]
    for program in range(1, programs):
        fair = work.num_items * program // programs
        cuts.append(int(starts[(starts - fair).abs().argmin()]))
    cuts.append(work.num_items)
    most = max(b - a for a, b in itertools.pairwise(cuts))
    lines = bucket(most)
    place = torch.arange(lines)
    first = torch.tensor(cuts[:-1])[:, None]
    count = torch.tensor(cuts).diff()[:, None]
    items = first + torch.minimum(place, (count - 1).clamp(min=0))
    is_idle = (place >= count).flatten()
    return items.flatten().clamp(max=work.num_items - 1), is_idle, most


def slots_of(work: WorkList, host: AttentionCall) -> tuple[Tensor, Tensor]:
    """Page and slot that each run of an item's keys starts at, `(num_items, tile_k / run)`."""
    page, slot = torch.zeros_like(work.keys), torch.zeros_like(work.keys)
    sees = work.key_start < work.key_stop
    sequence, key = work.sequence[work.stack][sees, None], work.keys[sees]
    if not len(key):
        return page, slot
    if host.block_table is None:
        slot[sees] = host.first_keys().long()[sequence] + key
        return page, slot
    table = host.block_table.long()
    # page ids are not checked: a wrong one must not read outside the cache
    column = (key // host.page_size).clamp(max=table.shape[1] - 1)
    page[sees] = table[sequence, column].clamp(0, host.k.shape[0] - 1)
    slot[sees] = key % host.page_size
    return page, slot


def lay_out(
    work: WorkList,
    host: AttentionCall,
    heads: Heads,
    rows: tuple[PagedKV, PagedKV],
    programs: int,
    loads_all: bool = False,
) -> WorkInfo:
    """The tables of a work list of a call whose metadata is on the host.

    `programs` share the items (1: they share the heads). A tile without rows keeps what an earlier
    stack has left there, unless `loads_all` fills it with a row of its own stack; with it a program
    without items loads some stack, too, so that no tile is ever read before it is written.
    """
    items, is_idle, count = split_over_cores(work, programs)
    slots = slots_of(work, host)
    stack = work.stack[items]
    chunks = work.tile_k // (P * work.run)

    plane = work.plane[:, None, None]
    row = heads.row_of(plane, work.token, work.member)
    first = work.is_first[items] & ~is_idle
    last = work.is_last[items] & ~is_idle
    has_rows = work.is_row.any(2, keepdim=True) | loads_all
    begins = first
    if loads_all:
        begins = first | (torch.arange(len(items)) % (len(items) // programs) == 0)
    loaded = row.where(has_rows, -1)[stack].where(begins[:, None, None], -1)
    stored = row.where(work.is_row, -1)[stack].where(last[:, None, None], -1)
    head = heads.head_of(work.plane)[work.stack, None]
    k_rows, v_rows = (r.row_of(slots[0], head, slots[1])[items] for r in rows)
    shares = torch.arange(work.share)[:, None] * rows[0].rows_of_head
    of_first = k_rows[:, :: work.share].unflatten(1, (chunks, 1, -1))
    keys = [(of_first + shares).flatten(2), v_rows.unflatten(1, (chunks, P))]
    columns = [loaded, stored, *keys]
    if host.dropout_p > 0.0:
        # the bits depend on a query's place in its sequence
        starts, sequence = host.cu_seqlens_q.long(), sequences_of(host)
        in_sequence = torch.arange(host.total_q) - starts[sequence]
        query_head = heads.member_of(plane, work.member)
        if heads.planes > 1:  # else the kernel adds the KV head's part
            query_head = query_head + heads.head_of(plane) * heads.group_size
        seed = (work.sequence[:, None, None] << 16 | query_head).expand_as(work.token)
        columns += in_sequence[work.token][stack], seed[stack]
    indices = torch.cat(columns, 1).transpose(1, 2)

    start, stop, key_start, key_stop = (
        edge[items].where(~is_idle.view(-1, *[1] * (edge.dim() - 1)), 0)
        for edge in (work.row_start, work.row_stop, work.key_start, work.key_stop)
    )
    columns = [start, stop, work.position.clamp(-EXACT, EXACT)[stack]]
    columns += [x[:, None, None].expand(-1, 1, P) for x in (first, key_start, key_stop)]
    bounds = torch.cat([c.float() for c in columns], 1).transpose(1, 2)

    positions = (work.keys[items][..., None] + torch.arange(work.run)).flatten(1)
    return WorkInfo(
        work=work,
        indices=indices.to(torch.int32).contiguous(),
        bounds=bounds.contiguous(),
        count=torch.tensor([[count]], dtype=torch.int32),
        positions=positions.to(torch.int32),
        items=items,
        is_idle=is_idle,
        page=slots[0][items].repeat_interleave(work.run, 1),
        slot=(slots[1][items][..., None] + torch.arange(work.run)).flatten(1),
    )


def has_token_scales(call: AttentionCall) -> bool:
    """Whether keys or values have a scale for each token and head."""
    return any(is_by_token(x, call.batch) for x in (call.k_descale, call.v_descale))


def descales_of(call: AttentionCall) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Of queries, keys and values, those that rows of queries have to themselves."""
    if has_token_scales(call):
        return call.q_descale, None, None
    return call.q_descale, call.k_descale, call.v_descale


def token_scales(
    call: AttentionCall, info: WorkInfo, heads: Heads, absent: Tensor | None
) -> Tensor:
    """`(num_items, 2 * heads.together * tile_k)` float32: the scales of each item's keys, then of
    its values; one number where there are none. Of columns that no row sees, `absent` ones among
    them, they are 0, whatever the cache holds.
    """
    work, device = info.work, call.q.device
    if not has_token_scales(call):
        return torch.zeros(1, 1, device=device)
    sequence = work.sequence[work.stack][info.items].clamp(max=call.batch - 1).to(device)
    head = torch.arange(heads.together)[None]
    if heads.planes > 1:
        head = heads.head_of(work.plane)[work.stack][info.items][:, None]
    page, slot, head = (x.to(device) for x in (info.page, info.slot, head))

    def of(descale: Tensor | None) -> Tensor:
        """(num_items, heads, tile_k)"""
        if descale is None:
            return torch.ones((), device=device)
        if not is_by_token(descale, call.batch):
            each = descale.expand(call.batch, call.num_kv_heads)
            return each[sequence[:, None], head][..., None]
        if descale.dim() == 2:
            return descale[slot[:, None], head[..., None]]
        return descale[page[:, None], head[..., None], slot[:, None]]

    seen = work.is_seen[info.items].to(device)
    if absent is not None:
        seen &= ~absent
    shape = len(info.items), heads.together, work.tile_k
    both = [of(x).expand(shape) for x in (call.k_descale, call.v_descale)]
    return torch.stack(both, 1).masked_fill(~seen[:, None, None], 0.0).float().flatten(1)


def score_scale(call: AttentionCall) -> float:
    """What products are multiplied with: before the softcap if there is one."""
    return float(call.scale / call.softcap if call.softcap > 0.0 else call.scale)


def row_scalars(call: AttentionCall, heads: Heads) -> Tensor:
    """`(num_rows, heads.together * NUM_SCALARS)` float32; one row where no option needs any."""
    descales = descales_of(call)
    if all(values is None for values in (call.sinks, call.alibi_slopes, *descales)):
        return torch.zeros(1, heads.together * NUM_SCALARS, device=call.q.device)
    sequence = sequences_of(call)
    q_descale, k_descale, v_descale = (per_token(d, 1.0, sequence, heads) for d in descales)
    is_padding = (sequence == call.batch)[:, None, None]
    sinks = per_token(call.sinks, 0.0, sequence, heads)
    columns = (
        # padding tokens see no sink either
        sinks.clamp(min=LOWEST).masked_fill(is_padding | (sinks == float("-inf")), MASKED),
        per_token(call.alibi_slopes, 0.0, sequence, heads),
        q_descale * k_descale * score_scale(call),
        v_descale,
    )
    return torch.stack(columns, 3).reshape(-1, heads.together * NUM_SCALARS)


def sequences_of(call: AttentionCall) -> Tensor:
    """The sequence of each query, `(total_q,)`; that of padding tokens is `batch`."""
    stops = call.cu_seqlens_q[1:].contiguous()
    tokens = torch.arange(call.total_q, device=stops.device, dtype=torch.int32)
    return torch.searchsorted(stops, tokens, right=True)


def per_token(values: Tensor | None, default: float, sequence: Tensor, heads: Heads) -> Tensor:
    """`(total_q, group_size, num_kv_heads)` of values per head, KV head, or sequence too."""
    num_kv_heads, group_size = heads.num_kv_heads, heads.group_size
    if values is None or values.numel() == 0:  # no sequence: padding tokens only
        values = torch.full((), default, device=sequence.device)
    if values.dim() == 2:  # padding tokens take the last sequence's
        values = values[sequence.clamp(max=len(values) - 1)]
    if values.dim() and values.shape[-1] == heads.num_heads:
        by_head = values.unflatten(-1, (num_kv_heads, group_size)).transpose(-1, -2)
    else:
        by_head = values[..., None, :] if values.dim() else values
    return by_head.expand(len(sequence), group_size, num_kv_heads)


# dropout: keys of the rounds, offset, threshold, which all positions share
WEYL = (0x9E3779B9, 0xBB67AE85)
MASK = 0xFFFFFFFF


def philox_words(call: AttentionCall) -> Tensor:
    """`(1, NUM_WORDS)` int32 with the bits of unsigned words: zeros without dropout. Nothing is
    read on the host.
    """
    rng_state = call.rng_state
    if call.dropout_p == 0.0 or rng_state is None:
        return torch.zeros(1, NUM_WORDS, dtype=torch.int32, device=call.q.device)
    seed, offset = rng_state[0], rng_state[1]
    halves = torch.stack([seed & MASK, seed >> 32 & MASK])
    steps = torch.arange(ROUNDS, device=rng_state.device)[:, None]
    weyl = torch.tensor(WEYL, device=rng_state.device)
    threshold = torch.full((1,), int(call.dropout_p * 2.0**32), device=rng_state.device)
    words = torch.cat(
        [((halves + steps * weyl) & MASK).flatten(), (offset & MASK)[None], threshold]
    )
    # bits of 32: what is 2**31 or more is negative
    return torch.where(words > MASK >> 1, words - (MASK + 1), words).to(torch.int32)[None]
