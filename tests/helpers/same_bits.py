"""Whether results are equal to the last bit."""

import torch


def bits(results):
    """Results as bytes: NaN equals NaN, and 0.0 is not -0.0."""
    # JAX gives an empty tensor strides of 0, which `contiguous` leaves and `view` refuses
    return [t.clone(memory_format=torch.contiguous_format).view(torch.uint8) for t in results]


def same_bits(one, other):
    """Of as many results each."""
    return all(torch.equal(a, b) for a, b in zip(bits(one), bits(other), strict=True))


def assert_same_bits(one, other):
    assert same_bits(one, other)
