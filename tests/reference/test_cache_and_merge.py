"""Hand-computed cache writes and merges."""

import math

import pytest
import torch

from torch_paged_attn.reference import GOLDEN, flash_varlen, merge_states, reshape_and_cache
from torch_paged_attn.testing import assert_same_in_float64
from torch_paged_attn.testing.inputs import cumulative


def test_a_slot_is_a_page_and_an_offset():
    key = torch.arange(6.0).view(3, 2, 1)
    cache = torch.full((2, 3, 2, 4, 1), -1.0)
    reshape_and_cache(key, -key, cache, torch.tensor([9, -1, 0]))
    assert cache[0, 2, :, 1, 0].tolist() == [0.0, 1.0]
    assert cache[1, 2, :, 1, 0].tolist() == [0.0, -1.0]
    assert cache[0, 0, :, 0, 0].tolist() == [4.0, 5.0]
    assert (cache != -1.0).sum() == 7  # eight numbers written, one of them -1 itself


@pytest.mark.parametrize(
    "dtype, stored",
    [
        (torch.int8, [2.0, 4.0, -128.0, 127.0]),
        (torch.float8_e4m3fn, [2.5, 3.5, -448.0, 448.0]),
        (torch.float8_e5m2, [2.5, 3.5, -2048.0, 57344.0]),
    ],
)
def test_eight_bits_round_to_even_and_saturate(dtype, stored):
    key = torch.tensor([1.25, 1.75, -1000.0, 1e30]).view(1, 1, 4)
    cache = torch.zeros(2, 1, 1, 1, 4).to(dtype)
    reshape_and_cache(key, key, cache, torch.tensor([0]), torch.tensor(0.5), torch.tensor([1.0]))
    assert cache[0].float().flatten().tolist() == stored


def test_merge_by_hand():
    out_a, out_b = torch.tensor([[[1.0]]]), torch.tensor([[[5.0]]])
    lse_a, lse_b = torch.tensor([[math.log(3)]]), torch.tensor([[math.log(1)]])
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert out.item() == pytest.approx((3 * 1 + 1 * 5) / 4)
    assert lse.item() == pytest.approx(math.log(4))


def test_merge_of_nothing():
    none = torch.tensor([[-math.inf]])
    nan, two = torch.tensor([[[math.nan]]]), torch.tensor([[[2.0]]])
    out, lse = merge_states(nan, none, two, torch.tensor([[0.5]]))
    assert out.item() == 2.0 and lse.item() == 0.5
    out, lse = merge_states(nan, none, nan, none)
    assert out.item() == 0.0 and lse.item() == -math.inf


def test_halves_merge_to_the_whole():
    g = torch.Generator().manual_seed(0)
    q = torch.randn(3, 2, 8, generator=g, dtype=torch.float64)
    k, v = (torch.randn(10, 2, 8, generator=g, dtype=torch.float64) for _ in range(2))

    def over(keys):
        bounds = (cumulative([3]), cumulative([len(k[keys])]))
        return flash_varlen(q, k[keys], v[keys], *bounds, precision=GOLDEN)

    merged = merge_states(*over(slice(0, 4)), *over(slice(4, 10)), precision=GOLDEN)
    for got, want in zip(merged, over(slice(0, 10)), strict=True):
        assert_same_in_float64(got, want)
