"""`flash_attn_with_kvcache`: what is in the cache, and what is appended to it."""

import pytest
import torch
from sequences import DECODE, DIM, DIM_V, KV_HEADS, NAN, Batch, cumulative

from torch_paged_attn.integrations.flash_attn import (
    flash_attn_with_kvcache,
)
from torch_paged_attn.testing.accuracy import assert_accurate


@pytest.mark.parametrize("page_size", [1, 3, 16, None])
@pytest.mark.parametrize("new", [1, 4])
def test_new_tokens_are_appended_in_place(page_size, new):
    batch = Batch([new] * 3, [new + 6, new, new + 11])
    written = [6, 0, 11]
    if page_size is None:
        (k_cache, v_cache), table = batch.rows(16, written), None
        slots = [(b, j) for b in range(3) for j in range(batch.key_lens[b])]
    else:
        k_cache, v_cache, table = batch.paged(page_size, written)
        slots = [
            (int(table[b, j // page_size]), j % page_size)
            for b in range(3)
            for j in range(batch.key_lens[b])
        ]
    k, v = (x.unflatten(0, (3, new)) for x in batch.new(written))
    pointers = k_cache.data_ptr(), v_cache.data_ptr()
    out, lse = flash_attn_with_kvcache(
        batch.q.unflatten(0, (3, new)), k_cache, v_cache, k, v, causal=True,
        cache_seqlens=torch.tensor(written, dtype=torch.int32), block_table=table,
        return_softmax_lse=True,
    )  # fmt: skip
    truth = batch.truth(causal=True)
    assert_accurate(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), truth)
    assert (k_cache.data_ptr(), v_cache.data_ptr()) == pointers
    assert torch.equal(torch.stack([k_cache[slot] for slot in slots]), batch.k)
    assert torch.equal(torch.stack([v_cache[slot] for slot in slots]), batch.v)
    assert int((~k_cache.isnan()).sum()) == batch.k.numel()


def test_ragged_queries_and_new_tokens():
    batch = Batch([2, 0, 3, 1], [5, 4, 3, 1])
    written = [3, 2, 0, 1]
    k_cache, v_cache, table = batch.paged(1, written)
    k, v = batch.new(written)
    padding = torch.full((2, KV_HEADS, DIM), NAN)
    out, lse = flash_attn_with_kvcache(
        q=batch.q, k_cache=k_cache, v_cache=v_cache, page_table=table,
        k=torch.cat([k, padding]), v=torch.cat([v, v.new_full((2, KV_HEADS, DIM_V), NAN)]),
        cache_seqlens=torch.tensor(written, dtype=torch.int32), cu_seqlens_q=batch.cu_q,
        cu_seqlens_k_new=cumulative([2, 2, 3, 0]), max_seqlen_q=3, causal=True,
        window_size=(2, 0), return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out, lse, batch.truth(causal=True, window_size_left=2))
    assert int((~k_cache.isnan()).sum()) == batch.k.numel()


def test_the_call_of_mini_sglang():
    batch = Batch([2, 1], [5, 4])
    k_cache, v_cache, table = batch.paged(1)
    out = flash_attn_with_kvcache(
        q=batch.q, k_cache=k_cache, v_cache=v_cache, page_table=table,
        cache_seqlens=batch.seqused_k, cu_seqlens_q=batch.cu_q, cu_seqlens_k_new=batch.cu_k,
        max_seqlen_q=2, softmax_scale=0.25, window_size=(-1, -1), softcap=0.0, num_splits=0,
        pack_gqa=None, causal=True, ver=3,
    )  # fmt: skip
    truth = batch.truth(causal=True, softmax_scale=0.25)
    assert_accurate(out, truth.softmax_lse.float(), truth)


def test_cache_seqlens_may_be_a_number_or_the_whole_cache():
    batch = Batch([1, 1], [5, 5])
    k_cache, v_cache = batch.rows(5, [5, 5])
    whole, lse = flash_attn_with_kvcache(
        batch.q[:, None], k_cache, v_cache, return_softmax_lse=True
    )
    assert_accurate(whole[:, 0], lse[:, :, 0].T, batch.truth())
    number = flash_attn_with_kvcache(batch.q[:, None], k_cache, v_cache, cache_seqlens=5)
    assert torch.equal(number, whole)


def test_cache_batch_idx_picks_rows_of_the_cache():
    batch = Batch(*DECODE)
    written = [length - 1 for length in batch.key_lens]
    rows = torch.tensor([4, 0, 2], dtype=torch.int32)
    k_cache, v_cache = (
        torch.full((5, 12, *x.shape[2:]), NAN).index_copy_(0, rows.long(), x)
        for x in batch.rows(12, written)
    )
    k, v = (x[:, None] for x in batch.new(written))
    out, lse = flash_attn_with_kvcache(
        batch.q[:, None], k_cache, v_cache, k, v, causal=True, cache_batch_idx=rows,
        cache_seqlens=torch.tensor(written, dtype=torch.int32), return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out[:, 0], lse[:, :, 0].T, batch.truth(causal=True))


@pytest.mark.parametrize("kind", ["rows", "picked rows", "pages"])
def test_cache_leftpad_hides_the_slots_in_front(kind):
    batch = Batch([2, 2, 2], [7, 9, 2])
    written, leftpad = [5, 7, 0], [4, 0, 2]
    k_cache, v_cache = batch.rows(12, written, leftpad)
    where = {}
    if kind == "picked rows":
        order = torch.tensor([2, 0, 1])
        k_cache, v_cache = k_cache[order], v_cache[order]
        where = {"cache_batch_idx": order.argsort().int()}
    elif kind == "pages":
        order = torch.randperm(9)
        k_cache, v_cache = (x.unflatten(1, (3, 4)).flatten(0, 1)[order] for x in (k_cache, v_cache))
        where = {"block_table": order.argsort().int().view(3, 3)}
    k, v = (x.unflatten(0, (3, 2)) for x in batch.new(written))
    seqlens = torch.tensor([a + b for a, b in zip(written, leftpad, strict=True)])
    out, lse = flash_attn_with_kvcache(
        batch.q.unflatten(0, (3, 2)), k_cache, v_cache, k, v, causal=True, window_size=(3, 3),
        cache_seqlens=seqlens.int(), cache_leftpad=torch.tensor(leftpad, dtype=torch.int32),
        return_softmax_lse=True, **where,
    )  # fmt: skip
    truth = batch.truth(causal=True, window_size_left=3)
    assert_accurate(out.flatten(0, 1), lse.transpose(0, 1).flatten(1), truth)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_rotary_turns_new_keys_and_queries(interleaved, causal):
    """A rotation by position p is a multiplication of complex numbers by exp(i p w)."""
    batch = Batch([2, 2], [5, 2])
    written = [3, 0]
    frequency = torch.tensor([1.0, 0.1, 0.01])
    angle = torch.arange(8)[:, None] * frequency

    def turn(x, position):
        turned = x[..., :6]
        pairs = (
            turned.unflatten(-1, (3, 2))
            if interleaved
            else (turned.unflatten(-1, (2, 3)).transpose(-1, -2))
        )
        angles = torch.tensor(position)[:, None, None] * frequency
        number = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles)
        pairs = torch.view_as_real(number)
        turned = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
        return torch.cat([turned, x[..., 6:]], dim=-1)

    plain_k, plain_v = batch.new(written)
    q, k = batch.q, batch.k
    # old keys are in the cache as they are; new ones are turned on their way in
    batch.k = torch.cat([k[:3], turn(k[3:5], [3, 4]), turn(k[5:], [0, 1])])
    batch.q = turn(q, [3, 4, 0, 1] if causal else [3, 3, 0, 0])
    k_cache, v_cache, table = batch.paged(4, written)
    table = torch.cat([table, torch.full_like(table[:, :2], -1)], dim=1)[:, :2]
    out, lse = flash_attn_with_kvcache(
        q.unflatten(0, (2, 2)), k_cache, v_cache, plain_k.unflatten(0, (2, 2)),
        plain_v.unflatten(0, (2, 2)), angle.cos(), angle.sin(), rotary_interleaved=interleaved,
        cache_seqlens=torch.tensor(written, dtype=torch.int32), block_table=table, causal=causal,
        return_softmax_lse=True,
    )  # fmt: skip
    result = (out.flatten(0, 1), lse.transpose(0, 1).flatten(1))
    assert_accurate(*result, batch.truth(causal=causal))


def test_8_bit_caches_are_scaled_both_ways():
    batch = Batch([1, 1], [6, 9])
    written = [5, 8]
    scale = torch.tensor([0.5, 0.25])
    k_cache, v_cache, table = batch.paged(4, written)
    stored = [(x / scale[:, None]).nan_to_num().to(torch.float8_e4m3fn) for x in (k_cache, v_cache)]
    new = [x[:, None] for x in batch.new(written)]
    # the truth sees what the 8-bit cache can hold
    batch.k, batch.v = (
        (x / scale[:, None]).to(torch.float8_e4m3fn).float() * scale[:, None]
        for x in (batch.k, batch.v)
    )
    out, lse = flash_attn_with_kvcache(
        batch.q[:, None], *stored, *new, cache_seqlens=torch.tensor(written, dtype=torch.int32),
        block_table=table, k_descale=scale, v_descale=scale, return_softmax_lse=True,
    )  # fmt: skip
    assert_accurate(out[:, 0], lse[:, :, 0].T, batch.truth())
    with pytest.raises(NotImplementedError, match=r"k_descale of shape \(batch, num_kv_heads\)"):
        flash_attn_with_kvcache(
            batch.q[:, None], *stored, *new, cache_seqlens=0, block_table=table,
            k_descale=scale.expand(2, 2),
        )  # fmt: skip
