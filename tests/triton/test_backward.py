"""What is the Triton backward's own: statistics, transposed lists, what is launched, tiles."""

import itertools

import pytest
import torch

from torch_paged_attn.attention_call import AttentionCall, BlockLayout
from torch_paged_attn.testing import Layout, Problem, assert_accurate_gradients, build
from torch_paged_attn.testing.inputs import cumulative

LOG2E = 1.4426950408889634


def backward_call(problem, device, **changes):
    """A call of the backward with the reference's results and gradients drawn at random."""
    from torch_paged_attn import reference
    from torch_paged_attn.backward_call import BackwardCall

    call = build(problem)
    out, lse = getattr(reference, call.op)(**call.args)
    forward = getattr(AttentionCall, call.op)(**call.to(device).args)
    g = torch.Generator().manual_seed(1)
    given = {"dout": torch.randn(out.shape, generator=g).to(out.dtype)}
    given |= {"dlse": torch.randn(lse.shape, generator=g), "out": out, "softmax_lse": lse} | changes
    given = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
    return BackwardCall(forward, **given)


def statistics_of(plan, call, **options):
    forward = call.forward
    tensors = call.dout, call.dlse, call.out, call.softmax_lse, forward.sinks
    return plan(*tensors, forward.cu_seqlens_q, **options)


