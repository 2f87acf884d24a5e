"""What is the TPU's own in `reshape_and_cache`: runs of slots in tiles, or rows scattered."""

import pytest
import torch
from jax_arrays import to_jax, to_torch
from pallas_oracle import watch

from torch_paged_attn import reference
from torch_paged_attn.backends.tpu.pages import packed_shape
from torch_paged_attn.backends.tpu.reshape_and_cache import reshape_and_cache

# runs that end inside tiles, fill whole ones, go back to a tile that is being written and to a slot
RUNS = [3, 4, 5, -1, 6, 40, *range(64, 98), 4, 3, 3, 70, 191, 69, *range(100, 132)]


@pytest.mark.parametrize(("num", "page_size"), [(0, 32), (1, 32), (66, 32), (66, 31)])
def test_rows_past_the_slots_are_padding(num, page_size):
    g = torch.Generator().manual_seed(0)
    key, value = (torch.randn(70, 3, 24, generator=g) for _ in range(2))
    slots = torch.randperm(160, generator=g)[:num].int()
    slots[::7] = -1
    kv_cache = torch.zeros(2, 6, 3, page_size, 24)
    expected = kv_cache.clone()
    reference.reshape_and_cache(key, value, expected, slots)
    tensors = key, value, kv_cache, slots

    def write(interpret):
        # the op takes the cache away
        return reshape_and_cache(*(to_jax(t) for t in tensors), interpret=interpret)

    written = watch(write)
    assert torch.equal(to_torch(written), expected)


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim"), [("bfloat16", 2, 128), ("bfloat16", 2, 64), ("float32", 1, 256)]
)
def test_runs_of_slots(dtype, heads, head_dim):
    g = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, len(RUNS), heads, head_dim, generator=g).to(getattr(torch, dtype))
    slots = torch.tensor(RUNS, dtype=torch.int32)
    kv_cache = torch.randn(2, 6, heads, 32, head_dim, generator=g).to(key.dtype)
    expected = kv_cache.clone()
    reference.reshape_and_cache(key, value, expected, slots)
    tensors = key, value, kv_cache.reshape(packed_shape(kv_cache.shape)), slots

    def write(interpret):
        return reshape_and_cache(*(to_jax(t) for t in tensors), interpret=interpret)

    assert torch.equal(to_torch(watch(write)).reshape(expected.shape), expected)
