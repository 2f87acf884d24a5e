"""Selected units of keys on Hopper, each read once for all tokens that name it: the lists that say
which do, how parts are added up, what the compiler makes of the kernel and, on a Hopper chip, its
results."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
from covering import every_other
from hopper_calls import HAS_HOPPER, HOPPER, hopper_call
from planned_anew import planned_anew

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.unit_items import UnitLists
from torch_paged_attn.backends.triton.hopper.units import plan as selected_units
from torch_paged_attn.backends.triton.hopper.units.arguments import UnitCombinePointers
from torch_paged_attn.backends.triton.hopper.units.rows import _combine_units_kernel
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.unit_lists import plan_unit_lists
from torch_paged_attn.backends.triton.runtime.target import Target, assume, next_power_of_2
from torch_paged_attn.ops.selected_checks import selected_keys
from torch_paged_attn.testing import Problem, Selected, assert_accurate, build

bf16, f16 = torch.bfloat16, torch.float16
CHUNK = ((6, 300), (9, 0), (1, 77), (0, 0), (3, -2))
# entries of an item, at most
MOST = 4
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
        Problem("moba", CHUNK, 3, 3, 128, dtype=bf16, page_size=256,
                selected=Selected(3, 256, "kv", own=True)),
        Problem("two_heads", CHUNK, 4, 2, 64, 128, dtype=f16, sinks=True, page_size=64,
                selected=Selected(3, 256, "kv", counted=True, past=True)),
        Problem("nothing", ((5, 100), (20, 20)), 16, 1, 64, dtype=bf16, page_size=64,
                selected=Selected(3, 64, "kv", holes=1.0)),
    )
}  # fmt: skip


def _new_lists(problem: Problem, rows: slice, device: torch.device) -> UnitLists:
    """The lists that kernels on a device make, on the CPU."""
    call = hopper_call(problem, device)
    lists = plan_unit_lists(call, HOPPER, rows, MOST, 2)(selected.pointers_of(call, HOPPER))
    return UnitLists(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in lists))


class Item(NamedTuple):
    """The words of an item."""

    first: int
    count: int
    unit: int
    batch: int
    head: int
    stop: int
    is_cut: int
    spare: int


def _items(lists: UnitLists) -> list[Item]:
    return [Item(*words) for words in lists.items[: int(lists.num_items)].tolist()]


@pytest.mark.parametrize("name", PROBLEMS)
def test_lists_name_each_seen_unit_once(name, device):
    call = hopper_call(PROBLEMS[name])
    size, groups = call.selection.select_size, call.num_kv_heads
    lists = _new_lists(PROBLEMS[name], slice(0, call.total_q), device)
    total = int(call.cu_seqlens_q[-1])
    units, _, is_seen = selected_keys(call, slice(0, total))
    is_seen = is_seen.unflatten(-1, (-1, size))
    counts = is_seen.any(-1)
    assert torch.equal(lists.buckets[:total] >= 0, counts)
    assert (lists.buckets[total:] < 0).all()
    found = []
    for item in _items(lists):
        assert 0 < item.count <= MOST
        of_item = slice(item.first, item.first + item.count)
        for entry, row in zip(lists.entries[of_item].tolist(), lists.rows[of_item], strict=True):
            token, group, k = (
                entry // (units.shape[2] * groups),
                entry // units.shape[2] % groups,
                entry % units.shape[2],
            )
            assert row == token and item.head == group and item.unit == units[token, group, k]
            seen = int(is_seen[token, group, k].sum())
            assert seen == min(int(lists.last_keys[token]) + 1 - item.unit * size, size)
            # of the whole bucket
            assert item.stop >= item.unit * size + seen and (item.is_cut or seen == size)
            if not call.is_slots:
                assert call.cu_seqlens_q[item.batch] <= token < call.cu_seqlens_q[item.batch + 1]
            found.append(entry)
    assert sorted(found) == counts.flatten().nonzero().flatten().tolist()
    keys = {(x.batch, x.head, x.unit): [] for x in _items(lists)}
    for item in _items(lists):
        keys[item.batch, item.head, item.unit].append(item)
    for items in keys.values():
        # equal words, and as few items as there can be
        assert len({(x.stop, x.is_cut) for x in items}) == 1
        assert len(items) == -(-sum(x.count for x in items) // MOST)


def _parts(call: AttentionCall, lists) -> list[torch.Tensor]:
    """What the kernel leaves of all entries: values by lane, lse in base two, scales."""
    size, group_size = call.selection.select_size, call.group_size
    entries, groups = call.selection.key_indices.shape[2], call.num_kv_heads
    total = int(call.cu_seqlens_q[-1])
    _, keys, is_seen = selected_keys(call, slice(0, total))
    values = torch.full((lists.buckets.numel(), group_size, call.head_dim_v), torch.nan)
    lse, scale = (torch.full(values.shape[:2], torch.nan) for _ in range(2))
    for item in _items(lists):
        for entry in lists.entries[item.first : item.first + item.count].tolist():
            token, group, at = entry // (entries * groups), item.head, entry % entries
            of_unit = slice(at * size, at * size + size)
            key, seen = keys[token, group, of_unit], is_seen[token, group, of_unit]
            key = key[seen]
            if call.is_paged:
                page = key // call.page_size
                if not call.is_slots:
                    page = call.block_table[item.batch, page].long()
                k, v = (x[page, group, key % call.page_size] for x in (call.k, call.v))
            else:
                bounds = call.cu_seqlens_q if call.cu_seqlens_k is None else call.cu_seqlens_k
                k, v = (x[bounds[item.batch] + key, group] for x in (call.k, call.v))
            q = call.q[token].unflatten(0, (groups, group_size))[group].double()
            s = q @ k.double().T * call.scale
            part = torch.softmax(s, -1) @ v.double()
            scale[entry] = 2.0 ** -torch.randint(0, 3, (group_size,))
            part = (part / scale[entry][:, None]).unflatten(-1, (-1, 4, 4, 2)).transpose(-2, -3)
            values[entry] = part.flatten(1)
            lse[entry] = s.logsumexp(-1) * torch.tensor(2.0).log().reciprocal()
    return [values.half(), lse, scale]


@pytest.mark.parametrize("name", every_other(PROBLEMS))
def test_parts_are_added_up(name, device):
    """The results of a call, some rows at a time, with the kernel's part done by PyTorch."""
    problem = PROBLEMS[name]
    call = hopper_call(problem, device)
    out, lse = call.new_results()
    entries = call.selection.key_indices.shape[2]
    of_row = call.num_kv_heads * entries
    parts = _parts(hopper_call(problem, "cpu"), _new_lists(problem, slice(0, call.total_q), device))
    for rows in (slice(0, 5), slice(5, call.total_q)):
        lists, count = _new_lists(problem, rows, device), rows.stop - rows.start
        _combine_units_kernel[(count, call.num_kv_heads)](
            UnitCombinePointers(
                *(x[rows.start * of_row : rows.stop * of_row].clone().to(device) for x in parts),
                lists.buckets.to(device), out, lse, call.sinks, call.cu_seqlens_q,
            ),
            rows.start, call.total_q, call.batch, entries,
            NUM_HEADS=call.num_heads, HEADS=call.group_size, WIDTH=call.head_dim_v,
            K=next_power_of_2(entries),
        )  # fmt: skip
    assert_accurate(out, lse, build(problem).truth())