def test_statistics(kernels, device):
    """Every row is in its place, and everything is written."""
    from torch_paged_attn.backends.triton.common.backward_preprocess import plan_statistics

    seqs = ((70, 0), (0, 9), (5, -3), (64, 0), (1, 0))
    # whole numbers: their sums are the same in any order
    shape, g = (143, 2, 32), torch.Generator().manual_seed(2)
    whole = {name: torch.randint(-8, 9, shape, generator=g).float() for name in ("dout", "out")}
    whole["dlse"] = torch.randint(-8, 9, (2, 143), generator=g).float()
    problem = Problem("statistics", seqs, 2, 1, 32, padding_rows=3, sinks=True)
    call = backward_call(problem, device, **whole)
    call.forward.sinks[0] = float("-inf")
    forward = call.forward
    statistics, parts, _ = statistics_of(plan_statistics(call), call)
    bounds = forward.cu_seqlens_q.tolist()
    assert statistics.shape == (2, forward.total_q // 64 + len(seqs) + 1, 2, 64)
    want = torch.zeros_like(statistics)
    want[:, :, 0] = float("inf")
    delta = (call.dout * call.out).sum(-1).mT - call.dlse
    for b, (query_len, _) in enumerate(seqs):
        for t in range(query_len):
            row, tile = bounds[b] + t, bounds[b] // 64 + b + t // 64
            want[:, tile, 0, t % 64] = call.softmax_lse[:, row] * LOG2E
            want[:, tile, 1, t % 64] = delta[:, row]
    assert torch.equal(statistics, want)
    # the sink of a head that has none takes no part
    assert parts.sum(1)[0] == 0 and parts.sum(1)[1] != 0


@pytest.mark.parametrize("most_in_grid", [4096, 1])
def test_transposed_lists(most_in_grid, device, monkeypatch):
    """The rows of each column, ascending; a wild entry is no column's. Of a program's several lists
    in a row of the grid, too."""
    from torch_paged_attn.backends.triton.common import transposed_lists
    from torch_paged_attn.backends.triton.common.backward_preprocess import plan_statistics

    monkeypatch.setattr(transposed_lists, "MOST_IN_GRID", most_in_grid)
    problem = Problem("lists", ((150, 0), (40, 210)), layout=Layout(16, 32, "kv", True, 0.4))
    call = backward_call(problem, device)
    crow, col = call.forward.layout.crow_indices, call.forward.layout.col_indices
    wild = col.clone()
    wild[0, 0, 0] = -7
    alone, _, _ = statistics_of(plan_statistics(call), call)
    for entries in (col, wild):
        layout = BlockLayout(crow, entries, 16, 32)
        columns = -(-250 // 32)
        lists = transposed_lists.TransposedLists(layout, 250)
        made = lists.new(crow, entries)
        statistics, _, _ = statistics_of(plan_statistics(call, lists=lists), call, layout=made)
        assert torch.equal(statistics, alone)
        for b in range(2):
            for h in range(2):
                of_column = [[] for _ in range(columns)]
                bounds = crow[b, h].tolist()
                for row, (first, stop) in enumerate(itertools.pairwise(bounds)):
                    for c in entries[b, h, first:stop].tolist():
                        if 0 <= c < columns:
                            of_column[c].append(row)
                at = 2 * b + h
                for c, want in enumerate(of_column):
                    start, count = int(made.starts[at, c]), int(made.counts[at, c])
                    assert made.rows[at, start : start + count].tolist() == want


@pytest.mark.parametrize(
    "mask, launched",
    [
        ((True, False, False, False, False), {"dq"}),
        ((False, False, True, False, False), {"dkdv"}),
        ((False, False, False, True, False), {"dbias"}),
        ((False, False, False, False, True), set()),
    ],
)
def test_launches_what_is_asked_for(mask, launched, device, monkeypatch):
    from torch_paged_attn.backends.triton.portable.backward import plan as backward

    made = set()
    for kind in ("dkdv", "dq", "dbias"):

        def plan(self, *args, kind=kind, **options):
            made.add(kind)
            return lambda pointers: None

        monkeypatch.setattr(backward._Kernels, kind, plan)
    problem = Problem("asked", ((9, 0),), 2, 1, 16, bias="float", sinks=True)
    results = backward.differentiate(backward_call(problem, device, output_mask=mask))
    assert made == launched
    assert [x.numel() > 0 for x in results] == list(mask)


def test_expanded_dout(kernels, device):
    """`out.sum().backward()` gives one number with strides of 0: what its copy gives."""
    from torch_paged_attn.backends.triton.portable.backward.plan import differentiate

    problem = Problem("expanded", ((20, 0), (9, 4)), 2, 1, 16)
    one = torch.ones(()).expand(29, 2, 16)
    found = [
        differentiate(backward_call(problem, device, dout=dout))
        for dout in (one, one.contiguous(), torch.ones(16, 2, 29).permute(2, 1, 0))
    ]
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(found[0], other, strict=True))


@pytest.mark.parametrize("layout", [None, Layout(32, 64, "all", density=0.6)])
def test_tiles_agree(layout, device):
    """Tiles that no table of this machine's would choose, wider and narrower than statistics."""
    from torch_paged_attn.backends.triton.portable.backward.plan import differentiate
    from torch_paged_attn.backends.triton.tuning import BackwardConfig, Config

    seqs = (130, 0), (9, 40)
    problem = Problem("tiles", seqs, 1, 1, 16, window_size_left=70, layout=layout, padding_rows=2)
    call = backward_call(problem, device)
    truth = build(problem).gradients(call.dout.cpu(), call.dlse.cpu())
    for tile in (Config(128, 32, 4, 1), Config(32, 128, 4, 1)):
        found = differentiate(call, config=BackwardConfig(tile, tile, tile))
        assert_accurate_gradients([x.cpu() for x in found], truth)


def test_rows_of_no_sequence(device):
    """Keys before and after all sequences, and past the end of one, get 0 whatever they hold."""
    from torch_paged_attn.backends.triton.portable.backward.plan import differentiate

    call = backward_call(Problem("rows", ((9, 0), (0, 5), (7, 3)), 2, 1, 16), device)
    forward = call.forward
    bounds = forward.cu_seqlens_k.tolist()
    for name in ("k", "v"):
        x = getattr(forward, name)
        more = torch.full((4, *x.shape[1:]), float("nan"), dtype=x.dtype, device=x.device)
        setattr(forward, name, torch.cat([x, more]))
    dq, dk, dv, *_ = differentiate(call)
    used = torch.zeros(dk.shape[0], dtype=torch.bool)
    for start, length in zip(bounds, forward.seqused_k.tolist(), strict=False):
        used[start : start + length] = True
    used[bounds[1] : bounds[2]] = False  # not asked for
    assert cumulative([9, 0, 7]).tolist() == forward.cu_seqlens_q.tolist()
    for x in (dk, dv):
        assert torch.isfinite(x).all() and (x[~used.to(x.device)] == 0).all()
        assert (x[used.to(x.device)].abs().amax((1, 2)) > 0).all()
    assert torch.isfinite(dq).all()


def test_a_window_between_the_keys_of_a_rank(device):
    """A query that sees no key, in a tile with one that does: its NaN in dout reaches nothing."""
    from torch_paged_attn.backends.triton.portable.backward.plan import differentiate

    options = {"window_size_left": 1, "key_ranks": 2, "key_interleave": 16}
    problem = Problem("between", ((2, 16),), 1, 1, 16, **options)
    call = backward_call(problem, device)
    assert call.softmax_lse[0].isinf().tolist() == [False, True]
    call.dout[1] = float("nan")
    truth = build(problem).gradients(call.dout.cpu(), call.dlse.cpu())
    assert_accurate_gradients([x.cpu() for x in differentiate(call)], truth)


@pytest.mark.parametrize("arch", ["sm86", "sm120"])
def test_wide_float32_heads_have_no_room_in_a_small_shared_memory(arch):
    """139 KiB of 99 (`cross_compile.py`): refused at the forward and at the backward."""
    from torch_paged_attn.backends.triton import BACKEND
    from torch_paged_attn.backends.triton import flash_varlen_backward as op
    from torch_paged_attn.backends.triton.runtime.target import Target, assume

    def call_of(dtype, head_dim=576):
        problem = Problem("wide", ((3, 0),), 2, 1, head_dim, 512, dtype=dtype)
        return backward_call(problem, "cpu")

    wide = call_of(torch.float32)
    with assume(Target.of_arch(arch, 84)):
        assert "shared memory" in BACKEND.unsupported_backward(wide.forward)
        assert BACKEND.unsupported_backward(call_of(torch.bfloat16).forward) is None
        given = wide.tensors() | {"cu_seqlens_k": None, "seqused_k": None}
        with pytest.raises(NotImplementedError, match=r"flash_varlen_backward\(\): .*float32"):
            op.flash_varlen_backward._plan(*given.values())
    with assume(Target.of_arch("sm90", 132)):
        assert BACKEND.unsupported_backward(wide.forward) is None
