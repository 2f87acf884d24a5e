"""The flash-attn functions keep every promise that the engines which call them rely on.

float32 is float32: assert_accurate holds every test to it.
"""

import inspect

import pytest
import torch
from sequences import DECODE, DIM, DIM_V, HEADS, KV_HEADS, MIXED, NAN, Batch, cumulative

from torch_paged_attn.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch_paged_attn.testing.accuracy import assert_accurate

# 1. names, order, and which lengths say what


def test_signatures_begin_as_flash_attn_2_8():
    expected = {
        flash_attn_func: "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes "
        "deterministic return_attn_probs",
        flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
        "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
        "return_attn_probs block_table",
        flash_attn_with_kvcache: "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens "
        "cache_batch_idx cache_leftpad block_table softmax_scale causal window_size softcap "
        "rotary_interleaved alibi_slopes num_splits return_softmax_lse",
    }
    for function, names in expected.items():
        parameters = inspect.signature(function).parameters.values()
        positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert positional == names.split()
        assert all(p.kind is not p.VAR_KEYWORD for p in parameters)


def test_transformers_finds_the_parameters_it_looks_for():
    names = inspect.signature(flash_attn_varlen_func).parameters
    wanted = "dropout_p window_size deterministic softcap s_aux block_table max_seqlen_q"
    assert set(wanted.split()) <= set(names)
    names = inspect.signature(flash_attn_with_kvcache).parameters
    assert {"window_size", "softcap", "s_aux", "block_table", "cache_seqlens"} <= set(names)


@pytest.mark.parametrize("lengths", ["cu_seqlens_k", "seqused_k", "both"])
def test_either_length_serves_a_block_table(lengths):
    batch = Batch(*MIXED)
    k, v, table = batch.paged(3)
    given = {}
    if lengths != "seqused_k":
        given["cu_seqlens_k"] = batch.cu_k
    if lengths != "cu_seqlens_k":
        given["seqused_k"] = batch.seqused_k
    out, lse = flash_attn_varlen_func(
        batch.q, k, v, batch.cu_q, block_table=table, causal=True, return_softmax_lse=True, **given
    )
    assert_accurate(out, lse, batch.truth(causal=True))


def test_seqused_k_without_a_block_table_cuts_lengths_short():
    batch = Batch([2, 3], [6, 9])
    used = torch.tensor([4, 7], dtype=torch.int32)
    out, lse = flash_attn_varlen_func(
        batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, 3, 9, 0.0, None, True,
        seqused_k=used, return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out, lse, batch.truth(causal=True, seqused_k=used))


def test_the_call_of_nano_vllm():
    batch = Batch(*MIXED)
    k, v, table = batch.paged(256)
    out = flash_attn_varlen_func(
        batch.q, k, v, max_seqlen_q=5, cu_seqlens_q=batch.cu_q, max_seqlen_k=11,
        cu_seqlens_k=batch.cu_k, softmax_scale=0.3, causal=True, block_table=table,
    )  # fmt: skip
    truth = batch.truth(causal=True, softmax_scale=0.3)
    assert_accurate(out, truth.softmax_lse.float(), truth)


# 2. hints


@pytest.mark.parametrize("hint", [None, 1, 64, torch.tensor(5), torch.tensor(5, device="meta")])
def test_max_seqlens_are_hints_and_never_read(hint):
    batch = Batch(*MIXED)
    result = flash_attn_varlen_func(
        batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, hint, hint, causal=True
    )
    plain = flash_attn_varlen_func(
        batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, 5, 11, causal=True
    )
    assert torch.equal(result, plain)


# 3. windows


@pytest.mark.parametrize("window", [1, 2, 3, 4, 20])
def test_causal_clamps_a_symmetric_window(window):
    batch = Batch(*MIXED)
    size = (window - 1, window - 1)
    out, lse = flash_attn_varlen_func(
        batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, causal=True, window_size=size,
        return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out, lse, batch.truth(causal=True, window_size_left=window - 1))


@pytest.mark.parametrize("window_size", [(-1, -1), (None, None), (2, 1), (-1, 0)])
def test_windows_without_causal(window_size):
    batch = Batch(*MIXED)
    out, lse = flash_attn_varlen_func(
        batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k, window_size=window_size,
        return_softmax_lse=True,
    )  # fmt: skip
    left, right = (-1 if size is None else size for size in window_size)
    assert_accurate(out, lse, batch.truth(window_size_left=left, window_size_right=right))


