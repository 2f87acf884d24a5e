"""`merge_states` on every backend: parts of attention merge to the whole."""

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.testing import PROBLEMS, Call, Truth, assert_accurate, build

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


def test_merge_nothing(runner):
    out, lse = (torch.full((3, 2, 4), float("nan")), torch.full((2, 3), -INF))
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
