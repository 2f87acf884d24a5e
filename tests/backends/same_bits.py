"""Whether results are equal to the last bit."""

import torch


def bits(results):
    """Results as bytes: NaN equals NaN, and 0.0 is not -0.0."""
    # JAX gives an empty tensor strides of 0, which `contiguous` leaves and `view` refuses
    return [t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in results]


def assert_same_bits(one, other):
    for a, b in zip(bits(one), bits(other), strict=True):
        assert torch.equal(a, b)