@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper chip")
def test_results(name, monkeypatch):
    """In one piece and, the same bits, some rows at a time."""
    monkeypatch.setattr(selected_units, "unprofitable", lambda call: None)
    assert selected_units.unsupported(hopper_call(PROBLEMS[name], "cuda")) is None
    call = build(PROBLEMS[name])
    out, lse = planned_anew(call.to("cuda"))
    assert_accurate(out, lse, call.truth())
    monkeypatch.setattr(selected_units, "MOST_BYTES", 2**16)
    again = planned_anew(call.to("cuda"))
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


def test_many_tokens_of_few_units_take_this_kernel():
    """By shapes alone, and only on Hopper. The chip is small: few tokens fill it."""

    def reason(arch: str, **changes) -> str | None:
        problem = dataclasses.replace(PROBLEMS["m3"], **{"seqs": ((190, 10),)} | changes)
        with assume(Target.of_arch(arch, 16)):
            call = hopper_call(problem)
            return selected_units.unsupported(call) or selected_units.unprofitable(call)

    assert reason("sm90") is None
    assert "Hopper" in reason("sm80")
    assert "other sequences" in reason("sm90", batch_invariant=True)
    assert "softcap" in reason("sm90", softcap=5.0)
    assert "few tokens" in reason("sm90", seqs=((30, 9000),))
    assert "fill the chip" in reason("sm90", seqs=((90, 100),))
    lists = PROBLEMS["moba"].selected
    moba = {"num_heads": 8, "num_kv_heads": 8, "page_size": 256, "selected": lists}
    assert reason("sm90", **moba, seqs=((1100, 0),)) is None
    assert "few tokens" in reason("sm90", num_heads=2, seqs=((100, 3000),))


@pytest.mark.parametrize("name", ["moba", "two_heads"])
def test_a_large_unit_is_several_of_the_kernels(name):
    call = hopper_call(PROBLEMS[name])
    tokens = slice(0, int(call.cu_seqlens_q[-1]))
    in_units = selected_units._in_units(call)
    assert in_units.selection.select_size == 128
    (_, keys, is_seen), (_, same, also_seen) = (selected_keys(x, tokens) for x in (call, in_units))
    assert torch.equal(is_seen, also_seen)
    assert torch.equal(keys[is_seen], same[is_seen])
