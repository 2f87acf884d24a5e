"""What is Triton's own in `reshape_and_cache`: programs that meet at one slot."""

import torch


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