# 4. padding, empty sequences, stale pages


def test_padding_rows_and_empty_sequences():
    batch = Batch([0, 3, 0, 2], [4, 3, 0, 0])
    batch.q = torch.cat([batch.q, torch.full((3, HEADS, DIM), NAN)])
    k, v, table = batch.paged(2, width=5)
    out, lse = flash_attn_varlen_func(
        batch.q, k, v, batch.cu_q, block_table=table, seqused_k=batch.seqused_k, causal=True,
        return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out, lse, batch.truth(causal=True))
    assert not out[3:].any()
    assert bool((lse[:, 3:] == float("-inf")).all())


def test_unused_table_entries_are_never_followed():
    batch = Batch(*DECODE)
    k, v, table = batch.paged(4, width=6)
    table[table < 0] = 2**30
    out, lse = flash_attn_with_kvcache(
        batch.q[:, None], k, v, cache_seqlens=batch.seqused_k, block_table=table,
        return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out[:, 0], lse[:, :, 0].T, batch.truth())


def test_graph_padding_rows_write_nothing():
    # continuous batching pads a decode batch with sequences of length -1 before their new token
    batch = Batch(*DECODE)
    written = [length - 1 for length in batch.key_lens]
    k_cache, v_cache, table = batch.paged(4, written)
    before = k_cache.isnan().sum()
    k, v = batch.new(written)
    pad = torch.full((1, 1, KV_HEADS, DIM), 7.0)
    out, lse = flash_attn_with_kvcache(
        torch.cat([batch.q[:, None], torch.ones(1, 1, HEADS, DIM)]),
        k_cache,
        v_cache,
        torch.cat([k[:, None], pad]),
        torch.cat([v[:, None], pad.new_ones(1, 1, KV_HEADS, DIM_V)]),
        cache_seqlens=torch.tensor([*written, -1], dtype=torch.int32),
        block_table=torch.cat([table, torch.full_like(table[:1], -1)]),
        causal=True,
        return_softmax_lse=True,
    )
    assert_accurate(out[:3, 0], lse[:3, :, 0].T, batch.truth(causal=True))
    assert not out[3].any()
    assert before - k_cache.isnan().sum() == 3 * KV_HEADS * DIM
    assert not (k_cache == 7).any()


# 5. strides


def test_keys_and_values_interleaved_in_one_storage():
    # pages of keys and values alternate in one tensor, so both views span nearly all of it
    batch = Batch(*MIXED, dim_v=DIM)
    k, v, table = batch.paged(4)
    storage = torch.stack([k, v], dim=1).flatten(0, 1)
    k_view, v_view = storage[:-1], storage[1:]
    out, lse = flash_attn_varlen_func(
        batch.q, k_view, v_view, batch.cu_q, seqused_k=batch.seqused_k, causal=True,
        block_table=torch.where(table < 0, table, 2 * table), return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out, lse, batch.truth(causal=True))


@pytest.mark.parametrize("heads_first", [False, True])
def test_keys_and_values_in_halves_of_the_last_dimension(heads_first):
    batch = Batch(*MIXED)
    k, v, table = batch.paged(4)
    packed = torch.cat([k, v], dim=-1)
    if heads_first:
        packed = packed.transpose(1, 2).contiguous().transpose(1, 2)
    k, v = packed.split((DIM, DIM_V), dim=-1)
    out, lse = flash_attn_varlen_func(
        batch.q, k, v, batch.cu_q, seqused_k=batch.seqused_k, causal=True, block_table=table,
        return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out, lse, batch.truth(causal=True))


def test_slices_of_a_fused_projection():
    batch = Batch([4, 2], [4, 2], dim_v=DIM)
    fused = torch.cat([batch.q, batch.k, batch.v], dim=1)
    q, k, v = fused.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
    out, lse = flash_attn_varlen_func(
        q, k, v, batch.cu_q, batch.cu_k, causal=True, return_softmax_lse=True
    )
    assert_accurate(out, lse, batch.truth(causal=True))


# 8, 9. out=, softmax_lse and the tuples


