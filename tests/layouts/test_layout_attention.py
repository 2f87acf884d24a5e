"""Layouts with the op: what is listed is what is seen."""

import pytest
import torch

from torch_paged_attn import blocksparse, layouts, reference
from torch_paged_attn.testing.accuracy import Truth, assert_accurate

HEADS, KV_HEADS, DIM, MAX_SEQLEN = 4, 2, 16, 128
LAYOUTS = {
    "local_strided": layouts.local_strided(HEADS, MAX_SEQLEN, 16, 2, 3),
    "local_strided per KV head": layouts.local_strided(KV_HEADS, MAX_SEQLEN, 16, 2, 3),
    "local_strided fine rows": layouts.local_strided(HEADS, MAX_SEQLEN, 32, 1, 2, q_block_size=16),
    "sliding_window": layouts.sliding_window(MAX_SEQLEN, 20, 0, 16, 32),
    "bigbird": layouts.bigbird(HEADS, MAX_SEQLEN, 16, 1, 3, 1, causal=True),
    "nothing": layouts.from_dense_mask(torch.zeros(8, 8, dtype=torch.bool), 16),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_attention_sees_the_listed_blocks(name):
    layout = LAYOUTS[name]
    query_lens, key_lens = [1, 40, 70], [100, 90, 70]
    q, k, v = (
        torch.randn(sum(lens), heads, DIM, generator=torch.Generator().manual_seed(heads))
        for lens, heads in ((query_lens, HEADS), (key_lens, KV_HEADS), (key_lens, KV_HEADS))
    )
    cu_seqlens_q = torch.tensor([0, *query_lens]).cumsum(0).int()
    cu_seqlens_k = torch.tensor([0, *key_lens]).cumsum(0).int()
    out, lse = blocksparse(
        q, k, v, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **layout.arguments()
    )

    mask = layout.dense().repeat_interleave(HEADS // layout.num_heads, dim=0)
    mask = mask.repeat_interleave(layout.q_block_size, dim=1)
    mask = mask.repeat_interleave(layout.k_block_size, dim=2)
    rows = [
        mask[:, key_len - query_len : key_len, :MAX_SEQLEN]
        for query_len, key_len in zip(query_lens, key_lens, strict=True)
    ]
    truth = Truth.of(
        reference.flash_varlen,
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        attn_bias=torch.cat(rows, dim=1),
        causal=True,
    )
    assert_accurate(out, lse, truth)
