"""What `flash_attn_func` and `flash_attn_varlen_func` compute."""

import pytest
import torch
from sequences import DECODE, DIM, DIM_V, HEADS, KV_HEADS, MIXED, Batch

from torch_paged_attn import reference
from torch_paged_attn.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch_paged_attn.testing.accuracy import Truth, assert_accurate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads_first", [False, True])
def test_dense_attention(dtype, heads_first):
    batch = Batch([3, 3], [5, 5], dtype)
    q, k, v = (x.unflatten(0, (2, -1)) for x in (batch.q, batch.k, batch.v))
    if heads_first:
        q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
    out, lse = flash_attn_func(q, k, v, causal=True, softcap=2.0, return_softmax_lse=True)
    truth = batch.truth(causal=True, softcap=2.0)
    assert_accurate(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), truth)


@pytest.mark.parametrize(("seqlen_q", "seqlen_k", "batch"), [(0, 4, 2), (3, 0, 2), (2, 2, 0)])
def test_empty_dense_attention(seqlen_q, seqlen_k, batch):
    q = torch.randn(batch, seqlen_q, HEADS, DIM)
    k = torch.randn(batch, seqlen_k, KV_HEADS, DIM)
    out, lse = flash_attn_func(q, k, k, causal=True, return_softmax_lse=True)
    assert out.shape == q.shape
    assert lse.shape == (batch, HEADS, seqlen_q)
    if seqlen_k == 0:
        assert not out.any()


def test_options_reach_the_op():
    batch = Batch(*MIXED)
    slopes = torch.rand(len(batch.key_lens), HEADS)
    sinks = torch.randn(HEADS).bfloat16()
    options = {"causal": True, "softcap": 3.0, "alibi_slopes": slopes, "softmax_scale": 0.2}
    k, v, table = batch.paged(3)
    out, lse = flash_attn_varlen_func(
        batch.q, k, v, batch.cu_q, batch.cu_k, block_table=table, s_aux=sinks,
        return_softmax_lse=True, deterministic=True, num_splits=2, **options,
    )  # fmt: skip
    assert_accurate(out, lse, batch.truth(sinks=sinks.float(), **options))


def test_freed_storages_that_torchs_own_operators_would_touch_are_refused():
    """A result given, sinks that are converted, queries that are copied."""
    batch = Batch([3, 3], [5, 5], dim_v=DIM)
    for tensor in (out := torch.empty(6, HEADS, DIM), sinks := torch.zeros(HEADS).bfloat16()):
        tensor.untyped_storage().resize_(0)
    columns = batch.q.transpose(1, 2).contiguous().transpose(1, 2)
    columns.untyped_storage().resize_(0)
    for name, changed in {"out": out, "s_aux": sinks, "q": columns}.items():
        ragged = {"q": batch.q, "k": batch.k, "v": batch.v} | {name: changed}
        with pytest.raises(ValueError, match=rf"^flash_attn_varlen_func.* {name} to be backed"):
            flash_attn_varlen_func(**ragged, cu_seqlens_q=batch.cu_q, cu_seqlens_k=batch.cu_k)
        dense = {n: x if n == "s_aux" else x.unflatten(0, (2, -1)) for n, x in ragged.items()}
        with pytest.raises(ValueError, match=rf"^flash_attn_func.* {name} to be backed"):
            flash_attn_func(**dense)


def test_dropout_follows_the_default_generator():
    batch = Batch([8, 8], [8, 8])
    arguments = (batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, 8, 8, 0.5)

    def seeded(seed):
        torch.manual_seed(seed)
        return flash_attn_varlen_func(*arguments)

    assert torch.equal(seeded(1), seeded(1))
    assert not torch.equal(seeded(1), seeded(2))
    torch.manual_seed(1)
    rng_state = torch.randint(2**62, (2,))
    truth = batch.truth(dropout_p=0.5, rng_state=rng_state)
    assert_accurate(seeded(1), truth.softmax_lse.float(), truth)


def test_float8_queries_answer_in_bfloat16():
    batch = Batch([3], [3])
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (batch.q, batch.k, batch.v))
    assert flash_attn_varlen_func(q, k, v, batch.cu_q, batch.cu_k).dtype == torch.bfloat16
    out, args = torch.empty(3, HEADS, DIM_V), (q, k, v, batch.cu_q, batch.cu_k)
    _, lse = flash_attn_varlen_func(*args, out=out, return_softmax_lse=True)
    truth = Truth.of(reference.flash_varlen, *args, out_dtype=torch.float32)
    assert_accurate(out, lse, truth)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_one_graph_without_breaks(compiler):
    batch = Batch(*DECODE)
    written = [length - 1 for length in batch.key_lens]
    k_cache, v_cache, table = batch.paged(4, written)
    k, v = (x[:, None] for x in batch.new(written))
    seqlens = torch.tensor(written, dtype=torch.int32)
    decode = torch.compile(flash_attn_with_kvcache, backend=compiler, fullgraph=True)
    out, lse = decode(
        batch.q[:, None], k_cache, v_cache, k, v, cache_seqlens=seqlens, block_table=table,
        causal=True, return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out[:, 0], lse[:, :, 0].T, batch.truth(causal=True))
    assert int((~k_cache.isnan()).sum()) == batch.k.numel()
    prefill = torch.compile(flash_attn_varlen_func, backend=compiler, fullgraph=True)
    out, lse = prefill(
        batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, torch.tensor(1), torch.tensor(12),
        causal=True, window_size=(4, 4), return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out, lse, batch.truth(causal=True, window_size_left=4))
