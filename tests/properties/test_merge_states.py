"""Any number of parts of any sizes merge to the whole, by the accuracy rule."""

import torch
from hypothesis import given
from hypothesis import strategies as st

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.testing import Truth, assert_accurate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@given(
    parts=st.integers(1, 9),
    tokens=st.integers(0, 20),
    heads=st.integers(1, 5),
    dim=st.integers(1, 80),
    dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from((None, *DTYPES)),
    unseen=st.sampled_from((0.0, 0.3, 0.9)),
    spread=st.sampled_from((0.0, 5.0, 100.0)),
    seed=st.integers(0, 2**20),
)
def test_parts_merge(parts, tokens, heads, dim, dtype, out_dtype, unseen, spread, seed):
    g = torch.Generator().manual_seed(seed)
    outs = list(torch.randn(parts, tokens, heads, dim, generator=g).to(dtype).unbind())
    lse = torch.randn(parts, heads, tokens, generator=g) * spread
    lse[torch.rand(lse.shape, generator=g) < unseen] = float("-inf")
    for out, own in zip(outs, lse, strict=True):
        out[own.mT == float("-inf")] = float("nan")  # what saw no key may hold anything
    lses = list(lse.unbind())
    found = torch_paged_attn.merge_states(outs, lses, out_dtype=out_dtype)
    assert_accurate(*found, Truth.of(reference.merge_states, outs, lses, out_dtype=out_dtype))
