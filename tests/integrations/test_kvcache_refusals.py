"""`flash_attn_with_kvcache` on a CPU writes nothing before everything is checked."""

import numpy
import pytest
import torch
from kvcache_calls import BATCH, NEW, ROWS, good_call, int32, ragged
from sequences import DIM, HEADS, KV_HEADS, cumulative

from torch_paged_attn.integrations.flash_attn import flash_attn_with_kvcache


def rotary(rows, columns, sin_columns=None, dtype=torch.float32):
    sin = torch.ones(rows, columns if sin_columns is None else sin_columns, dtype=dtype)
    return {"rotary_cos": torch.ones(rows, columns, dtype=dtype), "rotary_sin": sin}


# name -> what is changed in a good call, the error, its text
WRONG = {
    "new_falls": (
        ragged() | {"cu_seqlens_k_new": int32(0, 3, 2)},
        ValueError,
        r"expected cu_seqlens_k_new\[2\] to be at least the entry before it, 3, got 2",
    ),
    "new_starts_late": (
        ragged() | {"cu_seqlens_k_new": int32(1, 2, 4)},
        ValueError,
        r"expected cu_seqlens_k_new\[0\] to be 0.* got 1",
    ),
    "new_ends_late": (
        ragged() | {"cu_seqlens_k_new": int32(0, 2, 5)},
        ValueError,
        r"expected cu_seqlens_k_new\[-1\] to be at most total_new = 4.* got 5",
    ),
    "new_of_another_batch": (
        ragged() | {"cu_seqlens_k_new": int32(0, 4)},
        ValueError,
        r"expected cu_seqlens_k_new to be \(batch \+ 1,\) .* 3.* got shape \(2,\)",
    ),
    "new_of_16_bits": (
        ragged() | {"cu_seqlens_k_new": cumulative([2, 2]).short()},
        ValueError,
        "expected cu_seqlens_k_new to be int32.* got int16",
    ),
    "queries_fall": (
        ragged() | {"cu_seqlens_q": int32(0, 3, 2)},
        ValueError,
        r"expected cu_seqlens_q\[2\] to be .* 3, got 2",
    ),
    "no_bounds": (ragged() | {"cu_seqlens_q": int32()}, ValueError, "got no entries"),
    "length_overflows": (
        {"cache_seqlens": int32(3, 2**31 - 1)},
        RuntimeError,
        f"to be at most 8, the room .* got {2**31 + 1}",
    ),
    "number_overflows": ({"cache_seqlens": 2**40}, RuntimeError, "at most 8, the room .* got"),
    "length_past_the_table": (
        {"cache_seqlens": int32(3, 7)},
        RuntimeError,
        "at most 8, the room .* got 9",
    ),
    "lengths_of_another_batch": (
        {"cache_seqlens": int32(3, 5, 1)},
        ValueError,
        r"expected cache_seqlens to be \(batch,\) with a first dimension of 2.* got shape \(3,\)",
    ),
    "lengths_of_16_bits": (
        {"cache_seqlens": int32(3, 5).short()},
        ValueError,
        "expected cache_seqlens to be int32.* got int16",
    ),
    "lengths_past_32_bits": (
        {"cache_seqlens": torch.tensor([3, 2**32 + 5])},
        ValueError,
        f"expected cache_seqlens to be integers of 32 bits, got the entry {2**32 + 5}",
    ),
    "length_is_a_list": (
        {"cache_seqlens": [3, 5]},
        TypeError,
        r"expected cache_seqlens to be a tensor \(batch,\).* got a list",
    ),
    "page_missing": (
        {"block_table": int32(4, 1, 0, -1).view(2, 2)},
        IndexError,
        r"expected block_table\[1, 1\] to be a page from 0 to 5.* got -1",
    ),
    "page_outside": (
        {"block_table": int32(4, 1, 6, 2).view(2, 2)},
        IndexError,
        r"expected block_table\[1, 0\] to be a page from 0 to 5.* got 6",
    ),
    "table_of_another_batch": (
        {"block_table": int32(4, 1).view(1, 2)},
        ValueError,
        r"expected block_table to be \(batch, max_pages\) .* 2.* got shape \(1, 2\)",
    ),
    "table_of_1_dimension": (
        {"block_table": int32(4, 1)},
        ValueError,
        r"expected block_table to be \(batch, max_pages\).* got shape \(2,\)",
    ),
    "leftpad_of_another_batch": (
        {"cache_leftpad": int32(1)},
        ValueError,
        r"expected cache_leftpad to be \(batch,\) with a first dimension of 2.* got shape \(1,\)",
    ),
    "leftpad_too_large": (
        {"cache_leftpad": int32(0, 6)},
        ValueError,
        r"expected cache_leftpad\[1\] to be from 0 to cache_seqlens\[1\] = 5.* got 6",
    ),
    "leftpad_negative": (
        {"cache_leftpad": int32(-1, 0)},
        ValueError,
        r"expected cache_leftpad\[0\] to be.* got -1",
    ),
    "row_outside": (
        ROWS | {"cache_batch_idx": int32(0, 3)},
        IndexError,
        r"expected cache_batch_idx\[1\] to be a row of k_cache, from 0 to 2.* got 3",
    ),
    "rows_of_another_batch": (
        ROWS | {"cache_batch_idx": int32(0, 1, 2)},
        ValueError,
        r"expected cache_batch_idx to be.* got shape \(3,\)",
    ),
    "rotary_too_wide": (
        rotary(8, DIM),
        ValueError,
        rf"rotary_cos.shape\[1\] to be .* at most half of head_dim = {DIM}, got {DIM}",
    ),
    "rotary_too_short": (rotary(7, 4), ValueError, r"rotary_cos.shape\[0\] to be .* 8 .* got 7"),
    "rotary_differs": (
        rotary(8, 4, 3),
        ValueError,
        r"expected rotary_sin to be \(8, 4\), as rotary_cos.* got shape \(8, 3\)",
    ),
    "rotary_of_integers": (
        rotary(8, 4, dtype=torch.int32),
        ValueError,
        "expected rotary_cos to be of a floating-point dtype.* got int32",
    ),
    "rotary_wider_than_keys": (
        rotary(8, 4) | {"k": torch.zeros(BATCH, NEW, KV_HEADS, 4)},
        ValueError,
        r"rotary_cos.shape\[1\] to be .* at most half of head_dim = 4, got 4",
    ),
    "out_differs": (
        {"out": torch.empty(BATCH, NEW, HEADS, DIM + 1)},
        ValueError,
        r"out must have shape \(2, 2, 4, 16\), got \(2, 2, 4, 17\)",
    ),
    "sinks_differ": (
        {"s_aux": torch.zeros(3)},
        ValueError,
        r"expected sinks to be.* got shape \(3,\)",
    ),
    "softcap_negative": ({"softcap": -1.0}, ValueError, "expected softcap to be.* got -1.0"),
    "hint_negative": (
        ragged() | {"max_seqlen_q": -1},
        ValueError,
        "expected max_seqlen_q to be at least 0.* got -1",
    ),
    # what an operator's schema would refuse, once the cache is written
    "hint_of_another_type": (
        ragged() | {"max_seqlen_q": 2.5},
        TypeError,
        "expected max_seqlen_q to be.* got 2.5",
    ),
    "window_of_floats": (
        {"window_size": (1.5, 0)},
        TypeError,
        r"window_size to be .* got \(1.5, 0\)",
    ),
    "window_of_three": (
        {"window_size": (1, 2, 3)},
        TypeError,
        r"window_size to be .* got \(1, 2, 3\)",
    ),
    "window_missing": (
        {"window_size": None},
        TypeError,
        "expected window_size to be a pair.* got None",
    ),
    "scale_of_another_type": (
        {"softmax_scale": "x"},
        TypeError,
        "expected softmax_scale to be.* got 'x'",
    ),
    "softcap_of_another_type": (
        {"softcap": None},
        TypeError,
        "expected softcap to be a number.* got None",
    ),
    "query_dtype": (
        {"q": torch.zeros(BATCH, NEW, HEADS, DIM).bfloat16()},
        ValueError,
        "expected k_cache to be bfloat16.* got float32",
    ),
    "cache_of_3_dimensions": (
        {"v_cache": torch.zeros(3, 2, DIM)},
        ValueError,
        r"v_cache to be \(pages, page_size, num_kv_heads, head_dim\), got shape \(3, 2, 16\)",
    ),
    "gradient": (
        {"q": torch.zeros(BATCH, NEW, HEADS, DIM, requires_grad=True)},
        NotImplementedError,
        "no gradient through a KV cache, and q requires grad: call under torch.no_grad",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_nothing_is_written(name):
    changed, error, text = WRONG[name]
    call = good_call() | changed
    before = [call[cache].clone() for cache in ("k_cache", "v_cache")]
    with pytest.raises(error, match=text):
        flash_attn_with_kvcache(**call)
    assert torch.equal(call["k_cache"], before[0])
    assert torch.equal(call["v_cache"], before[1])


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


GIVEN = {
    "dense": rotary(8, 4) | {"s_aux": torch.zeros(HEADS), "alibi_slopes": torch.zeros(HEADS)},
    "ragged": ragged() | {"cache_leftpad": int32(1, 0)},
    "pages": {"cache_leftpad": int32(1, 0)},
    "rows": ROWS | {"cache_batch_idx": int32(0, 2)},
}


@pytest.mark.parametrize("given", GIVEN)
def test_nothing_is_written_where_a_storage_was_freed(given):
    """FSDP frees the storages of gathered parameters; their tensors stay."""
    call = good_call() | GIVEN[given]
    for name, tensor in call.items():
        if not isinstance(tensor, torch.Tensor):
            continue
        caches = [call[cache] for cache in ("k_cache", "v_cache")]
        before = [cache.clone() for cache in caches]
        text = rf"^flash_attn_with_kvcache\(\): expected {name} to be backed .* 0 bytes"
        with pytest.raises(ValueError, match=text):
            flash_attn_with_kvcache(**call | {name: freed(tensor)})
        for cache, same in zip(caches, before, strict=True):
            assert torch.equal(cache, same)


@pytest.mark.parametrize("given", ["pages", "rows"])
def test_nothing_is_read_where_a_storage_was_freed(given):
    """Without new tokens: what torch's own operators would read is refused by this function, the
    rest by the operator that attention is.
    """
    call = good_call() | GIVEN[given] | {"s_aux": torch.zeros(HEADS).bfloat16()}
    call |= {"k": None, "v": None, "out": torch.zeros(BATCH, NEW, HEADS, DIM)}
    flash_attn_with_kvcache(**call)
    for name, tensor in call.items():
        if isinstance(tensor, torch.Tensor):
            with pytest.raises(ValueError, match=r"\w+\(\): expected \w+ to be backed .* 0 bytes"):
                flash_attn_with_kvcache(**call | {name: freed(tensor)})


def test_no_copy_is_made_of_a_storage_that_was_freed():
    call = good_call()
    call["q"] = torch.zeros(BATCH, NEW, DIM, HEADS).transpose(2, 3)
    call["q"].untyped_storage().resize_(0)
    with pytest.raises(
        ValueError, match=r"^flash_attn_with_kvcache\(\): expected q to be backed .* 0 bytes"
    ):
        flash_attn_with_kvcache(**call)


@pytest.mark.parametrize("causal", [1, numpy.True_])
def test_options_of_like_types(causal):
    """As flash-attn takes them."""
    given = {"window_size": [numpy.int64(3), None], "softcap": numpy.float32(2), "causal": causal}
    same = {"window_size": (3, -1), "softcap": 2.0, "causal": True}
    results = [flash_attn_with_kvcache(**good_call() | options) for options in (given, same)]
    assert torch.equal(*results)


def test_a_negative_window_is_unbounded():
    results = [
        flash_attn_with_kvcache(**good_call() | {"window_size": window})
        for window in ((-7, 1), (-1, 1))
    ]
    assert torch.equal(*results)


@pytest.mark.parametrize("cache_batch_idx", [None, int32(2, 0)], ids=["pages", "rows"])
@pytest.mark.parametrize(
    "transform, text",
    [
        (lambda f, k: torch.func.jvp(f, (k,), (k,)), "key has a tangent"),
        (lambda f, k: torch.func.grad(f)(k), "key requires grad"),
        (lambda f, k: torch.func.vmap(f)(k[None]), "vmap is not"),
    ],
    ids=["jvp", "grad", "vmap"],
)
def test_transforms_of_what_is_written(transform, text, cache_batch_idx):
    """Their tensors have no storage to look at."""
    rows = {} if cache_batch_idx is None else ROWS
    call = good_call() | rows | {"cache_batch_idx": cache_batch_idx}
    before = call["k_cache"].clone()
    with pytest.raises(NotImplementedError, match=rf"^reshape_and_cache\(\): {text}"):
        transform(lambda k: flash_attn_with_kvcache(**call | {"k": k}).sum(), call["k"])
    assert torch.equal(call["k_cache"], before)


@pytest.mark.parametrize("changed", [{}, ragged()], ids=["dense", "ragged"])
def test_the_good_call_writes(changed):
    call = good_call() | changed
    before = call["k_cache"].clone()
    flash_attn_with_kvcache(**call)
    assert int((call["k_cache"] != before).any(-1).any(-1).sum()) == BATCH * NEW


@pytest.mark.parametrize("changed", [{}, ragged()], ids=["dense", "ragged"])
@pytest.mark.parametrize("length", [-1, -2, -(2**31)])
def test_negative_lengths_are_padding(changed, length):
    """Whatever a row of padding finds in the table and in the cache, it leaves as it is."""
    call = good_call() | changed
    call["k_cache"][call["block_table"][1].long()] = float("nan")
    call["cache_seqlens"] = int32(3, length)
    before = call["k_cache"].clone()
    out = flash_attn_with_kvcache(**call).view(BATCH, NEW, HEADS, DIM)
    assert not out[1].any()
    assert out[0].isfinite().all()
    written = (call["k_cache"].nan_to_num() != before.nan_to_num()).any(-1).any(-1)
    assert written.nonzero().tolist() == [[1, 0], [4, 3]]


def test_a_window_may_leave_pages_out():
    """Pages that no query sees are not looked up, by the check neither."""
    call = good_call() | {"window_size": (1, 0)}
    call["cache_seqlens"] = int32(3, 6)
    call["q"] = call["q"][:, 1:]
    expected = flash_attn_with_kvcache(**call)
    call["block_table"][1, 0] = -1
    assert torch.equal(flash_attn_with_kvcache(**call), expected)
