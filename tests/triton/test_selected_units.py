"""Selected units of keys on Hopper, each read once for all tokens that name it: the lists that say
which do, how parts are added up, what the compiler makes of the kernel and, on a Hopper chip, its
results."""

import dataclasses

import cross_compile
import pytest
import torch
from dispatched import dispatched
from hopper_calls import HAS_HOPPER, HOPPER

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper import selected_units
from torch_paged_attn.backends.triton.hopper.unit_combine import _combine_units_kernel
from torch_paged_attn.backends.triton.runtime.target import Target, assume, next_power_of_2
from torch_paged_attn.backends.triton.unit_lists import (
    BATCH,
    COUNT,
    FIRST,
    HEAD,
    IS_CUT,
    ITEMS,
    STOP,
    TILE,
    TILES,
    UNIT,
    make_unit_lists,
)
from torch_paged_attn.ops.selected_checks import selected_keys
from torch_paged_attn.testing import Problem, Selected, assert_accurate, build

bf16, f16 = torch.bfloat16, torch.float16
CHUNK = ((6, 300), (9, 0), (1, 77), (0, 0), (3, -2))
# entries of a tile
TOKENS = 2
M3 = Selected(3, 128, "kv", own=True)

PROBLEMS = {
    p.name: p
    for p in (
        Problem("m3", CHUNK, 32, 2, 128, dtype=bf16, page_size=128, selected=M3),
        Problem("m3_nhd", CHUNK, 16, 2, 128, dtype=bf16, page_size=128, cache_layout="nhd",
                sinks=True, padding_rows=3, selected=M3),
        Problem("small_pages", CHUNK, 32, 1, 128, dtype=f16, page_size=16,
                selected=Selected(4, 128, "kv", holes=0.3, past=True)),
        Problem("large_pages", CHUNK, 64, 1, 64, dtype=bf16, page_size=256,
                selected=Selected(4, 64, "kv", counted=True, past=True)),
        Problem("packed", CHUNK, 32, 2, 128, dtype=bf16, sinks=True,
                selected=Selected(3, 64, "kv", own=True, past=True)),
        Problem("packed_full", CHUNK, 8, 1, 64, 128, dtype=f16, causal=False,
                selected=Selected("all", 128, "kv")),
        Problem("wide_values", CHUNK, 16, 1, 128, 64, dtype=bf16, out_dtype=torch.float32,
                selected=Selected(2, 128, "kv", own=True)),
        Problem("slots", ((9, 247), (30, 226)), 16, 2, 64, dtype=bf16, page_size=128, causal=False,
                selected=Selected(3, 64, "kv", slots=True)),
        Problem("nothing", ((5, 100), (20, 20)), 16, 1, 64, dtype=bf16, page_size=64,
                selected=Selected(3, 64, "kv", holes=1.0)),
    )
}  # fmt: skip


def _call(problem: Problem, device: str = "cpu") -> AttentionCall:
    call = build(problem).to(device)
    args, options = dispatched(call.op, call.args)
    return AttentionCall.selected_attention(*args, **options)


def _new_lists(call: AttentionCall, rows: slice):
    return make_unit_lists(call, Target.of_arch("sm90", 132), rows, TOKENS)


