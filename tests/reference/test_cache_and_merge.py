"""Hand-computed cache writes and merges."""

import math

import pytest
import torch

import torch_paged_attn
from torch_paged_attn.ops.merge_states import composed_list
from torch_paged_attn.reference import (
    GOLDEN,
    flash_varlen,
    merge_states,
    reshape_and_cache,
    reshape_and_cache_quantize,
)
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


@pytest.mark.parametrize(
    "dtype, stored, largest",
    [
        (torch.int8, [32, -127, 0, 2], 127),
        (torch.float8_e4m3fn, [112.0, -448.0, 0.0, 7.0], 448),
        (torch.float8_e5m2, [14336.0, -57344.0, 0.0, 896.0], 57344),
        (torch.uint8, [2 | 9 << 4, 0], 7),
    ],
)
def test_a_quantised_row_has_the_scale_of_its_largest_number(dtype, stored, largest):
    key = torch.tensor([2.0, -8.0, 0.0, 0.125]).view(1, 1, 4)
    caches = [torch.zeros(2, 1, 2, len(stored)).to(dtype) for _ in range(2)]
    scales = [torch.full((2, 1, 2), math.nan) for _ in range(2)]
    reshape_and_cache_quantize(key, 0.0 * key, *caches, *scales, torch.tensor([3]))
    assert caches[0][1, 0, 1].float().tolist() == stored
    assert scales[0][1, 0, 1] == torch.tensor(8.0) / largest
    # a row of zeros has scale 1, and the scales of other slots stay
    assert scales[1][1, 0, 1] == 1.0 and not caches[1].float().any()
    assert all(int(x.isnan().sum()) == 3 for x in scales)


def test_a_scale_too_small_for_float32_is_one():
    key = torch.full((1, 1, 4), 1e-44)
    caches = [torch.ones(1, 1, 1, 4).to(torch.float8_e5m2) for _ in range(2)]
    scales = [torch.zeros(1, 1, 1) for _ in range(2)]
    reshape_and_cache_quantize(key, key, *caches, *scales, torch.tensor([0]))
    assert scales[0].item() == 1.0 and not caches[0].float().any()


def test_merge_by_hand():
    out_a, out_b = torch.tensor([[[1.0]]]), torch.tensor([[[5.0]]])
    lse_a, lse_b = torch.tensor([[math.log(3)]]), torch.tensor([[math.log(1)]])
    out, lse = merge_states(out_a, lse_a, out_b, lse_b)
    assert out.item() == pytest.approx((3 * 1 + 1 * 5) / 4)
    assert lse.item() == pytest.approx(math.log(4))


@pytest.mark.parametrize("lse_of_none", [-math.inf, math.inf])
def test_merge_of_nothing(lse_of_none):
    none = torch.tensor([[lse_of_none]])
    nan, two = torch.tensor([[[math.nan]]]), torch.tensor([[[2.0]]])
    out, lse = merge_states(nan, none, two, torch.tensor([[0.5]]))
    assert out.item() == 2.0 and lse.item() == 0.5
    out, lse = merge_states(nan, none, nan, none)
    assert out.item() == 0.0 and lse.item() == -math.inf


@pytest.mark.parametrize("far", [1e30, -1e30, torch.finfo(torch.float32).min])
@pytest.mark.parametrize("parts", [2, 3])
def test_merge_of_far_logits(far, parts):
    """The mean of parts of one weight, though the logarithm of their number is lost in softmax_lse:
    a bias of `finfo.min` on all keys gives such rows.
    """
    outs = [torch.full((1, 1, 4), float(i)) for i in range(parts)]
    lses = [torch.full((1, 1), far)] * parts
    for merge in (merge_states, torch_paged_attn.merge_states, composed_list):
        out, lse = merge(outs, lses)
        assert lse.item() == lses[0].item()
        assert_same_in_float64(out.double(), torch.full((1, 1, 4), (parts - 1) / 2).double())


def test_merge_of_what_is_no_number():
    """Is NaN, and no sum of some of the parts."""
    parts = [torch.ones(1, 1, 4)] * 2, [torch.tensor([[math.nan]]), torch.tensor([[0.5]])]
    for merge in (merge_states, torch_paged_attn.merge_states, composed_list):
        assert merge(*parts)[0].isnan().all()


def test_merge_of_flash_attentions_empty_rows():
    """FlashAttention-2 gives them an lse of +inf."""
    two, inf = torch.full((1, 1, 4), 2.0), torch.tensor([[math.inf]])
    for merge in (merge_states, torch_paged_attn.merge_states, composed_list):
        out, lse = merge([torch.zeros(1, 1, 4), two], [inf, torch.tensor([[0.5]])])
        assert torch.equal(out, two) and lse.item() == 0.5


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
