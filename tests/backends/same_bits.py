"""Whether results are equal to the last bit."""

import torch


def bits(results):
    """Results as bytes: NaN equals NaN, and 0.0 is not -0.0."""
    return [t.contiguous().view(torch.uint8) for t in results]


def assert_same_bits(one, other):
    for a, b in zip(bits(one), bits(other), strict=True):
        assert torch.equal(a, b)
