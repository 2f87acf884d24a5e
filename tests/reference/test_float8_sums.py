"""Products of float8 as Hopper adds them up: what the accuracy rule grants them, and nothing more.

On one H200, 99.99 % of 65,536 sums of 128 products had exactly the bits of `cut_off`.
"""

import pytest
import torch

from torch_paged_attn.reference import flash_varlen
from torch_paged_attn.testing import Truth, assert_accurate
from torch_paged_attn.testing.inputs import cumulative

SCALE = 128**-0.5


def exponent(x):
    return torch.frexp(x)[1] - 1


def cut_off(q, k, bits=13):
    """(heads, rows, keys): 32 products at a time and what there is, each cut off so many bits below
    the largest exponent, which is that of the factors; then the sum, to as many."""
    total = torch.zeros(q.shape[1], q.shape[0], k.shape[0], dtype=torch.float64)
    for i in range(0, q.shape[2], 32):
        a, b = (x[..., i : i + 32].double().transpose(0, 1) for x in (q, k))
        a, b = a[:, :, None], b[:, None]
        terms = torch.cat([a * b, total[..., None]], -1)
        # numbers below 2**-6 have its exponent
        of_factors = exponent(a).clamp(min=-6) + exponent(b).clamp(min=-6)
        largest = torch.cat([of_factors, exponent(total)[..., None]], -1).where(terms != 0, -99)
        unit = torch.exp2((largest.amax(-1, keepdim=True) - bits).double())
        total = ((terms / unit).trunc() * unit).sum(-1)
        unit = torch.exp2((exponent(total) - bits).double())
        total = (total / unit).trunc() * unit
    return total


def verdict(keys, bits=13, cuts_off=True, spread=1.0):
    """Raise unless a kernel that is exact but for its sums of products passes."""
    g = torch.Generator().manual_seed(keys)
    q, k, v = (
        (spread * torch.randn(n, 2, 128, generator=g)).to(torch.float8_e4m3fn)
        for n in (17, keys, keys)
    )
    options = dict(softmax_scale=SCALE / spread**2, out_dtype=torch.bfloat16)
    bounds = cumulative([17]), cumulative([keys])
    truth = Truth.of(flash_varlen, q, k, v, *bounds, cuts_off=cuts_off, **options)
    s = cut_off(q, k, bits) * options["softmax_scale"]
    out = (s.softmax(-1) @ v.double().transpose(0, 1)).transpose(0, 1)
    assert_accurate(out.bfloat16(), s.logsumexp(-1).float(), truth)


@pytest.mark.parametrize("spread", [1.0, 9.0])
@pytest.mark.parametrize("keys", [1, 40, 200])
def test_sums_of_hopper(keys, spread):
    verdict(keys, spread=spread)


@pytest.mark.parametrize("keys", [1, 40, 200])
def test_others_are_granted_none_of_it(keys):
    with pytest.raises(AssertionError, match="softmax_lse"):
        verdict(keys, cuts_off=False)


@pytest.mark.parametrize("keys", [1, 40, 200])
def test_sums_that_are_cut_off_further(keys):
    with pytest.raises(AssertionError, match=r"softmax_lse|error"):
        verdict(keys, bits=7)
