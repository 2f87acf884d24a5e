"""`reshape_and_cache` and `merge_states` in Triton: the reference's bytes, and the whole from
parts.
"""

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.testing import Truth, assert_accurate

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
PAIRS = [(f, f) for f in FLOATS] + [(f, e) for f in FLOATS for e in EIGHT_BITS]


def same_bytes(a, b):
    return torch.equal(a.cpu().contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def tokens(dtype, cache_dtype, num=40, heads=3, dim=24, dim_v=17, page_size=5, num_pages=12):
    """Keys, values, caches (transposed: pages, slots, heads) and slots, some of them negative."""
    g = torch.Generator().manual_seed(0)
    key = (torch.randn(num, heads, dim, generator=g) * 3).to(dtype)
    value = (torch.randn(num, heads, dim_v, generator=g) * 3).to(dtype)
    key[0] *= 100  # saturates
    key[1] *= 1e-4  # subnormal in eight bits
    caches = [
        torch.full((num_pages, page_size, heads, n), 77.0).to(cache_dtype).transpose(1, 2)
        for n in (dim, dim_v)
    ]
    slots = torch.randperm(num_pages * page_size, generator=g)[:num]
    slots[::7] = -1
    return key, value, caches, slots


@pytest.mark.parametrize("dtype, cache_dtype", PAIRS)
def test_writes_what_the_reference_writes(dtype, cache_dtype, kernels, device):
    key, value, caches, slots = tokens(dtype, cache_dtype)
    scales = [None, None]
    if cache_dtype in EIGHT_BITS:
        scales = [torch.tensor(0.03), torch.tensor([0.5, 0.002, 0.1])]
    expected = [c.clone() for c in caches]
    reference.reshape_and_cache_split(key, value, *expected, slots, *scales)
    caches = [c.to(device) for c in caches]
    scales = [None if s is None else s.to(device) for s in scales]
    new = key.to(device), value.to(device)
    kernels.reshape_and_cache_split(*new, *caches, slots.to(device), *scales)
    for cache, want in zip(caches, expected, strict=True):
        assert same_bytes(cache, want)


def test_one_tensor_cache_and_slots_outside_it(kernels, device):
    key, value, _, slots = tokens(torch.bfloat16, torch.bfloat16, dim_v=24)
    slots[3], slots[4] = 60, 2**62  # one past the end, and far away: skipped, nothing else touched
    kv_cache = torch.randn(2, 12, 3, 5, 24).bfloat16()
    expected = kv_cache.clone()
    inside = slots.where(slots < 60, -1)
    reference.reshape_and_cache(key, value, expected, inside)
    cache = kv_cache.to(device)
    kernels.reshape_and_cache(key.to(device), value.to(device), cache, slots.to(device))
    assert same_bytes(cache, expected)


@pytest.mark.parametrize("num", [40, 1100])
def test_tokens_of_one_slot_one_wins_whole(num, kernels, device):
    key, value, caches, slots = tokens(
        torch.float32, torch.float32, num=num, heads=8, dim=128, dim_v=128
    )
    caches = [c.to(device) for c in caches]
    slots = torch.full((num,), 7, device=device)
    kernels.reshape_and_cache_split(key.to(device), value.to(device), *caches, slots)
    winners = {
        tuple((cache[1, :, 2].cpu() == new).all(2).all(1).nonzero()[:, 0].tolist())
        for cache, new in zip(caches, (key, value), strict=True)
    }
    assert len(winners) == 1 and len(winners.pop()) == 1


def states(dtype):
    g = torch.Generator().manual_seed(0)
    out = torch.randn(2, 37, 5, 33, generator=g).to(dtype)
    lse = torch.randn(2, 5, 37, generator=g) * 5
    lse[0, :, ::5] = float("-inf")
    lse[1, :, ::3] = float("-inf")
    out[0, ::5] = float("nan")  # a part that saw no key has no weight, whatever it holds
    return out[0], lse[0], out[1], lse[1]


@pytest.mark.parametrize("dtype", FLOATS)
def test_merge_agrees_with_the_reference(dtype, kernels, device):
    args = states(dtype)
    merged = kernels.merge_states(*(t.to(device) for t in args))
    assert_accurate(*merged, Truth.of(reference.merge_states, *args))
    strided = [t.to(device).transpose(0, 1).contiguous().transpose(0, 1) for t in args]
    for got, want in zip(kernels.merge_states(*strided), merged, strict=True):
        assert torch.equal(got, want)
