"""`merge_states` on every backend: parts of attention merge to the whole."""

import pytest
import torch

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.testing import PROBLEMS, Truth, assert_accurate, build

INF = float("inf")


def states(dtype, seed=0, total_q=37, heads=5, dim=33):
    g = torch.Generator().manual_seed(seed)
    out = torch.randn(2, total_q, heads, dim, generator=g).to(dtype)
    lse = torch.randn(2, heads, total_q, generator=g) * 5
    lse[0, :, ::5] = -INF
    lse[1, :, ::3] = -INF
    out[0, ::5] = float("nan")  # a part that saw no key has no weight, whatever it holds
    return out[0], lse[0], out[1], lse[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_agrees_with_the_reference(dtype, device):
    args = states(dtype)
    out, lse = torch_paged_attn.merge_states(*(t.to(device) for t in args))
    assert_accurate(out, lse, Truth.of(reference.merge_states, *args))


def test_nothing_merges_to_nothing(device):
    out, lse = (torch.full((3, 2, 4), float("nan")), torch.full((2, 3), -INF))
    merged, merged_lse = torch_paged_attn.merge_states(
        *(t.to(device) for t in (out, lse, out, lse))
    )
    assert (merged == 0).all() and (merged_lse == -INF).all()


def test_any_strides(device):
    out_a, lse_a, out_b, lse_b = (t.to(device) for t in states(torch.float32))
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (out_a, lse_a, out_b, lse_b)]
    for got, want in zip(
        torch_paged_attn.merge_states(*strided),
        torch_paged_attn.merge_states(out_a, lse_a, out_b, lse_b),
        strict=True,
    ):
        assert torch.equal(got, want)


def test_prefix_and_rest_merge_to_the_whole(device):
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
    first = call.to(device).run(seqused_k=prefix.to(device), causal=False)
    second = type(call)(call.op, rest).to(device).run()
    merged = torch_paged_attn.merge_states(first[0], first[1], second[0], second[1])
    assert_accurate(*merged, truth)
