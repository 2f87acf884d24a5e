"""`merge_states` on every backend: parts of attention merge to the whole."""

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.testing import (
    PROBLEMS,
    Call,
    MergeGradients,
    Truth,
    assert_accurate,
    assert_accurate_merge_gradients,
    build,
)

INF = float("inf")
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def states(dtype, seed=0, total_q=37, heads=5, dim=33):
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(2, total_q, heads, dim, generator=g).to(dtype)
    lse = torch.randn(2, heads, total_q, generator=g) * 5
    lse[0, :, ::5] = -INF
    lse[1, :, ::3] = -INF
    out[0, ::5] = float("nan")  # a part that saw no key has no weight, whatever it holds
    return out[0], lse[0], out[1], lse[1]


@pytest.mark.over(DTYPES)
def test_merge_agrees(case, runner):
    args = states(case)
    assert_accurate(*runner.merge(*args), Truth.of(reference.merge_states, *args))


PARTS = {"one": 1, "three": 3, "nine": 9, "forty": 40}


def many_states(number, dtype):
    """Lists of parts, every third of which saw no key in a fifth of the rows."""
    found = [states(dtype, seed) for seed in range(-(-number // 2))]
    outs = [x for out_a, _, out_b, _ in found for x in (out_a, out_b)]
    lses = [x for _, lse_a, _, lse_b in found for x in (lse_a, lse_b)]
    return outs[:number], lses[:number]


@pytest.mark.over(PARTS)
def test_merge_of_many_agrees(case, runner):
    """In the order given, and rounded once: parts in float32 lose nothing that the result has."""
    for dtype, out_dtype in ((torch.float32, torch.bfloat16), (torch.float16, None)):
        outs, lses = many_states(case, dtype)
        out, lse = runner.merge(outs, lses, out_dtype=out_dtype)
        assert out.dtype == (out_dtype or dtype) and out.is_contiguous() and lse.is_contiguous()
        wanted = Truth.of(reference.merge_states, outs, lses, out_dtype=out_dtype)
        assert_accurate(out, lse, wanted)


FAR = {"large": 1e30, "small": -1e30, "bias": torch.finfo(torch.float32).min}


@pytest.mark.over(FAR)
def test_merge_of_far_logits(case, runner):
    """The mean of parts of one weight, though softmax_lse lost the logarithm of their number."""
    outs, lse = [torch.full((3, 2, 4), x) for x in (0.0, 1.0)], torch.full((2, 3), case)
    args = outs[0], lse, outs[1], lse
    assert_accurate(*runner.merge(*args), Truth.of(reference.merge_states, *args))


def test_merge_of_what_is_no_number(runner):
    """Is NaN, and no sum of some of the parts."""
    out = torch.ones(3, 2, 4)
    merged, _ = runner.merge(out, torch.full((2, 3), float("nan")), out, torch.full((2, 3), 0.5))
    assert merged.isnan().all()


# the lse of a row that saw no key, here and in FlashAttention-2
NOTHING = {"-inf": -INF, "inf": INF}


@pytest.mark.over(NOTHING)
def test_merge_with_rows_that_saw_nothing(case, runner):
    """They have no weight, whatever their `out` holds, and no gradient."""
    out_a, lse_a, out_b, lse_b = states(torch.float32)
    lse_b[:] = case
    parts = out_a, lse_a, torch.full_like(out_b, float("nan")), lse_b
    seen = (lse_a > -INF).mT[..., None]
    for found in (runner.merge(*parts), runner.merge(parts[::2], parts[1::2])):
        assert torch.equal(found[0], out_a.where(seen, 0.0))
        assert torch.equal(found[1], lse_a)
    dout, dlse = torch.ones_like(out_a), torch.ones_like(lse_a)
    found = runner.merge_gradients(dout, dlse, *parts, out_a.where(seen, 0.0), lse_a)
    assert torch.equal(found[0], dout.where(seen, 0.0))
    assert (found[2] == 0).all() and (found[3] == 0).all()


@pytest.mark.over(DTYPES)
def test_merge_gradients_agree(case, runner):
    """What a loss hands back for a row that no part sees may be NaN."""
    parts = states(case)
    g = torch.Generator().manual_seed(1)
    out, lse = reference.merge_states(*parts)
    dout, dlse = torch.randn(out.shape, generator=g), torch.randn(lse.shape, generator=g)
    unseen = lse == -INF
    dout = dout.masked_fill(unseen.mT[..., None], float("nan")).to(out.dtype)
    dlse = dlse.masked_fill(unseen, float("nan"))
    found = runner.merge_gradients(dout, dlse, *parts, out, lse)
    assert all(x.is_contiguous() for x in found)
    truth = MergeGradients.by_reference(parts, dout, dlse, out, lse)
    assert_accurate_merge_gradients(found, truth)


@pytest.mark.over(NOTHING)
def test_merge_gradients_nothing(case, runner):
    """Parts that saw no key have none, nor have rows that no part saw."""
    nan = float("nan")
    out, lse = torch.full((3, 2, 4), nan), torch.full((2, 3), case)
    dout, dlse = torch.full((3, 2, 4), nan), torch.full((2, 3), nan)
    merged = torch.zeros(3, 2, 4), torch.full((2, 3), -INF)
    found = runner.merge_gradients(dout, dlse, out, lse, out, lse, *merged)
    assert all((x == 0).all() for x in found)


@pytest.mark.over(NOTHING)
def test_merge_nothing(case, runner):
    out, lse = (torch.full((3, 2, 4), float("nan")), torch.full((2, 3), case))
    merged, merged_lse = runner.merge(out, lse, out, lse)
    assert (merged == 0).all() and (merged_lse == -INF).all()


def test_merge_strides(runner):
    args = states(torch.float32)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in args]
    for got, want in zip(runner.merge(*strided), runner.merge(*args), strict=True):
        assert torch.equal(got, want)


def test_merge_prefix(runner):
    """Attention over a prefix and attention over the rest merge to the whole."""
    call = build(PROBLEMS["torch_varlen/packed_seqused/f32"])
    truth = call.truth()
    args, key_lens = call.args, call.args["seqused_k"]
    # the prefix is context only, so it needs no causal mask; the rest keeps the alignment
    prefix = (key_lens - args["cu_seqlens_q"].diff()).to(torch.int32)
    starts = args["cu_seqlens_k"][:-1]
    rest = {**args, "seqused_k": None}
    keep = torch.cat(
        [torch.arange(s + p, s + n) for s, p, n in zip(starts, prefix, key_lens, strict=True)]
    )
    rest |= {"k": args["k"][keep], "v": args["v"][keep], "cu_seqlens_k": args["cu_seqlens_q"]}
    first = runner.attend(call, seqused_k=prefix.to(runner.device), causal=False)
    second = runner.attend(Call(call.op, rest))
    assert_accurate(*runner.merge(*first, *second), truth)
