"""`reshape_and_cache` and `merge_states` on Neuron: the reference's bytes; parts make the whole."""

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.testing import Truth, assert_accurate

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture
def kernels(machine):
    from torch_paged_attn.backends import neuron

    return neuron


def tokens(dtype, num=150, heads=3, dim=24, dim_v=17, page_size=5, num_pages=40):
    """Keys, values, caches (transposed: pages, slots, heads) and slots, some of them negative."""
    g = torch.Generator().manual_seed(0)
    key = torch.randn(num, heads, dim, generator=g).to(dtype)
    value = torch.randn(num, heads, dim_v, generator=g).to(dtype)
    caches = [
        torch.full((num_pages, page_size, heads, n), 77.0, dtype=dtype).transpose(1, 2)
        for n in (dim, dim_v)
    ]
    slots = torch.randperm(num_pages * page_size, generator=g)[:num]
    slots[::7] = -1
    return key, value, caches, slots


@pytest.mark.parametrize("dtype", FLOATS)
def test_writes_what_the_reference_writes(dtype, kernels):
    key, value, caches, slots = tokens(dtype)
    expected = [c.clone() for c in caches]
    reference.reshape_and_cache_split(key, value, *expected, slots)
    kernels.reshape_and_cache_split(key, value, *caches, slots)
    for cache, want in zip(caches, expected, strict=True):
        assert torch.equal(cache, want)


def test_slots_outside_and_twice(kernels):
    key, value, _, slots = tokens(torch.bfloat16, dim_v=24)
    slots[3], slots[4] = 200, 2**62  # one past the end, and far away: skipped
    slots[10:14] = 7  # the last of them wins, whole
    kv_cache = torch.randn(2, 40, 3, 5, 24).bfloat16()
    expected = kv_cache.clone()
    reference.reshape_and_cache(key, value, expected, slots.where(slots < 200, -1))
    kernels.reshape_and_cache(key, value, kv_cache, slots.to(torch.int64))
    assert torch.equal(kv_cache, expected)


def test_interleaved_caches_and_padded_tokens(kernels):
    key, value, _, slots = tokens(torch.float32, dim_v=24)
    both = torch.zeros(40, 2, 5, 3, 24)
    caches = [both[:, i].transpose(1, 2) for i in (0, 1)]
    expected = [c.clone() for c in caches]
    reference.reshape_and_cache_split(key, value, *expected, slots[:100])
    kernels.reshape_and_cache_split(key, value, *caches, slots[:100].int())
    for cache, want in zip(caches, expected, strict=True):
        assert torch.equal(cache, want)


@pytest.mark.parametrize("cache_dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
@pytest.mark.parametrize("dtype", FLOATS)
def test_eight_bits_are_rounded_and_saturate(dtype, cache_dtype, kernels):
    key, value, caches, slots = tokens(dtype)
    scales = torch.tensor(0.03), torch.tensor([0.5, 0.002, 0.1])
    expected = [torch.zeros(c.shape).to(cache_dtype) for c in caches]
    written = [c.clone() for c in expected]
    reference.reshape_and_cache_split(key, value, *expected, slots, *scales)
    kernels.reshape_and_cache_split(key, value, *written, slots, *scales)
    for cache, want in zip(written, expected, strict=True):
        assert torch.equal(cache.view(torch.uint8), want.view(torch.uint8))


def test_refuses_strides_that_are_no_rows_before_it_writes(kernels):
    key, value, _, slots = tokens(torch.float32, heads=1, dim=24, dim_v=24, page_size=1)
    k_cache = torch.zeros(40, 1, 1, 24)
    v_cache = torch.zeros(1000).as_strided((40, 1, 1, 24), (23, 1, 1, 1))
    with pytest.raises(NotImplementedError, match="reshape_and_cache: Neuron: v_cache has strides"):
        kernels.reshape_and_cache_split(key, value, k_cache, v_cache, slots.clamp(max=39))
    assert not k_cache.any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_merge_agrees_with_the_reference(dtype, kernels):
    g = torch.Generator().manual_seed(0)
    out = torch.randn(2, 37, 5, 33, generator=g).to(dtype)
    lse = torch.randn(2, 5, 37, generator=g) * 5
    lse[0, :, ::5] = float("-inf")
    lse[1, :, ::3] = float("-inf")
    out[0, ::5] = float("nan")  # a part that saw no key has no weight, whatever it holds
    args = out[0], lse[0], out[1], lse[1]
    assert_accurate(*kernels.merge_states(*args), Truth.of(reference.merge_states, *args))