@pytest.mark.parametrize("name", PROBLEMS)
def test_lists_name_each_seen_unit_once(name):
    call = _call(PROBLEMS[name])
    size, groups = call.selection.select_size, call.num_kv_heads
    lists = _new_lists(call, slice(0, call.total_q))
    total = int(call.cu_seqlens_q[-1])
    units, _, is_seen = selected_keys(call, slice(0, total))
    is_seen = is_seen.unflatten(-1, (-1, size))
    counts = is_seen.any(-1)
    assert torch.equal(lists.buckets[:total] >= 0, counts)
    assert (lists.buckets[total:] < 0).all()
    found, tiles, of_tile = [], 0, []
    for number, item in enumerate(lists.items[: int(lists.totals[ITEMS.value])].tolist()):
        assert item[COUNT.value] > 0 and item[TILE.value] == tiles
        tiles += -(-item[COUNT.value] // TOKENS)
        of_tile += [number] * (tiles - item[TILE.value])
        of_item = slice(item[FIRST.value], item[FIRST.value] + item[COUNT.value])
        reach, is_cut = 0, False
        for entry, row in zip(lists.entries[of_item].tolist(), lists.rows[of_item], strict=True):
            token, group, k = (
                entry // (units.shape[2] * groups),
                entry // units.shape[2] % groups,
                entry % units.shape[2],
            )
            assert row == token and item[HEAD.value] == group and item[UNIT.value] == units[token, group, k]
            seen = int(is_seen[token, group, k].sum())
            assert seen == min(int(lists.last_keys[token]) + 1 - item[UNIT.value] * size, size)
            reach, is_cut = max(reach, item[UNIT.value] * size + seen), is_cut or seen < size
            if not call.is_slots:
                assert call.cu_seqlens_q[item[BATCH.value]] <= token < call.cu_seqlens_q[item[BATCH.value] + 1]
            found.append(entry)
        assert item[STOP.value] == reach and item[IS_CUT.value] == is_cut
    assert sorted(found) == counts.flatten().nonzero().flatten().tolist()
    assert lists.totals[TILES.value] == tiles
    if tiles:
        firsts = [of_tile[min(tiles * p // 132, tiles - 1)] for p in range(132)]
        assert lists.first_items.tolist() == firsts


def _parts(call: AttentionCall, lists) -> list[torch.Tensor]:
    """What the kernel leaves of all entries: values by lane, lse in base two, scales."""
    size, group_size = call.selection.select_size, call.group_size
    entries, groups = call.selection.key_indices.shape[2], call.num_kv_heads
    total = int(call.cu_seqlens_q[-1])
    _, keys, is_seen = selected_keys(call, slice(0, total))
    values = torch.full((lists.buckets.numel(), group_size, call.head_dim_v), torch.nan)
    lse, scale = (torch.full(values.shape[:2], torch.nan) for _ in range(2))
    for item in lists.items[: int(lists.totals[ITEMS.value])].tolist():
        for entry in lists.entries[item[FIRST.value] : item[FIRST.value] + item[COUNT.value]].tolist():
            token, group, at = entry // (entries * groups), item[HEAD.value], entry % entries
            of_unit = slice(at * size, at * size + size)
            key, seen = keys[token, group, of_unit], is_seen[token, group, of_unit]
            key = key[seen]
            if call.is_paged:
                page = key // call.page_size
                if not call.is_slots:
                    page = call.block_table[item[BATCH.value], page].long()
                k, v = (x[page, group, key % call.page_size] for x in (call.k, call.v))
            else:
                bounds = call.cu_seqlens_q if call.cu_seqlens_k is None else call.cu_seqlens_k
                k, v = (x[bounds[item[BATCH.value]] + key, group] for x in (call.k, call.v))
            q = call.q[token].unflatten(0, (groups, group_size))[group].double()
            s = q @ k.double().T * call.scale
            part = torch.softmax(s, -1) @ v.double()
            scale[entry] = 2.0 ** -torch.randint(0, 3, (group_size,))
            part = (part / scale[entry][:, None]).unflatten(-1, (-1, 4, 4, 2)).transpose(-2, -3)
            values[entry] = part.flatten(1)
            lse[entry] = s.logsumexp(-1) * torch.tensor(2.0).log().reciprocal()
    return [values.half(), lse, scale]


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.skipif(torch.cuda.is_available(), reason="emulates the kernel, on the CPU")
def test_parts_are_added_up(name):
    """The results of a call, chunk by chunk, with the kernel's part of the work done by PyTorch."""
    call = _call(PROBLEMS[name])
    out, lse = call.new_results()
    entries = call.selection.key_indices.shape[2]
    of_row = call.num_kv_heads * entries
    parts = _parts(call, _new_lists(call, slice(0, call.total_q)))
    for rows in (slice(0, 5), slice(5, call.total_q)):
        lists, count = _new_lists(call, rows), rows.stop - rows.start
        _combine_units_kernel[(count, call.num_kv_heads)](
            *(x[rows.start * of_row : rows.stop * of_row].clone() for x in parts),
            lists.buckets, out, lse, call.sinks, call.cu_seqlens_q,
            rows.start, call.total_q, call.batch, entries,
            NUM_HEADS=call.num_heads, HEADS=call.group_size, WIDTH=call.head_dim_v,
            K=next_power_of_2(entries), AT_ONCE=2,
        )  # fmt: skip
    assert_accurate(out, lse, build(PROBLEMS[name]).truth())
