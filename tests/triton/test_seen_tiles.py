"""The map of a bool mask: which tiles show something, and that loops leave out the others."""

import dataclasses
import itertools

import pytest
import torch

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.portable.backward import plan as backward
from torch_paged_attn.backends.triton.portable.common import seen_tiles
from torch_paged_attn.backends.triton.portable.forward import plan as forward
from torch_paged_attn.backends.triton.portable.forward.splits import SplitPlan
from torch_paged_attn.backends.triton.tuning import BackwardConfig, Config
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.testing import Problem, assert_accurate, assert_accurate_gradients, build

# the last one has more queries than keys; padding rows follow
LENGTHS = (110, 0), (40, 30), (1, 0), (20, -9)
PROBLEM = Problem("mask", LENGTHS, 3, 1, 16, bias="bool", padding_rows=5)
ALL_HEADS = dataclasses.replace(PROBLEM, bias_heads="all")
PADDED = 8  # columns beyond the longest sequence


def pairs(problem):
    """For each row of queries its position, the last key's being that of the last query; and
    columns."""
    rows = [torch.arange(n) + past for n, past in problem.seqs]
    rows += [torch.zeros(problem.padding_rows)]
    width = max(n + past for n, past in problem.seqs) + PADDED
    return torch.cat(rows)[:, None].long(), torch.arange(width)[None, :]


def causal(row, key):
    return key <= row


def drawn(row, key):
    g = torch.Generator().manual_seed(3)
    return causal(row, key) & (torch.rand(row.shape[0], key.shape[1], generator=g) < 0.1)


def nothing_in_places(row, key):
    """Rows that see nothing, and whole tiles of rows and keys that are hidden."""
    return drawn(row, key) & (row % 7 > 0) & ((row < 32) | (row >= 64)) & (key % 96 < 64)


MASKS = {
    "all": lambda row, key: key >= 0,
    "none": lambda row, key: (key < 0) | (row < 0),
    "causal": causal,
    "prefix": lambda row, key: (key < 40) | causal(row, key),
    "drawn": drawn,
    "banded": lambda row, key: (row - key).abs() < 20,
    "first_hidden": lambda row, key: causal(row, key) & (key >= 70),
    "nothing_in_places": nothing_in_places,
    "one": lambda row, key: (row == 80) & (key == 77),
}


def masked(problem, name):
    """The problem's call under a mask; each head has it shifted by as many keys."""
    call = build(problem)
    row, key = pairs(problem)
    heads = problem.num_heads if problem.bias_heads == "all" else 1
    mask = torch.stack([MASKS[name](row, key + 16 * h).expand(row.shape[0], key.shape[1])
                        for h in range(heads)])  # fmt: skip
    call.args["attn_bias"] = mask.contiguous()
    return call


@pytest.fixture
def mapped(monkeypatch):
    """Sets whether masks have maps, whatever their size."""

    def set_to(is_mapped):
        most = 0 if is_mapped else 1 << 40
        monkeypatch.setattr(seen_tiles, "FEWEST_QUERIES", most)
        monkeypatch.setattr(seen_tiles, "FEWEST_KEYS", most)

    return set_to


CONFIGS = Config(64, 32, 4, 1), Config(16, 128, 4, 1)


def results(call, config, device):
    """out, softmax_lse and gradients, by programs that have a tile each; and what came in."""
    of = AttentionCall.flash_varlen(**call.to(device).args)
    out, lse = forward.attend(of, config=config, splits=SplitPlan())
    g = torch.Generator().manual_seed(1)
    dout = torch.randn(out.shape, generator=g).to(out)
    dlse = torch.randn(lse.shape, generator=g).to(lse)
    given = BackwardCall(of, dout, dlse, out, lse)
    found = backward.differentiate(given, config=BackwardConfig(config, config, config))
    return [out, lse], list(found), (dout.cpu(), dlse.cpu())


@pytest.mark.parametrize(
    "problem, config, name",
    [
        *((PROBLEM, CONFIGS[0], name) for name in MASKS),
        *((ALL_HEADS, CONFIGS[1], name) for name in ("first_hidden", "nothing_in_places")),
    ],
    ids=lambda x: x if isinstance(x, str) else getattr(x, "bias_heads", None) or f"{x.BLOCK_M}",
)
def test_bits_stay_the_same(problem, config, name, mapped, kernels, device):
    call = masked(problem, name)
    mapped(False)
    whole = results(call, config, device)
    mapped(True)
    out, gradients, given = results(call, config, device)
    for x, y in zip([*out, *gradients], [*whole[0], *whole[1]], strict=True):
        assert torch.equal(x, y)
    assert_accurate(*(x.cpu() for x in out), call.truth())
    assert_accurate_gradients([x.cpu() for x in gradients], call.gradients(*given))


@pytest.mark.parametrize(
    "splits", [SplitPlan(7), SplitPlan(90, fixed_keys=64)], ids=["even", "fixed"]
)
@pytest.mark.parametrize("name", ["causal", "first_hidden", "nothing_in_places"])
def test_programs_that_share_tiles(name, splits, mapped, kernels, device):
    """A part of a tile's keys may be hidden as a whole: it writes no values."""
    call, found = masked(ALL_HEADS, name), []
    for is_mapped in (False, True):
        mapped(is_mapped)
        of = AttentionCall.flash_varlen(**call.to(device).args)
        found.append(forward.attend(of, config=CONFIGS[0], splits=splits))
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))
    assert_accurate(*(x.cpu() for x in found[1]), call.truth())


