"""`reshape_and_cache` on every backend: exactly the bytes the reference writes, and no other."""

import pytest
import torch

import torch_paged_attn
from torch_paged_attn import reference

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
EIGHT_BITS = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8)
PAIRS = [(f, f) for f in FLOATS] + [(f, e) for f in FLOATS for e in EIGHT_BITS]


def make(
    dtype, cache_dtype, layout="hnd", tokens=40, heads=3, num_pages=6, dim=24, dim_v=24, seed=0
):
    g = torch.Generator().manual_seed(seed)
    page_size = 16
    key = torch.randn(tokens, heads, dim, generator=g).to(dtype) * 3
    value = torch.randn(tokens, heads, dim_v, generator=g).to(dtype) * 3
    slots = torch.randperm(num_pages * page_size, generator=g)[:tokens]
    slots[::7] = -1
    if layout == "nhd":
        caches = [torch.empty(num_pages, page_size, heads, n).transpose(1, 2) for n in (dim, dim_v)]
    elif layout == "packed_last":
        caches = torch.empty(num_pages, heads, page_size, dim + dim_v).split([dim, dim_v], -1)
    else:
        caches = [torch.empty(num_pages, heads, page_size, n) for n in (dim, dim_v)]
    bases = {}
    typed = []
    for cache in caches:  # views of one storage stay views of one storage
        key_ = cache.untyped_storage().data_ptr()
        size = cache.untyped_storage().nbytes() // 4
        base = bases.setdefault(key_, torch.full((size,), 77.0).to(cache_dtype))
        typed.append(base.as_strided(cache.shape, cache.stride(), cache.storage_offset()))
    return key, value, typed, slots


def same_bytes(a, b):
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("layout", ["hnd", "nhd", "packed_last"])
@pytest.mark.parametrize("dtype, cache_dtype", PAIRS)
def test_writes_what_the_reference_writes(dtype, cache_dtype, layout, device):
    key, value, (k_cache, v_cache), slots = make(dtype, cache_dtype, layout, dim_v=17)
    expected = (k_cache.clone(), v_cache.clone())
    scales = (None, None)
    if cache_dtype in EIGHT_BITS:
        scales = (torch.tensor(0.03), torch.tensor([0.5, 0.002, 0.1]))
    reference.reshape_and_cache_split(key, value, *expected, slots, *scales)
    on_device = [t.to(device) if t is not None else None for t in (key, value, slots, *scales)]
    caches = (k_cache.to(device), v_cache.to(device))
    torch_paged_attn.reshape_and_cache(*on_device[:2], caches, *on_device[2:])
    for cache, want in zip(caches, expected, strict=True):
        assert same_bytes(cache.cpu(), want)


@pytest.mark.parametrize("layout", ["hnd", "nhd"])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_large_write(cache_dtype, layout, device):
    """Megabytes, which may bypass a processor's caches: keys are whole cache lines, values not."""
    sizes = {"tokens": 2048, "heads": 8, "num_pages": 160, "dim": 128, "dim_v": 136}
    key, value, caches, slots = make(torch.bfloat16, cache_dtype, layout, **sizes)
    expected = [cache.clone() for cache in caches]
    scales = (torch.tensor(0.5), torch.tensor(0.3)) if cache_dtype in EIGHT_BITS else (None, None)
    reference.reshape_and_cache_split(key, value, *expected, slots, *scales)
    on_device = [t.to(device) if t is not None else None for t in (key, value, slots, *scales)]
    caches = [cache.to(device) for cache in caches]
    torch_paged_attn.reshape_and_cache(*on_device[:2], caches, *on_device[2:])
    for cache, want in zip(caches, expected, strict=True):
        assert same_bytes(cache.cpu(), want)


@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 0.3])
@pytest.mark.parametrize("cache_dtype", EIGHT_BITS)
def test_every_bfloat16(cache_dtype, scale, device):
    """Ties, subnormals, infinities; scales that are a power of two and one that is none."""
    every = torch.arange(2**16).to(torch.int16).view(torch.bfloat16).view(-1, 1, 128)
    every = every.where(~every.isnan(), 0.0)
    caches = torch.zeros(2, 32, 1, 16, 128).to(cache_dtype)
    expected, slots = caches.clone(), torch.arange(len(every))
    scales = (torch.tensor(scale), torch.tensor(scale))
    reference.reshape_and_cache(every, every, expected, slots, *scales)
    on_device = [t.to(device) for t in (every, every, caches, slots, *scales)]
    torch_paged_attn.reshape_and_cache(*on_device)
    assert same_bytes(on_device[2].cpu(), expected)


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_one_tensor_cache(slot_dtype, device):
    key, value, _, slots = make(torch.bfloat16, torch.bfloat16)
    kv_cache = torch.randn(2, 6, 3, 16, 24).bfloat16()
    expected = kv_cache.clone()
    reference.reshape_and_cache(key, value, expected, slots)
    cache = kv_cache.to(device)
    args = (key.to(device), value.to(device), cache, slots.to(device, slot_dtype))
    torch_paged_attn.reshape_and_cache(*args)
    assert same_bytes(cache.cpu(), expected)


def test_rows_past_slot_mapping_are_padding(device):
    key, value, caches, slots = make(torch.float32, torch.float32)
    expected = tuple(c.clone() for c in caches)
    reference.reshape_and_cache_split(key, value, *expected, slots[:9])
    caches = [c.to(device) for c in caches]
    torch_paged_attn.reshape_and_cache(
        key.to(device), value.to(device), caches, slots[:9].to(device)
    )
    for cache, want in zip(caches, expected, strict=True):
        assert same_bytes(cache.cpu(), want)


def test_two_tokens_for_one_slot_one_wins_whole(device):
    key, value, caches, slots = make(torch.float32, torch.float32)
    slots[:] = 5
    caches = [c.to(device) for c in caches]
    torch_paged_attn.reshape_and_cache(key.to(device), value.to(device), caches, slots.to(device))
    winners = {
        int((cache[0, :, 5].cpu() == new).all((1, 2)).nonzero()[0, 0])
        for cache, new in zip(caches, (key, value), strict=True)
    }
    assert len(winners) == 1
    if device.type == "cpu":
        assert winners == {key.shape[0] - 1}


def test_no_token_writes_nothing(device):
    key, value, caches, _ = make(torch.float32, torch.float32)
    before = [c.clone() for c in caches]
    none = torch.empty(0, dtype=torch.int64, device=device)
    caches = [c.to(device) for c in caches]
    torch_paged_attn.reshape_and_cache(key.to(device), value.to(device), caches, none)
    assert all(same_bytes(c.cpu(), b) for c, b in zip(caches, before, strict=True))
