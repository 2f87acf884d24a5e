"""What is Triton's own in `reshape_and_cache`: programs that meet at one slot."""

import pytest
import torch

from torch_paged_attn import reference


def test_many_tokens_for_one_slot(kernels, device):
    """More than one program claims the slot; one token wins, whole."""
    key, value = (torch.randn(1100, 2, 64).to(device) for _ in range(2))
    caches = [torch.zeros(12, 2, 5, 64, device=device) for _ in range(2)]
    slots = torch.full((1100,), 7, device=device)
    kernels.reshape_and_cache_split(key, value, *caches, slots)
    winners = {
        tuple((cache[1, :, 2] == new).all(2).all(1).nonzero()[:, 0].tolist())
        for cache, new in zip(caches, (key, value), strict=True)
    }
    assert len(winners) == 1 and len(winners.pop()) == 1


def caches_of(stored, layout, heads, dims, num_pages=120, page_size=10):
    """A cache of keys, one of values, and their scales; `rows`: behind one another for each token
    and head.
    """
    widths = [d // 2 if stored == torch.uint8 else d for d in dims]
    if layout == "hnd":
        shapes = [(num_pages, heads, page_size, width) for width in widths]
        caches = [torch.zeros(shape).to(stored) for shape in shapes]
        return *caches, *(torch.full(shape[:3], -5.0) for shape in shapes)
    ends = [-(-width // 4) * 4 for width in widths]
    memory = torch.zeros(num_pages, page_size, heads, sum(ends) + 8, dtype=torch.uint8)
    starts = 0, ends[0] + 4
    caches = [memory[..., a : a + w].view(stored) for a, w in zip(starts, widths, strict=True)]
    scales = [memory[..., a + e : a + e + 4] for a, e in zip(starts, ends, strict=True)]
    scales = [x.view(torch.float32)[..., 0] for x in scales]
    return tuple(x.transpose(1, 2) for x in (*caches, *scales))


@pytest.mark.parametrize(
    "stored, new, tokens, layout",
    [
        (torch.int8, torch.bfloat16, 70, "hnd"),
        (torch.uint8, torch.bfloat16, 70, "rows"),
        (torch.float8_e4m3fn, torch.float16, 20, "rows"),
        (torch.float8_e5m2, torch.float32, 20, "hnd"),
        (torch.uint8, torch.float32, 1030, "hnd"),
    ],
)
def test_quantised_rows_have_the_references_bytes(stored, new, tokens, layout, kernels, device):
    torch.manual_seed(0)
    heads, dims = 3, (24, 18)
    key, value = ((torch.randn(tokens, heads, d) * 3).to(new) for d in dims)
    key[5], value[7, 1], key[9] = 0.0, 0.0, key[9] * 2.0**-12
    caches = [x.to(device) for x in caches_of(stored, layout, heads, dims)]
    wanted = caches_of(stored, layout, heads, dims)
    slots = torch.randperm(1200)[:tokens]
    slots[::7], slots[3] = -1, 1204
    tensors = (x.to(device) for x in (key, value))
    kernels.reshape_and_cache_quantize(*tensors, *caches, slots.to(device))
    inside = slots.where(slots < 1200, -1)
    reference.reshape_and_cache_quantize(key, value, *wanted, inside)
    for found, want in zip(caches, wanted, strict=True):
        # as bytes: also the zeros and the scales of other slots
        found, want = (x.cpu().contiguous().view(torch.uint8) for x in (found, want))
        assert torch.equal(found, want)
