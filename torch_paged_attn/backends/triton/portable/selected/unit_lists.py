"""Which query tokens name each unit of keys: lists of selected keys the other way round, as items
of work for kernels that read a unit once for all of its tokens.

An *entry* is a place in `key_indices`, numbered as there; a *bucket* is a unit of one sequence and
one KV head. The rank of an entry in its bucket comes from an atomic counter, so the order of a
bucket's entries may change from call to call: nothing may depend on it. Nothing is read on the
host.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.unit_items import ITEM, ITEM_WORDS, UnitLists, units_of
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedPointers,
    SelectedSizes,
    find_token,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, next_power_of_2
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# tokens of a program that counts, and entries that are put in order at a time
TOKENS, ENTRIES = 32, 1024
# buckets that are added up at a time, if there are so few, and if there are more: their number
# follows that of the keys, and a user would wait for a kernel for each power of two
FEW_BUCKETS, BUCKETS = 512, 4096
# larger than every position
FAR = tl.constexpr(2**30)


class EntryPointers(NamedTuple):
    """Memory of the kernel that puts entries in order. The last three are results: see
    `unit_items.UnitLists`."""

    counters: Any  # of buckets, as `plan_unit_lists` describes them
    buckets: Any  # of entries, -1 for those that do not count
    ranks: Any  # of entries in their buckets
    starts: Any  # of buckets: the number of their first entry
    first_items: Any  # of buckets
    entries: Any
    rows: Any
    items: Any


def buckets_of(call: AttentionCall) -> int:
    """The number of buckets."""
    selection = call.lists
    sequences = 1 if call.is_slots else max(call.batch, 1)
    return selection.key_indices.shape[1] * sequences * units_of(call)


def plan_unit_lists(
    call: AttentionCall, target: Target, rows: slice, most: int, multiple: int
) -> Callable[[SelectedPointers], UnitLists]:
    """What makes the lists of some query rows, of calls like this one. An item has `most` entries
    at most, a multiple of `multiple`; a bucket that has more is cut into items of equal length, but
    for the last one.
    """
    selection, device = call.lists, call.q.device
    _, groups, entries = selection.key_indices.shape
    count, num_buckets = rows.stop - rows.start, buckets_of(call)
    total, units = count * groups * entries, units_of(call)
    num_items = min(num_buckets, total) + total // most
    config = selected.config_of(call, target)
    count_units = Launch(
        _count_units_kernel,
        (cdiv(count, TOKENS), groups),
        first_row=rows.start,
        stop_row=rows.stop,
        units=units,
        num_buckets=num_buckets,
        **selected.sizes_of(call)._asdict(),
        strides=selected.strides_of(call),
        scalars=selected.scalars_of(call),
        TOKENS=TOKENS,
        K=next_power_of_2(entries),
        OPTIONS=selected.options_of(call, target, config, False),
        num_warps=4,
    )
    start_buckets = Launch(
        _start_buckets_kernel,
        (1,),
        num_buckets=num_buckets,
        MOST=most,
        BUCKETS=FEW_BUCKETS if num_buckets <= FEW_BUCKETS else BUCKETS,
        num_warps=16,
    )
    order_entries = Launch(
        _order_entries_kernel,
        (cdiv(total, ENTRIES),),
        total=total,
        first_row=rows.start,
        of_token=groups * entries,
        units=units,
        sequences=1 if call.is_slots else max(call.batch, 1),
        num_buckets=num_buckets,
        SELECT_SIZE=selection.select_size,
        MOST=most,
        MULTIPLE=multiple,
        ENTRIES=ENTRIES,
        num_warps=4,
    )

    def new(*shape: int) -> Allocation:
        return Allocation(shape, torch.int32, device)

    # of buckets: entries, one past the last key that a token sees, and FAR less the first one
    # behind those that all tokens see
    new_counters, of_buckets, of_entries = new(3, num_buckets), new(num_buckets), new(total)
    new_buckets, new_last_keys = new(count, groups, entries), new(count)
    new_count, new_items = new(1), new(num_items, ITEM_WORDS.value)

    def make(given: SelectedPointers) -> UnitLists:
        counters, buckets, ranks = new_counters().zero_(), new_buckets(), of_entries()
        last_keys, starts, first_items = new_last_keys(), of_buckets(), of_buckets()
        count_items, ordered, rows_of, items = new_count(), of_entries(), of_entries(), new_items()
        count_units(given, counters, buckets, ranks, last_keys)
        start_buckets(counters, starts, first_items, count_items)
        order_entries(
            EntryPointers(
                counters=counters,
                buckets=buckets,
                ranks=ranks,
                starts=starts,
                first_items=first_items,
                entries=ordered,
                rows=rows_of,
                items=items,
            )
        )
        return UnitLists(ordered, rows_of, items, count_items, buckets, last_keys, rows.start)

    return make


@triton.jit(
    do_not_specialize=("first_row", "stop_row", "units", "num_buckets", *SelectedSizes._fields)
)
def _count_units_kernel(
    pointers, counters_ptr, buckets_ptr, ranks_ptr, last_keys_ptr,
    first_row, stop_row, units, num_buckets,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, scalars,
    TOKENS: tl.constexpr, K: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Buckets and ranks of the entries of TOKENS tokens in one list each."""
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    SELECT_SIZE: tl.constexpr = OPTIONS.SELECT_SIZE
    group = tl.program_id(1)
    row = first_row + tl.program_id(0) * TOKENS
    stop_row = tl.minimum(stop_row, row + TOKENS)
    sequences = sizes.batch
    if OPTIONS.IS_SLOTS:
        sequences = 1
    entry = tl.arange(0, K)[None, :]
    is_entry = entry < sizes.entries
    while row < stop_row:
        # the rows of one sequence
        token = find_token(row, group, pointers, strides, sizes, OPTIONS)
        last = tl.load(pointers.cu_seqlens_q + token.b + 1)
        last = tl.where(token.exists, tl.minimum(last, stop_row), stop_row)
        i = tl.arange(0, TOKENS)
        exists = row + i < last
        stop = token.key_len + tl.zeros([TOKENS], tl.int64)
        if OPTIONS.HAS_RIGHT:
            stop = tl.minimum(stop, token.position + i + scalars.right + 1)
        sequence = token.b
        if OPTIONS.PAGE_SIZE == 0:
            # unchecked lengths must not lead outside the keys or the table
            room = tl.where(token.k_first >= 0, sizes.num_rows - token.k_first, 0)
            stop = tl.minimum(stop, room)
        elif OPTIONS.IS_SLOTS:
            sequence = tl.zeros([], tl.int32)
        else:
            stop = tl.minimum(stop, tl.cast(sizes.max_pages, tl.int64) * OPTIONS.PAGE_SIZE)
        stop = tl.where(token.exists, stop, 0).to(tl.int32)
        if group == 0:
            tl.store(last_keys_ptr + row - first_row + i, stop - 1, mask=exists)
        count = tl.zeros([TOKENS], tl.int32) + sizes.entries
        if pointers.num_selected is not None:
            count_ptr = pointers.num_selected + (token.row + i) * sizes.stride_count_token
            count = tl.load(count_ptr + group * strides.count_group, mask=exists, other=0)
        list_ptr = token.list_ptr + i[:, None].to(tl.int64) * sizes.stride_index_token
        listed = exists[:, None] & is_entry & (entry < count[:, None])
        unit = tl.load(list_ptr + entry.to(tl.int64) * strides.index_entry, mask=listed, other=-1)
        counts = (unit >= 0) & (unit < units)
        unit = tl.where(counts, unit, 0)
        counts = counts & (unit * SELECT_SIZE < stop[:, None])
        bucket = tl.where(counts, (group * sequences + sequence) * units + unit, -1)
        rank = tl.atomic_add(counters_ptr + bucket, 1, mask=counts, sem="relaxed")
        reach = tl.minimum(stop[:, None], (unit + 1) * SELECT_SIZE)
        # most entries change nothing, and need no atomic
        reaches = counters_ptr + num_buckets + bucket
        known = tl.load(reaches, mask=counts, other=0, volatile=True)
        tl.atomic_max(reaches, reach, mask=counts & (known < reach), sem="relaxed")
        reaches += num_buckets
        known = tl.load(reaches, mask=counts, other=0, volatile=True)
        tl.atomic_max(reaches, FAR - reach, mask=counts & (known < FAR - reach), sem="relaxed")
        at = ((row - first_row + i[:, None]) * tl.num_programs(1) + group) * sizes.entries + entry
        tl.store(buckets_ptr + at, bucket, mask=exists[:, None] & is_entry)
        tl.store(ranks_ptr + at, rank, mask=exists[:, None] & is_entry)
        row = last


