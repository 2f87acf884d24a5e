"""Which query tokens name each unit of keys: lists of selected keys the other way round, as items
of work for kernels that read a unit once for all of its tokens.

An *entry* is a place in `key_indices`, numbered as there; a *bucket* is a unit of one sequence and
one KV head. The rank of an entry in its bucket comes from an atomic counter, so the order of a
bucket's entries may change from call to call: nothing may depend on it. Nothing is read on the
host.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.portable import selected
from torch_paged_attn.backends.triton.portable.selected_keys import find_token
from torch_paged_attn.backends.triton.portable.tiles import key_bound
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, next_power_of_2

# words of an item: the number of its first entry in `entries`, how many it has, the unit, its
# sequence and KV head, one past the last key that a token of the unit sees, whether a token of it
# does not see all of its keys
ITEM_WORDS = tl.constexpr(8)
FIRST, COUNT, UNIT, BATCH, HEAD, STOP, IS_CUT = (tl.constexpr(i) for i in range(7))

# buckets that are added up at a time, entries of a program that puts them in order
BUCKETS, ENTRIES = 4096, 1024
# larger than every position
FAR = tl.constexpr(2**30)


class UnitLists(NamedTuple):
    """`entries` has the numbers of all entries that count, bucket by bucket; `items` `(most, 8)`
    are runs of them, `num_items` `(1,)` of which are filled in. `buckets` `(rows, G, K)` says which
    entries count: it is -1 for others. `last_keys` `(rows,)`: the last key that a token may see.
    All int32; rows are those of `first_row` on.
    """

    entries: Tensor
    items: Tensor
    num_items: Tensor
    buckets: Tensor
    last_keys: Tensor
    first_row: int


def units_of(call: AttentionCall) -> int:
    """How many units a sequence may have, or a cache if entries name units of it."""
    selection = call.selection
    assert selection is not None
    keys = call.k.shape[0] * call.page_size if call.is_slots else key_bound(call)
    return max(cdiv(keys, selection.select_size), 1)


def buckets_of(call: AttentionCall) -> int:
    """The number of buckets."""
    selection = call.selection
    assert selection is not None
    sequences = 1 if call.is_slots else max(call.batch, 1)
    return selection.key_indices.shape[1] * sequences * units_of(call)


def make_unit_lists(
    call: AttentionCall, target: Target, rows: slice, most: int, multiple: int
) -> UnitLists:
    """The lists of some query rows. An item has `most` entries at most; if a bucket is cut, into
    items of a multiple of `multiple`.
    """
    selection, device = call.selection, call.q.device
    assert selection is not None
    _, groups, entries = selection.key_indices.shape
    count, num_buckets = rows.stop - rows.start, buckets_of(call)

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    total = count * groups * entries
    buckets, ranks, last_keys = new(count, groups, entries), new(total), new(count)
    # of buckets: entries, one past the last key that a token sees, and FAR less the first one
    # behind those that all tokens see
    counters = torch.zeros((3, num_buckets), dtype=torch.int32, device=device)
    starts, ordered, num_items = new(num_buckets), new(total), new(1)
    items = new(min(num_buckets, total) + total // most, ITEM_WORDS.value)
    config = selected.config_of(call, target)
    options = selected.options_of(call, target, config, False)
    sizes, units = selected.sizes_of(call), units_of(call)
    Launch(
        _count_units_kernel,
        (count, groups),
        first_row=rows.start,
        units=units,
        num_buckets=num_buckets,
        sizes=sizes,
        strides=selected.strides_of(call),
        scalars=selected.scalars_of(call),
        K=next_power_of_2(entries),
        OPTIONS=options,
        num_warps=1,
    )(selected.pointers_of(call, target), counters, buckets, ranks, last_keys)
    Launch(
        _list_items_kernel,
        (1,),
        num_buckets=num_buckets,
        units=units,
        sequences=1 if call.is_slots else max(call.batch, 1),
        SELECT_SIZE=selection.select_size,
        MOST=most,
        MULTIPLE=multiple,
        BUCKETS=min(BUCKETS, max(32, next_power_of_2(num_buckets))),
        num_warps=8,
    )(counters, starts, items, num_items)
    Launch(
        _order_entries_kernel,
        (cdiv(total, ENTRIES),),
        total=total,
        ENTRIES=ENTRIES,
        num_warps=4,
    )(buckets, ranks, starts, ordered)
    return UnitLists(ordered, items, num_items, buckets, last_keys, rows.start)


@triton.jit(do_not_specialize=("first_row", "units", "num_buckets", "sizes"))
def _count_units_kernel(
    pointers, counters_ptr, buckets_ptr, ranks_ptr, last_keys_ptr,
    first_row, units, num_buckets, sizes, strides, scalars,
    K: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Buckets and ranks of the entries of one token and one list."""
    SELECT_SIZE: tl.constexpr = OPTIONS.SELECT_SIZE
    row, group = tl.program_id(0), tl.program_id(1)
    token = find_token(first_row + row, group, pointers, strides, sizes, OPTIONS)
    stop = token.key_len
    if OPTIONS.HAS_RIGHT:
        stop = tl.minimum(stop, token.position + scalars.right + 1)
    sequence = token.b
    if OPTIONS.PAGE_SIZE == 0:
        # unchecked lengths must not lead outside the keys or the table
        stop = tl.where(token.k_first >= 0, tl.minimum(stop, sizes.num_rows - token.k_first), 0)
    elif OPTIONS.IS_SLOTS:
        sequence = tl.zeros([], tl.int32)
    else:
        stop = tl.minimum(stop, tl.cast(sizes.max_pages, tl.int64) * OPTIONS.PAGE_SIZE)
    stop = tl.where(token.exists, stop, 0).to(tl.int32)
    if group == 0:
        tl.store(last_keys_ptr + row, stop - 1)
    entry = tl.arange(0, K)
    unit = tl.load(
        token.list_ptr + entry.to(tl.int64) * strides.index_entry,
        mask=entry < token.count,
        other=-1,
    )
    counts = (unit >= 0) & (unit < units)
    unit = tl.where(counts, unit, 0)
    counts = counts & (unit * SELECT_SIZE < stop)
    sequences = sizes.batch
    if OPTIONS.IS_SLOTS:
        sequences = 1
    bucket = tl.where(counts, (group * sequences + sequence) * units + unit, -1)
    rank = tl.atomic_add(counters_ptr + bucket, 1, mask=counts, sem="relaxed")
    reach = tl.minimum(stop, (unit + 1) * SELECT_SIZE)
    of_bucket = counters_ptr + num_buckets + bucket
    tl.atomic_max(of_bucket, reach, mask=counts, sem="relaxed")
    tl.atomic_max(of_bucket + num_buckets, FAR - reach, mask=counts, sem="relaxed")
    at = (row * tl.num_programs(1) + group) * sizes.entries + entry
    tl.store(buckets_ptr + at, bucket, mask=entry < sizes.entries)
    tl.store(ranks_ptr + at, rank, mask=entry < sizes.entries)


