"""`reshape_and_cache` and `merge_states` on TPU: the reference's bytes; parts make the whole."""

import pytest
import torch
from jax_arrays import to_jax, to_torch
from pallas_oracle import watch

from torch_paged_attn import reference
from torch_paged_attn.backends.tpu.merge_states import merge_states
from torch_paged_attn.backends.tpu.reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_split,
)
from torch_paged_attn.testing import Truth, assert_accurate

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)


def tokens(dtype, num=70, heads=3, dim=24, dim_v=17, page_size=32, num_pages=5):
    """Keys, values, caches and slots, some of them negative, some of them next to one another."""
    g = torch.Generator().manual_seed(0)
    key = torch.randn(num, heads, dim, generator=g).to(dtype)
    value = torch.randn(num, heads, dim_v, generator=g).to(dtype)
    caches = [torch.full((num_pages, heads, page_size, n), 77.0, dtype=dtype) for n in (dim, dim_v)]
    slots = torch.randperm(num_pages * page_size, generator=g)[:num]
    slots[20:50] = torch.arange(67, 97)
    slots[:20][(slots[:20] >= 67) & (slots[:20] < 97)] = -1
    slots[50:][(slots[50:] >= 67) & (slots[50:] < 97)] = -7
    slots[::7] = -1
    return key, value, caches, slots.int()


def write(op, *tensors):
    """Run the op on copies: it takes the caches away."""
    return watch(lambda interpret: op(*(to_jax(t) for t in tensors), interpret=interpret))


@pytest.mark.parametrize("page_size", [32, 5], ids=["tiles", "scatter"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_writes_what_the_reference_writes(dtype, page_size):
    num_pages = 5 if page_size == 32 else 32
    key, value, caches, slots = tokens(dtype, page_size=page_size, num_pages=num_pages)
    expected = [c.clone() for c in caches]
    reference.reshape_and_cache_split(key, value, *expected, slots)
    written = write(reshape_and_cache_split, key, value, *caches, slots)
    for cache, want in zip(written, expected, strict=True):
        assert torch.equal(to_torch(cache), want)


@pytest.mark.parametrize("dtype", NARROW)
def test_stores_eight_bits_as_the_reference_does(dtype):
    key, value, _, slots = tokens(torch.float32, dim_v=24)
    key[5] = 1e6
    cache = torch.zeros(2, 5, 3, 32, 24).to(dtype)
    scales = torch.tensor([0.5, 0.25, 2.0]), torch.tensor(0.1)
    expected = cache.clone()
    reference.reshape_and_cache(key, value, expected, slots, *scales)
    written = write(reshape_and_cache, key, value, cache, slots, *scales)
    assert torch.equal(to_torch(written).view(torch.int8), expected.view(torch.int8))


def test_slots_outside_and_twice():
    key, value, _, slots = tokens(torch.bfloat16, dim_v=24)
    slots[3], slots[4] = 160, 2**31 - 1  # one past the end, and far away: skipped
    slots[10:14] = 7  # the last of them wins, whole
    kv_cache = torch.randn(2, 5, 3, 32, 24).bfloat16()
    expected = kv_cache.clone()
    reference.reshape_and_cache(key, value, expected, slots.where(slots < 160, -1))
    written = write(reshape_and_cache, key, value, kv_cache, slots)
    assert torch.equal(to_torch(written), expected)


@pytest.mark.parametrize(("num", "page_size"), [(0, 32), (1, 32), (66, 32), (66, 31)])
def test_rows_past_the_slots_are_padding(num, page_size):
    key, value, _, slots = tokens(torch.float32, dim_v=24)
    kv_cache = torch.zeros(2, 6, 3, page_size, 24)
    expected = kv_cache.clone()
    reference.reshape_and_cache(key, value, expected, slots[:num])
    written = write(reshape_and_cache, key, value, kv_cache, slots[:num])
    assert torch.equal(to_torch(written), expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_merge_agrees_with_the_reference(dtype):
    g = torch.Generator().manual_seed(0)
    out = torch.randn(2, 37, 5, 33, generator=g).to(dtype)
    lse = torch.randn(2, 5, 37, generator=g) * 5
    lse[0, :, ::5] = float("-inf")
    lse[1, :, ::3] = float("-inf")
    out[0, ::5] = float("nan")  # a part that saw no key has no weight, whatever it holds
    args = out[0], lse[0], out[1], lse[1]
    merged = [to_torch(x) for x in merge_states(*(to_jax(t) for t in args))]
    assert_accurate(*merged, Truth.of(reference.merge_states, *args))