@triton.jit(do_not_specialize=("num_buckets",))
def _start_buckets_kernel(
    counters_ptr, starts_ptr, first_items_ptr, num_items_ptr, num_buckets,
    MOST: tl.constexpr, BUCKETS: tl.constexpr,
):  # fmt: skip
    """Where the entries of each bucket begin, and its items, by one program."""
    start = tl.zeros([], tl.int32)
    num_items = tl.zeros([], tl.int32)
    for first in tl.range(0, num_buckets, BUCKETS):
        bucket = first + tl.arange(0, BUCKETS)
        exists = bucket < num_buckets
        count = tl.load(counters_ptr + bucket, mask=exists, other=0)
        pieces = (count + MOST - 1) // MOST
        tl.store(starts_ptr + bucket, start + tl.cumsum(count, 0) - count, mask=exists)
        item = num_items + tl.cumsum(pieces, 0) - pieces
        tl.store(first_items_ptr + bucket, item, mask=exists)
        start += tl.sum(count, 0)
        num_items += tl.sum(pieces, 0)
    tl.store(num_items_ptr, num_items)


@triton.jit(
    do_not_specialize=("total", "first_row", "of_token", "units", "sequences", "num_buckets")
)
def _order_entries_kernel(
    pointers, total, first_row, of_token, units, sequences, num_buckets,
    SELECT_SIZE: tl.constexpr, MOST: tl.constexpr, MULTIPLE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """Put entries that count, and their query rows, where their buckets are. Entry number
    i of a bucket writes the words of its item number i."""
    at = tl.program_id(0) * ENTRIES + tl.arange(0, ENTRIES)
    bucket = tl.load(pointers.buckets + at, mask=at < total, other=-1)
    counts = bucket >= 0
    start = tl.load(pointers.starts + bucket, mask=counts, other=0)
    rank = tl.load(pointers.ranks + at, mask=counts, other=0)
    tl.store(pointers.entries + start + rank, at, mask=counts)
    tl.store(pointers.rows + start + rank, first_row + at // of_token, mask=counts)
    count = tl.load(pointers.counters + bucket, mask=counts, other=1)
    pieces = (count + MOST - 1) // MOST
    length = (count + pieces - 1) // pieces
    length = (length + MULTIPLE - 1) // MULTIPLE * MULTIPLE
    begins = counts & (rank < pieces)
    item = tl.load(pointers.first_items + bucket, mask=begins, other=0) + rank
    stop = tl.load(pointers.counters + num_buckets + bucket, mask=begins, other=0)
    least = FAR - tl.load(pointers.counters + 2 * num_buckets + bucket, mask=begins, other=0)
    unit, of_head = bucket % units, bucket // units
    item_ptr = pointers.items + item.to(tl.int64) * ITEM_WORDS
    tl.store(item_ptr + ITEM.FIRST, start + rank * length, mask=begins)
    tl.store(item_ptr + ITEM.COUNT, tl.minimum(count - rank * length, length), mask=begins)
    tl.store(item_ptr + ITEM.UNIT, unit, mask=begins)
    tl.store(item_ptr + ITEM.BATCH, of_head % sequences, mask=begins)
    tl.store(item_ptr + ITEM.HEAD, of_head // sequences, mask=begins)
    tl.store(item_ptr + ITEM.STOP, stop, mask=begins)
    is_cut = (least < (unit + 1) * SELECT_SIZE).to(tl.int32)
    tl.store(item_ptr + ITEM.IS_CUT, is_cut, mask=begins)
