"""Is the truth about selected keys true? Against other formulas, and cases computed by hand."""

import dataclasses

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.reference import GOLDEN
from torch_paged_attn.testing import SELECTED, assert_same_in_float64, build
from torch_paged_attn.testing.inputs import cumulative

INF = float("inf")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def golden(op, args, **changes):
    return getattr(reference, op)(**args | changes, precision=GOLDEN)


def assert_same(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert_same_in_float64(x.nan_to_num(neginf=-1.0), y.nan_to_num(neginf=-1.0))


def of_flash_varlen(args):
    own = ("key_indices", "num_selected", "select_size")
    return {name: x for name, x in args.items() if name not in own}


@pytest.mark.parametrize("page_size", [None, 1, 16, 64, 128, 544])
def test_all_units_are_all_keys(page_size):
    case = dataclasses.replace(SELECTED["selected/all_units/f32"], page_size=page_size)
    args = build(case).args
    assert_same(golden("selected_attention", args), golden("flash_varlen", of_flash_varlen(args)))


def test_lists_of_blocks_are_a_layout():
    """One query in each row of blocks of 16: its columns are the list."""
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(64, 2, 8, generator=g), torch.randn(64, 2, 8, generator=g)
    columns = [torch.randperm(4, generator=g)[:2] for _ in range(4)]
    lists = torch.stack(columns).repeat_interleave(16, 0)[:, None].int()
    bounds = {"cu_seqlens_q": ints(0, 64)}
    args = {"q": q, "k": k, "v": k, "key_indices": lists, "select_size": 16} | bounds
    crow, col = ints(0, 2, 4, 6, 8)[None], torch.cat(columns)[None].int()
    layout = {"crow_indices": crow, "col_indices": col, "q_block_size": 16, "k_block_size": 16}
    wanted = golden("blocksparse", {"q": q, "k": k, "v": k} | layout | bounds)
    assert_same(golden("selected_attention", args), wanted)


@pytest.mark.parametrize("name", ["selected/everything/f32", "moba/prefill/f32"])
def test_one_token_at_a_time(name):
    """Attention to the keys themselves, gathered, without a mask."""
    case = dataclasses.replace(
        SELECTED[name], window_size_left=-1, window_size_right=-1, softcap=0.0, sinks=False
    )
    args = build(dataclasses.replace(case, descale="", padding_rows=0)).args
    out, lse = golden("selected_attention", args)
    size, bounds = args["select_size"], args["cu_seqlens_q"].tolist()
    lengths = args["seqused_k"].tolist()
    heads, kv_heads = args["q"].shape[1], args["k"].shape[1]
    for b, length in enumerate(lengths):
        for t in range(bounds[b], bounds[b + 1]):
            position = length - (bounds[b + 1] - t)
            if "q_position" in args:
                position = int(args["q_position"][b]) + t - bounds[b]
            for h in range(heads):
                kv_head = h * kv_heads // heads
                units = args["key_indices"][t, kv_head % args["key_indices"].shape[1]]
                if "num_selected" in args:
                    units = units[: int(args["num_selected"][t, kv_head])]
                keys = [u * size + i for u in units.tolist() if u >= 0 for i in range(size)]
                last = position if args["causal"] else length - 1
                keys = [j for j in keys if j < length and j <= last]
                if not keys:
                    assert (out[t, h] == 0).all() and lse[h, t] == -INF
                    continue
                k, v = (_rows(args, name, b, keys, kv_head) for name in "kv")
                s = k @ args["q"][t, h].double() * args["q"].shape[2] ** -0.5
                assert_same([s.softmax(0) @ v, s.logsumexp(0)], [out[t, h], lse[h, t]])


def _rows(args, name, b, keys, head):
    if "block_table" not in args:
        return args[name][int(args["cu_seqlens_k"][b]) + torch.tensor(keys), head].double()
    page_size = args["k"].shape[2]
    pages = args["block_table"][b].long()[torch.tensor(keys) // page_size]
    return args[name][pages, head, torch.tensor(keys) % page_size].double()


def test_own_block_is_causal():
    k = torch.zeros(8, 1, 4)
    v = torch.eye(8)[:, None]
    lists = torch.arange(8, dtype=torch.int32)[:, None, None] // 4  # the token's own unit of 4
    args = {"q": k, "k": k, "v": v, "key_indices": lists, "cu_seqlens_q": ints(0, 8)}
    out, _ = golden("selected_attention", args | {"select_size": 4})
    seen = ["".join("x" if p > 0 else "." for p in row) for row in out[:, 0].tolist()]
    assert seen[:4] == ["x.......", "xx......", "xxx.....", "xxxx...."]
    assert seen[4:] == ["....x...", "....xx..", "....xxx.", "....xxxx"]


def test_slots_are_what_the_table_leads_to():
    case = SELECTED["flashmla/slots/bf16"]
    paged = build(
        dataclasses.replace(case, selected=dataclasses.replace(case.selected, slots=False))
    )
    slots = build(case)
    assert_same(golden("selected_attention", slots.args), golden("selected_attention", paged.args))


def test_select_keys_by_hand():
    """Scores are the keys' own numbers: 3, 9, 9, 1, 7."""
    k = torch.tensor([3.0, 9.0, 9.0, 1.0, 7.0]).view(5, 1, 1)
    args = {"q": torch.ones(1, 1, 1), "k": k, "weights": None}
    args |= {"cu_seqlens_q": ints(0, 1), "cu_seqlens_k": ints(0, 5)}

    def ids(**options):
        found, count = golden("select_keys", args, **options)
        assert int(count) == int((found >= 0).sum())
        return found.flatten().tolist()

    assert ids(num_units=1) == [1]  # of equal scores the smallest id
    assert ids(num_units=3) == [1, 2, 4]
    assert ids(num_units=7) == [0, 1, 2, 3, 4, -1, -1]
    assert ids(num_units=2, force_first=1) == [0, 1]
    assert ids(num_units=2, force_last=2) == [3, 4]
    assert ids(num_units=1, select_size=2) == [0]  # maxima 9, 9, 7
    assert ids(num_units=1, select_size=2, pool="mean") == [2]  # 6, 5, 7
    assert ids(num_units=1, select_size=2, pool="sum") == [0]  # 12, 10, 7
    assert ids(num_units=2, q_position=ints(1)) == [0, 1]
    assert ids(num_units=2, q_position=ints(-1)) == [-1, -1]
    args["weights"] = torch.tensor([[-1.0]])
    assert ids(num_units=1) == [3]


@pytest.mark.parametrize("pool", ["max", "mean", "sum"])
@pytest.mark.parametrize("score", ["relu", "identity"])
def test_select_keys_of_the_cpu(pool, score):
    """It selects what the formula selects, where scores are whole numbers."""
    import torch_paged_attn

    g = torch.Generator().manual_seed(1)
    q = torch.randint(-3, 4, (40, 4, 8), generator=g).float()
    k = torch.randint(-3, 4, (90, 2, 8), generator=g).float()
    options = {"num_units": 6, "select_size": 4, "pool": pool, "score": score}
    options |= {"force_first": 1, "force_last": 2, "cu_seqlens_q": cumulative([30, 0, 7])}
    options |= {"cu_seqlens_k": cumulative([50, 5, 30])}
    weights = torch.randint(-2, 3, (40, 4), generator=g).float()
    found = torch_paged_attn.select_keys(q, k, weights, **options)
    wanted = reference.select_keys(q, k, weights, **options)
    assert torch.equal(found[0], wanted[0]) and torch.equal(found[1], wanted[1])
    attended = {name: options[name] for name in ("select_size", "cu_seqlens_q", "cu_seqlens_k")}
    out, _ = torch_paged_attn.selected_attention(q, k, k, found[0], **attended)
    assert out.isfinite().all()