@pytest.mark.parametrize(
    "options",
    [
        dict(sinks=True),
        dict(dropout_p=0.2),
        dict(window_size_left=30, causal=False),
        dict(alibi="heads", softcap=5.0),
        dict(key_ranks=2, key_interleave=16),
        dict(k_ranges="shared"),
    ],
    ids=lambda x: next(iter(x)),
)
@pytest.mark.parametrize("name", ["nothing_in_places"])
def test_beside_other_options(name, options, mapped, kernels, device):
    problem = dataclasses.replace(ALL_HEADS, **options)
    found = []
    for is_mapped in (False, True):
        mapped(is_mapped)
        out, gradients, _ = results(masked(problem, name), CONFIGS[0], device)
        found.append([*out, *gradients])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


@pytest.mark.parametrize("name", MASKS)
def test_map(name, mapped, kernels, device):
    """Every entry is written: rows are those of tiles of one sequence each."""
    call = masked(ALL_HEADS, name).to(device)
    of = AttentionCall.flash_varlen(**call.args)
    mask, bounds = of.attn_bias, of.cu_seqlens_q
    made = seen_tiles.plan_map(of)(mask, bounds).cpu()
    width = mask.shape[2]
    want = torch.zeros(3, of.total_q // 32 + len(LENGTHS) + 1, -(-width // 32), dtype=torch.uint8)
    padded = torch.nn.functional.pad(mask.cpu(), (0, -width % 32))
    for b, (start, stop) in enumerate(itertools.pairwise(bounds.tolist())):
        for i, first in enumerate(range(start, stop, 32)):
            rows = padded[:, first : min(first + 32, stop)]
            want[:, start // 32 + b + i] = rows.unflatten(2, (-1, 32)).any(3).any(1)
    assert torch.equal(made, want)


def test_a_mask_of_shared_heads_has_one_map(kernels, device):
    """Expanded, and with keys in the other order of strides."""
    call = masked(PROBLEM, "drawn").to(device)
    mask = call.args["attn_bias"]
    apart = mask.mT.contiguous().mT
    assert apart.stride() != mask.stride()
    maps = []
    for given in (mask, mask.expand(3, -1, -1), apart):
        of = AttentionCall.flash_varlen(**call.args | {"attn_bias": given})
        maps.append(seen_tiles.plan_map(of)(given, of.cu_seqlens_q))
    assert all(torch.equal(x, maps[0]) for x in maps)


def spanned(listed, tile):
    """From the first True of each row to the last, in whole tiles."""
    found = torch.zeros_like(listed)
    for row, out in zip(listed, found, strict=True):
        if row.any():
            at = row.nonzero().flatten()
            out[at[0] // tile * tile : (at[-1] // tile + 1) * tile] = True
    return found


@pytest.mark.parametrize("config", CONFIGS, ids=lambda x: f"{x.BLOCK_M}x{x.BLOCK_N}")
def test_loops_visit_what_the_map_says(config, mapped, kernels, device, monkeypatch):
    """Under a mask that shows everything, a map with tiles at random hides the others: of a tile of
    queries the keys before the first one and after the last one, and of a tile of keys the queries.
    """
    length = 256
    problem = Problem("map", ((length, 0),), 2, 2, 16, bias="bool", causal=False)
    call = build(problem)
    call.args["attn_bias"] = torch.ones(1, length, length, dtype=torch.bool)
    drawn = torch.rand(length // 32, length // 32, generator=torch.Generator().manual_seed(5)) < 0.3
    drawn[0] = False
    made = torch.zeros(1, length // 32 + 2, length // 32, dtype=torch.uint8, device=device)
    made[0, : length // 32] = drawn
    mapped(True)
    for module in (forward, backward):
        monkeypatch.setattr(module, "plan_map", lambda of: lambda mask, bounds: made)
    out, gradients, given = results(call, config, device)
    m, n = max(config.BLOCK_M, 32), max(config.BLOCK_N, 32)
    pairs = drawn.repeat_interleave(32, 0).repeat_interleave(32, 1)
    of_queries = pairs.unflatten(0, (-1, m)).any(1)
    seen = spanned(of_queries, config.BLOCK_N).repeat_interleave(m, 0)
    of_keys = pairs.unflatten(1, (-1, n)).any(2)
    queries = spanned(of_keys.T, config.BLOCK_M).T.repeat_interleave(n, 1)
    assert 0 < seen.sum() < length**2 and 0 < queries.sum() < length**2
    # the same bits as under a mask that hides these pairs, where every tile is visited
    mapped(False)
    under = []
    for mask in (seen, queries):
        args = call.to(device).args | {"attn_bias": mask[None].to(device)}
        under.append(AttentionCall.flash_varlen(**args))
    results_of_seen = forward.attend(under[0], config=config, splits=SplitPlan())
    assert all(torch.equal(x, y) for x, y in zip(out, results_of_seen, strict=True))
    given, tiles = [x.to(device) for x in given], BackwardConfig(config, config, config)
    dq, dkdv = (
        backward.differentiate(BackwardCall(of, *given, *out), config=tiles) for of in under
    )
    wanted = dq[0], *dkdv[1:3]
    assert all(torch.equal(x, y) for x, y in zip(gradients[:3], wanted, strict=True))


@pytest.mark.parametrize(
    "batch, length, width, dtype, expected",
    [
        (2, 2048, 2048, torch.bool, True),
        (2, 2048, 2048, torch.float32, False),
        (64, 32, 2048, torch.bool, False),
        (2, 2048, 64, torch.bool, False),
    ],
)
def test_few_queries_or_keys_have_no_map(batch, length, width, dtype, expected):
    q = torch.empty(batch * length, 1, 16)
    bounds = torch.arange(0, batch * length + 1, length, dtype=torch.int32)
    mask = torch.zeros(1, batch * length, width, dtype=dtype)
    call = AttentionCall.flash_varlen(q, q, q, bounds, None, attn_bias=mask)
    assert seen_tiles.has_map(call) == expected
