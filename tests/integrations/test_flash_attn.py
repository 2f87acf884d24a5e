"""The flash-attn functions keep every promise that the engines which call them rely on.

Each sequence's queries, keys and values exist first by themselves; the truth is the reference on
them laid end to end. A test then hands the same numbers over as an engine would: paged, padded,
interleaved, half of them still to be appended.
"""

import inspect

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.integrations import flash_attn
from torch_paged_attn.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from torch_paged_attn.testing.accuracy import Truth, assert_accurate

HEADS, KV_HEADS, DIM, DIM_V = 4, 2, 16, 24
NAN = float("nan")


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()


class Batch:
    """Sequences of random numbers, and every form in which engines hold them."""

    def __init__(self, query_lens, key_lens, dtype=torch.float32, dim_v=DIM_V, seed=0):
        g = torch.Generator().manual_seed(seed)
        self.query_lens, self.key_lens = query_lens, key_lens
        self.q = torch.randn(sum(query_lens), HEADS, DIM, generator=g).to(dtype)
        self.k = torch.randn(sum(key_lens), KV_HEADS, DIM, generator=g).to(dtype)
        self.v = torch.randn(sum(key_lens), KV_HEADS, dim_v, generator=g).to(dtype)
        self.cu_q, self.cu_k = cumulative(query_lens), cumulative(key_lens)
        self.seqused_k = torch.tensor(key_lens, dtype=torch.int32)
        self.generator = g

    def truth(self, **options):
        return Truth.of(
            reference.flash_varlen, self.q, self.k, self.v, self.cu_q, self.cu_k, **options
        )

    def paged(self, page_size, written=None, spare=1, width=None):
        """k_cache, v_cache (pages, page_size, heads, dim), NaN where unwritten, and block_table.

        written: how many keys of each sequence are in the cache already; None: all
        """
        pages = [-(-length // page_size) for length in self.key_lens]
        num_pages = sum(pages) + spare
        order = torch.randperm(num_pages, generator=self.generator)
        table = torch.full((len(pages), width or max(pages, default=0)), -1, dtype=torch.int32)
        caches = [
            torch.full((num_pages, page_size, *x.shape[1:]), NAN, dtype=x.dtype)
            for x in (self.k, self.v)
        ]
        taken = 0
        for b, count in enumerate(pages):
            table[b, :count] = order[taken : taken + count].int()
            taken += count
            length = self.key_lens[b] if written is None else written[b]
            for x, cache in zip((self.k, self.v), caches, strict=True):
                for j in range(length):
                    page = int(table[b, j // page_size])
                    cache[page, j % page_size] = x[int(self.cu_k[b]) + j]
        return *caches, table

    def rows(self, size, written, leftpad=None):
        """k_cache, v_cache (batch, size, heads, dim) without pages."""
        caches = [
            torch.full((len(written), size, *x.shape[1:]), NAN, dtype=x.dtype)
            for x in (self.k, self.v)
        ]
        for b, length in enumerate(written):
            start = int(self.cu_k[b])
            first = 0 if leftpad is None else leftpad[b]
            for x, cache in zip((self.k, self.v), caches, strict=True):
                cache[b, first : first + length] = x[start : start + length]
        return caches

    def new(self, written):
        """The keys and values past those written, end to end."""
        index = torch.cat(
            [
                torch.arange(int(self.cu_k[b]) + done, int(self.cu_k[b + 1]))
                for b, done in enumerate(written)
            ]
        )
        return self.k[index], self.v[index]


MIXED = ([1, 5, 3, 1], [7, 5, 11, 1])
DECODE = ([1, 1, 1], [7, 12, 1])


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


# 6, 7. slots


def test_slots_are_64_bit():
    cache = torch.empty(2**22, 2**10, 1, 1, device="meta")
    seen = []

    def store(key, value, caches, slot_mapping, *scales):
        seen.append(slot_mapping)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_paged_attn.integrations._kvcache.reshape_and_cache", store)
        from torch_paged_attn.integrations._kvcache import store as store_new

        table = torch.tensor([[2**22 - 1]], dtype=torch.int32)
        position = torch.tensor([5])
        store_new(cache, cache, cache, cache, table, torch.tensor([0]), position, None, None)
    assert seen[0].tolist() == [(2**22 - 1) * 2**10 + 5]


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


def test_what_comes_back():
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
    with pytest.raises(RuntimeError, match=r"come to 5, past the end .*block_table .* room for 4"):
        flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=3)
    assert torch.equal(cache, before)
    with pytest.raises(ValueError, match="cache_seqlens must be given"):
        flash_attn_with_kvcache(q, cache, cache, new, new)
    with pytest.raises(ValueError, match=r"k and v must be .* with batch 2, got shapes \(1, 2, 2"):
        flash_attn_with_kvcache(q, cache, cache, new[:1], new[:1], cache_seqlens=0)
    with pytest.raises(ValueError, match="k and v must come together"):
        flash_attn_with_kvcache(q, cache, cache, new)
    with pytest.raises(ValueError, match="k_cache must have a row for each of 2 sequences"):
        flash_attn_with_kvcache(q, cache[:1], cache[:1])
    with pytest.raises(ValueError, match="block_table and page_table are one argument"):
        flash_attn_with_kvcache(q, cache, cache, block_table=table, page_table=table)
    with pytest.raises(ValueError, match=r"q must be .* got shape \(2, 4, 16\)"):
        flash_attn_with_kvcache(q[:, 0], cache, cache)
    with pytest.raises(ValueError, match=r"k must be .* with q's batch, got shape \(1, 4, 2, 16\)"):
        flash_attn_func(q, cache[:1], cache)
    with pytest.raises(ValueError, match="rotary_cos and rotary_sin must come together"):
        flash_attn_with_kvcache(q, cache, cache, rotary_cos=torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"rotary_cos must have a row .* 4 positions, got 3"):
        one = torch.ones(3, 2)
        flash_attn_with_kvcache(
            q, cache, cache, new, new, rotary_cos=one, rotary_sin=one, cache_seqlens=0
        )


def test_what_is_not_offered_is_refused_by_name():
    q, cache = torch.randn(2, 1, HEADS, DIM), torch.randn(2, 4, KV_HEADS, DIM)
    idx = torch.zeros(2, dtype=torch.int32)
    table = idx[:, None]
    cu = cumulative([1, 1])
    refused = [
        ("qv", lambda: flash_attn_func(q, cache, cache, qv=q)),
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


# 13. float32 is float32: assert_accurate holds every test above to it. The rest: what each
# function computes beyond the checklist.


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


# flash_attn_with_kvcache: what is in the cache, and what is appended to it


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


def test_float8_queries_answer_in_bfloat16():
    batch = Batch([3], [3])
    q, k, v = (x.to(torch.float8_e4m3fn) for x in (batch.q, batch.k, batch.v))
    assert flash_attn_varlen_func(q, k, v, batch.cu_q, batch.cu_k).dtype == torch.bfloat16
    out, args = torch.empty(3, HEADS, DIM_V), (q, k, v, batch.cu_q, batch.cu_k)
    _, lse = flash_attn_varlen_func(*args, out=out, return_softmax_lse=True)
    truth = Truth.of(reference.flash_varlen, *args, out_dtype=torch.float32)
    assert_accurate(out, lse, truth)


def test_the_module_offers_these_three():
    assert [name for name in vars(flash_attn) if name.startswith("flash_attn_")] == [
        "flash_attn_func",
        "flash_attn_varlen_func",
        "flash_attn_with_kvcache",
    ]


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