@triton.jit(do_not_specialize=("num_buckets", "units", "sequences"))
def _list_items_kernel(
    counters_ptr, starts_ptr, items_ptr, num_items_ptr, num_buckets, units, sequences,
    SELECT_SIZE: tl.constexpr, MOST: tl.constexpr, MULTIPLE: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Where the entries of each bucket begin, and the items, by one program."""
    start = tl.zeros([], tl.int32)
    num_items = tl.zeros([], tl.int32)
    for first in tl.range(0, num_buckets, BUCKETS):
        bucket = first + tl.arange(0, BUCKETS)
        exists = bucket < num_buckets
        count = tl.load(counters_ptr + bucket, mask=exists, other=0)
        stop = tl.load(counters_ptr + num_buckets + bucket, mask=exists, other=0)
        least = FAR - tl.load(counters_ptr + 2 * num_buckets + bucket, mask=exists, other=0)
        begin = start + tl.cumsum(count, 0) - count
        tl.store(starts_ptr + bucket, begin, mask=exists)
        pieces = (count + MOST - 1) // MOST
        # of equal length
        length = (count + pieces - 1) // tl.maximum(pieces, 1)
        length = (length + MULTIPLE - 1) // MULTIPLE * MULTIPLE
        item = num_items + tl.cumsum(pieces, 0) - pieces
        unit, of_head = bucket % units, bucket // units
        is_cut = (least < (unit + 1) * SELECT_SIZE).to(tl.int32)
        for i in tl.range(0, tl.max(pieces, 0)):
            has = i < pieces
            item_ptr = items_ptr + (item + i).to(tl.int64) * ITEM_WORDS
            left = tl.maximum(tl.minimum(count - i * length, length), 0)
            tl.store(item_ptr + FIRST, begin + i * length, mask=has)
            tl.store(item_ptr + COUNT, left, mask=has)
            tl.store(item_ptr + UNIT, unit, mask=has)
            tl.store(item_ptr + BATCH, of_head % sequences, mask=has)
            tl.store(item_ptr + HEAD, of_head // sequences, mask=has)
            tl.store(item_ptr + STOP, stop, mask=has)
            tl.store(item_ptr + IS_CUT, is_cut, mask=has)
        start += tl.sum(count, 0)
        num_items += tl.sum(pieces, 0)
    tl.store(num_items_ptr, num_items)


@triton.jit(do_not_specialize=("total",))
def _order_entries_kernel(
    buckets_ptr, ranks_ptr, starts_ptr, entries_ptr, total, ENTRIES: tl.constexpr
):  # fmt: skip
    """Put the numbers of entries that count where their buckets are."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    bucket = tl.load(buckets_ptr + at, mask=at < total, other=-1)
    counts = bucket >= 0
    start = tl.load(starts_ptr + bucket, mask=counts, other=0)
    rank = tl.load(ranks_ptr + at, mask=counts, other=0)
    tl.store(entries_ptr + start + rank, at, mask=counts)