def test_out_receives_the_result():
    batch = Batch(*MIXED)
    out = torch.full((10, HEADS, DIM_V), NAN)
    arguments = (batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k)
    result = flash_attn_varlen_func(*arguments, causal=True, out=out)
    assert result is out
    assert torch.equal(out, flash_attn_varlen_func(*arguments, causal=True))
    wide = torch.zeros(10, HEADS, 2 * DIM_V)[..., ::2]
    assert torch.equal(flash_attn_varlen_func(*arguments, causal=True, out=wide), out)
    with pytest.raises(ValueError, match=r"out must have shape \(10, 4, 24\), got \(9, 4, 24\)"):
        flash_attn_varlen_func(*arguments, out=out[1:])


def test_out_of_the_other_two_functions():
    q, k, v = torch.randn(2, 3, HEADS, DIM), *torch.randn(2, 2, 5, KV_HEADS, DIM)
    for call in (flash_attn_func, flash_attn_with_kvcache):
        # a layout that no flattening of out could write through
        out = torch.full((HEADS, 2, 3, DIM), NAN).permute(1, 2, 0, 3)
        assert call(q, k, v, causal=True, out=out) is out
        assert torch.equal(out, call(q, k, v, causal=True))


def test_results_and_return_attn_probs():
    batch = Batch([3, 3], [3, 3])
    arguments = (batch.q, batch.k, batch.v, batch.cu_q, batch.cu_k)
    out = flash_attn_varlen_func(*arguments)
    assert isinstance(out, torch.Tensor)
    out, lse, probabilities = flash_attn_varlen_func(*arguments, return_attn_probs=True)
    assert lse.shape == (HEADS, 6)
    assert lse.dtype == torch.float32
    assert probabilities is None
    assert_accurate(out, lse, batch.truth())

    dense = [x.unflatten(0, (2, 3)) for x in (batch.q, batch.k, batch.v)]
    same, dense_lse, probabilities = flash_attn_func(*dense, return_attn_probs=True)
    assert torch.equal(same.flatten(0, 1), out)
    assert dense_lse.shape == (2, HEADS, 3)
    assert torch.equal(dense_lse[1], lse[:, 3:])
    same, dense_lse = flash_attn_with_kvcache(*dense, return_softmax_lse=True)
    assert torch.equal(same.flatten(0, 1), out)
    assert torch.equal(dense_lse[0], lse[:, :3])


# 10, 11. heads and errors


def test_query_heads_share_key_heads_in_order():
    batch = Batch([3], [3])
    repeated = [x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (batch.k, batch.v)]
    for k, v in ((batch.k, batch.v), repeated):
        args = (batch.q, k, v, batch.cu_q, batch.cu_k)
        assert_accurate(*flash_attn_varlen_func(*args, return_softmax_lse=True), batch.truth())


def test_errors_name_what_is_wrong():
    batch = Batch(*MIXED)
    k, v, table = batch.paged(4)
    with pytest.raises(RuntimeError, match="block_table"):
        flash_attn_varlen_func(
            batch.q, k, v, batch.cu_q, seqused_k=batch.seqused_k, block_table=table[:, :1]
        )
    with pytest.raises((ValueError, RuntimeError), match=r"num_heads|num_kv_heads"):
        flash_attn_varlen_func(batch.q[:, :3], batch.k, batch.v, batch.cu_q, batch.cu_k)
    q, cache = torch.randn(2, 1, HEADS, DIM), torch.randn(2, 4, KV_HEADS, DIM)
    new = torch.randn(2, 2, KV_HEADS, DIM)
    before = cache.clone()
    with pytest.raises(RuntimeError, match=r"at most 4, the room of a row of k_cache, got 5"):
        flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=3)
    assert torch.equal(cache, before)
    with pytest.raises(ValueError, match="cache_seqlens must be given"):
        flash_attn_with_kvcache(q, cache, cache, new, new)
    with pytest.raises(ValueError, match=r"k and v must be .* with batch 2, got shapes \(1, 2, 2"):
        flash_attn_with_kvcache(q, cache, cache, new[:1], new[:1], cache_seqlens=0)
    with pytest.raises(ValueError, match="k and v must come together"):
        flash_attn_with_kvcache(q, cache, cache, new)
    with pytest.raises(ValueError, match=r"k_cache.shape\[0\] to be 2, a row for each"):
        flash_attn_with_kvcache(q, cache[:1], cache[:1])
    with pytest.raises(ValueError, match="block_table and page_table to be one argument"):
        flash_attn_with_kvcache(q, cache, cache, block_table=table, page_table=table)
    with pytest.raises(ValueError, match=r"q must be .* got shape \(2, 4, 16\)"):
        flash_attn_with_kvcache(q[:, 0], cache, cache)
    with pytest.raises(ValueError, match=r"k must be .* with q's batch, got shape \(1, 4, 2, 16\)"):
        flash_attn_func(q, cache[:1], cache)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin must come together"):
        flash_attn_with_kvcache(q, cache, cache, rotary_cos=torch.ones(4, 2))
    with pytest.raises(
        ValueError, match=r"rotary_cos.shape\[0\] to be at least the 4 positions .* got 3"
    ):
        one = torch.ones(3, 2)
        flash_attn_with_kvcache(
            q, cache, cache, new, new, rotary_cos=one, rotary_sin=one, cache_seqlens=0
        )


