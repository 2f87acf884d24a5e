"""The accuracy rule sees the mistakes that kernels make, and lets a good kernel pass."""

import math

import pytest
import torch

from torch_paged_attn.reference import flash_varlen
from torch_paged_attn.testing import Truth, assert_close_as_baseline
from torch_paged_attn.testing.inputs import cumulative


def online(q, k, v, tile=32, mistake=""):
    """A tiled kernel in float32 with rounded probabilities, and one mistake at a time."""
    rows, heads, dim = q.shape
    m = torch.full((heads, rows, 1), -math.inf)
    total, acc = torch.zeros(heads, rows, 1), torch.zeros(heads, rows, v.shape[2])
    keys = k.shape[0] - (mistake == "drops the last key")
    for start in range(0, keys, tile):
        kt, vt = (t[start : min(start + tile, keys)].float() for t in (k, v))
        s = torch.einsum("qhd,khd->hqk", q.float(), kt) * dim**-0.5
        if mistake == "rounds scores":
            s = s.bfloat16().float()
        m_new = torch.maximum(m, s.amax(-1, keepdim=True))
        p, rescale = (s - m_new).exp(), (m - m_new).exp()
        total = total * rescale + p.sum(-1, keepdim=True)
        acc = acc * rescale + torch.einsum("hqk,khd->hqd", p.to(q.dtype).float(), vt)
        if mistake == "rounds the accumulator":
            acc = acc.bfloat16().float()
        m = m_new
    return (acc / total).transpose(0, 1).to(q.dtype)


def verdict(keys, mistake="", seed=0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 4, 64, generator=g).bfloat16() for n in (17, keys, keys))
    bounds = (cumulative([17]), cumulative([keys]))
    truth = Truth.of(flash_varlen, q, k, v, *bounds)
    result = online(q, k, v, mistake=mistake)
    assert_close_as_baseline(result, truth.out, truth.allowed, truth.luck)


@pytest.mark.parametrize("keys", [1, 5, 64, 513, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_a_good_kernel_passes(keys, seed):
    verdict(keys, seed=seed)


@pytest.mark.parametrize("keys", [513, 4096])
@pytest.mark.parametrize(
    "mistake", ["drops the last key", "rounds scores", "rounds the accumulator"]
)
def test_a_mistake_is_found(keys, mistake):
    with pytest.raises(AssertionError, match=r"(max|mean) error"):
        verdict(keys, mistake)


def test_nan_and_lost_rows_are_found():
    golden = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    for bad in (math.nan, math.inf, 0.0):
        actual = golden.float()
        actual[3] = bad
        with pytest.raises(AssertionError):
            assert_close_as_baseline(actual, golden, 1e-7 * golden.abs(), 1e-7 * golden.abs())
