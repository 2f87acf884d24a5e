"""Every operator and front end under autocast, with tensors of several dtypes: casts come before
checks. The results are those of the call with tensors that are cast by hand."""

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import torch_paged_attn
from torch_paged_attn.integrations import flash_attn
from torch_paged_attn.ops import _autocast, _library

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
E4M3 = torch.float8_e4m3fn
MIXED = list(itertools.product((F32, BF16, F16), repeat=2))
BOUNDS = torch.tensor([0, 3, 7], dtype=torch.int32)


def randn(*shape, dtype=F32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def autocast(function, *args, dtype=BF16, **options):
    with torch.autocast("cpu", dtype):
        return function(*args, **options)


@pytest.mark.parametrize(("dtype_q", "dtype_kv"), MIXED, ids=str)
def test_attention(dtype_q, dtype_kv):
    q, k, v = randn(7, 4, 16), randn(7, 2, 16, seed=1), randn(7, 2, 16, seed=2)
    tensors = q.to(dtype_q), k.to(dtype_kv), v
    cast = [x.to(BF16) for x in tensors]
    expected, lse = torch_paged_attn.flash_varlen(*cast, BOUNDS)
    found = autocast(torch_paged_attn.flash_varlen, *tensors, BOUNDS)
    assert torch.equal(found[0], expected) and torch.equal(found[1], lse)
    lengths = BOUNDS, BOUNDS, 4, 4
    found = autocast(flash_attn.flash_attn_varlen_func, *tensors, *lengths)
    assert torch.equal(found, expected)
    dense = [x[:6].unflatten(0, (2, 3)) for x in tensors]
    expected = flash_attn.flash_attn_func(*(x.to(BF16) for x in dense))
    assert torch.equal(autocast(flash_attn.flash_attn_func, *dense), expected)


@pytest.mark.parametrize("dtype_out", [F32, BF16, F16, E4M3])
def test_attention_runs_in_the_dtype_of_out(dtype_out):
    """But float8, which autocast leaves alone."""
    dtype = BF16 if dtype_out == E4M3 else dtype_out
    q, k, v = randn(7, 4, 16), randn(7, 2, 16, dtype=BF16), randn(7, 2, 16, dtype=F16)
    found, expected = torch.empty(2, 7, 4, 16).to(dtype_out)
    autocast(torch_paged_attn.flash_varlen_out, found, q, k, v, BOUNDS)
    torch_paged_attn.flash_varlen_out(expected, *(x.to(dtype) for x in (q, k, v)), BOUNDS)
    assert torch.equal(found.float(), expected.float())


def stored_in(dtype, key, value):
    """Keys and values as a write into a cache of `dtype` casts them."""
    wide = torch.promote_types(key.dtype, value.dtype) if dtype.itemsize == 1 else dtype
    return key.to(wide), value.to(wide)


@pytest.mark.parametrize("cache_dtype", [F32, BF16, F16, E4M3, torch.int8])
@pytest.mark.parametrize(("dtype_k", "dtype_v"), MIXED, ids=str)
def test_cache_writes(dtype_k, dtype_v, cache_dtype):
    key, value = randn(5, 2, 8, dtype=dtype_k), randn(5, 2, 8, dtype=dtype_v, seed=1)
    slots = torch.tensor([3, -1, 7, 0, 9])
    found, expected = torch.zeros(2, 2, 4, 2, 4, 8).to(cache_dtype)
    pair = [x.clone() for x in expected]
    autocast(torch_paged_attn.reshape_and_cache, key, value, found, slots)
    autocast(torch_paged_attn.reshape_and_cache, key, value, pair, slots)
    key, value = stored_in(cache_dtype, key, value)
    torch_paged_attn.reshape_and_cache(key, value, expected, slots)
    assert expected.float().any()
    for given in (found, torch.stack(pair)):
        assert torch.equal(given.float(), expected.float())


@pytest.mark.parametrize("cache_dtype", [F32, BF16, E4M3])
@pytest.mark.parametrize("dtype_q", [F32, BF16])
@pytest.mark.parametrize(("dtype_k", "dtype_v"), MIXED, ids=str)
def test_flash_attn_with_kvcache(dtype_q, dtype_k, dtype_v, cache_dtype):
    q = randn(2, 1, 4, 8, dtype=dtype_q)
    new = randn(2, 1, 2, 8, dtype=dtype_k, seed=1), randn(2, 1, 2, 8, dtype=dtype_v, seed=2)
    found, expected = torch.randn(2, 8, 2, 8).repeat(2, 2, 1, 1, 1, 1).to(cache_dtype)
    call, options = flash_attn.flash_attn_with_kvcache, {"cache_seqlens": 3, "causal": True}
    out = autocast(call, q, *found, *new, **options)
    dtype = BF16 if cache_dtype == E4M3 else cache_dtype
    new = stored_in(cache_dtype, *new)
    wide = q.to(new[0].dtype) if cache_dtype == E4M3 else q.to(dtype)
    call(wide, *expected, *new, **options)
    assert torch.equal(found.float(), expected.float())
    again = call(q.to(dtype), *expected, cache_seqlens=4, causal=True)
    assert out.dtype == dtype and torch.equal(out, again)


def test_rotary_embedding_comes_before_the_cast():
    q, cache = randn(2, 1, 4, 8), torch.zeros(2, 2, 8, 2, 8, dtype=BF16)
    new, rotary = randn(2, 2, 1, 2, 8), randn(2, 8, 4, seed=1)
    call, wide = flash_attn.flash_attn_with_kvcache, cache.float()
    autocast(call, q, *cache, *new, *rotary, cache_seqlens=3)
    call(q, *wide, *new, *rotary, cache_seqlens=3)
    assert torch.equal(cache, wide.to(BF16))


@pytest.mark.parametrize(("dtype_a", "dtype_b"), MIXED, ids=str)
def test_merges(dtype_a, dtype_b):
    a, b = randn(5, 4, 8, dtype=dtype_a), randn(5, 4, 8, dtype=dtype_b, seed=1)
    lses = randn(4, 5, seed=2), randn(4, 5, seed=3)
    wide = torch.promote_types(dtype_a, dtype_b)
    expected = torch_paged_attn.merge_states(a.to(wide), lses[0], b.to(wide), lses[1])
    assert expected[0].dtype == wide
    merge = torch_paged_attn.merge_states
    for args in ((a, lses[0], b, lses[1]), ([a, b], list(lses))):
        assert all(map(torch.equal, autocast(merge, *args), expected))


def test_outside_autocast_they_are_refused():
    cache, slots = torch.zeros(2, 2, 2, 4, 8, dtype=BF16), torch.tensor([3])
    with pytest.raises(ValueError, match="kv_cache to be float32"):
        torch_paged_attn.reshape_and_cache(randn(1, 2, 8), randn(1, 2, 8), cache, slots)
    with pytest.raises(ValueError, match="out_b to be float32"):
        lse = randn(4, 5)
        torch_paged_attn.merge_states(randn(5, 4, 8), lse, randn(5, 4, 8, dtype=BF16), lse)


@pytest.mark.parametrize("key", ["CPU", "CUDA", "XLA", "PrivateUse1"])
def test_every_forward_has_a_rule(key):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    for op in _library.OPS:
        if not op.endswith("_backward"):
            assert has(f"paged_attn::{op}", f"Autocast{key}"), op


@pytest.mark.parametrize(("dtype_q", "dtype_k"), MIXED, ids=str)
def test_index_queries_and_keys_lose_nothing(dtype_q, dtype_k):
    """Their scores have to be the formula's."""
    q, k = randn(7, 4, 16, dtype=dtype_q), randn(7, 1, 16, dtype=dtype_k)
    wide = torch.promote_types(dtype_q, dtype_k)
    cast = _autocast.cast_index({"q": q, "k": k}, BF16)
    assert [x.dtype for x in cast.values()] == [wide, wide]
    pages = randn(3, 1, 4, 16, dtype=dtype_k)
    assert _autocast.cast_index({"q": q, "k": pages}, BF16)["q"].dtype == dtype_k
    with torch.autocast("cpu", BF16), FakeTensorMode() as fakes:
        fake = [fakes.from_tensor(x) for x in (q, k, BOUNDS)]
        ids, _ = torch_paged_attn.select_keys(fake[0], fake[1], None, fake[2], num_units=2)
    assert ids.shape == (7, 1, 2)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_in_a_graph(dtype):
    """One graph, with the same results."""
    q, k, v = randn(7, 4, 16, dtype=dtype), randn(7, 2, 16, dtype=F16), randn(7, 2, 16)

    def step(q, k, v, cache):
        with torch.autocast("cpu", BF16):
            torch_paged_attn.reshape_and_cache(k, v, cache, torch.arange(7))
            out, lse = torch_paged_attn.flash_varlen(q, k, v, BOUNDS)
            return torch_paged_attn.merge_states(out, lse, out.float(), lse)[0], cache * 2

    cache = torch.zeros(2, 2, 2, 4, 16, dtype=BF16)
    expected = step(q, k, v, cache.clone())
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    assert all(map(torch.equal, compiled(q, k, v, cache.clone()), expected))