@pytest.mark.parametrize("value", [None, [1.0]])
def test_what_is_no_tensor_is_named(value):
    x = torch.randn(2, 1, HEADS, DIM)
    cu = cumulative([1, 1])
    calls = {
        r"flash_attn_func\(\): expected k": lambda: flash_attn_func(x, value, x),
        r"flash_attn_varlen_func\(\): expected v": lambda: flash_attn_varlen_func(
            x[0], x[0], value, cu
        ),
        r"flash_attn_with_kvcache\(\): expected q": lambda: flash_attn_with_kvcache(value, x, x),
        r"flash_attn_with_kvcache\(\): expected v_cache": lambda: flash_attn_with_kvcache(
            x, x, value
        ),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=rf"{name} to be a tensor.*, got "):
            call()


def test_what_is_not_offered_is_refused_by_name():
    q, cache = torch.randn(2, 1, HEADS, DIM), torch.randn(2, 4, KV_HEADS, DIM)
    idx = torch.zeros(2, dtype=torch.int32)
    table = idx[:, None]
    cu = cumulative([1, 1])
    refused = [
        ("attention_chunk", lambda: flash_attn_func(q, cache, cache, attention_chunk=8)),
        (
            "return_attn_probs",
            lambda: flash_attn_func(q, cache, cache, 0.5, return_attn_probs=True),
        ),
        (
            "seqused_q",
            lambda: flash_attn_varlen_func(q[0], cache[0], cache[0], cu, seqused_q=idx),
        ),
        ("rotary_seqlens", lambda: flash_attn_with_kvcache(q, cache, cache, rotary_seqlens=idx)),
        (
            "cache_leftpad",
            lambda: flash_attn_with_kvcache(q, cache[:, :3], cache[:, :3], cache_leftpad=idx),
        ),
        (
            "cache_batch_idx",
            lambda: flash_attn_with_kvcache(
                q, cache, cache, cache_batch_idx=idx, block_table=table
            ),
        ),
    ]
    for argument, call in refused:
        with pytest.raises(NotImplementedError, match=f": {argument} is "):
            call()


# 12. nothing is read on the host


def test_shapes_alone_decide_what_runs():
    """On meta tensors any read of a value raises: what passes reads none."""
    meta = {"device": "meta"}
    lengths = torch.empty(3, dtype=torch.int32, **meta)
    q, new = torch.empty(3, 2, HEADS, DIM, **meta), torch.empty(3, 2, KV_HEADS, DIM, **meta)
    pages = torch.empty(9, 4, KV_HEADS, DIM, **meta)
    table = torch.empty(3, 5, dtype=torch.int32, **meta)
    hint = torch.empty((), dtype=torch.int32, **meta)
    out, lse = flash_attn_with_kvcache(
        q, pages, pages, new, new, cache_seqlens=lengths, block_table=table, causal=True,
        rotary_cos=torch.empty(20, 8, **meta), rotary_sin=torch.empty(20, 8, **meta),
        return_softmax_lse=True,
    )  # fmt: skip
    assert out.shape == q.shape
    assert lse.shape == (3, HEADS, 2)
    cu = torch.empty(4, dtype=torch.int32, **meta)
    rows = q.flatten(0, 1)
    out = flash_attn_with_kvcache(
        rows, pages, pages, page_table=table, cache_seqlens=lengths, cu_seqlens_q=cu,
        cu_seqlens_k_new=cu, max_seqlen_q=hint, pack_gqa=True, num_splits=3, ver=3,
    )  # fmt: skip
    assert out.shape == rows.shape
    out = flash_attn_varlen_func(
        rows, pages, pages, cu, cu, hint, hint, 0.1, block_table=table, s_aux=cu[:1].expand(HEADS)
    )
    assert out.shape == rows.shape
    assert flash_attn_func(q, new, new, 0.1).shape == q.shape
