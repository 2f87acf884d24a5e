"""What is the TPU's own in `reshape_and_cache`: whole tiles are written, or rows scattered."""

import pytest
import torch
from jax_arrays import to_jax, to_torch
from pallas_oracle import watch

from torch_paged_attn import reference
from torch_paged_attn.backends.tpu.reshape_and_cache import reshape_and_cache


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
