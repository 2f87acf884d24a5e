"""The accuracy rule sees the mistakes that kernels make, and lets a good kernel pass."""

import dataclasses
import math

import pytest
import torch

from torch_paged_attn.reference import flash_varlen, merge_states
from torch_paged_attn.testing import (
    MergeGradients,
    Truth,
    assert_accurate,
    assert_accurate_merge_gradients,
    assert_as_right_as,
    assert_close_as_baseline,
    assert_same_in_float64,
)
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


def problem(keys, rows=17, seed=0, dtype=torch.bfloat16):
    """q, k, v of one sequence of four heads, and the truth about them."""
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, 4, 64, generator=g).to(dtype) for n in (rows, keys, keys))
    return (q, k, v), Truth.of(flash_varlen, q, k, v, cumulative([rows]), cumulative([keys]))


def verdict(keys, mistake="", seed=0, dtype=torch.bfloat16):
    args, truth = problem(keys, seed=seed, dtype=dtype)
    assert_accurate(online(*args, mistake=mistake), truth.softmax_lse.float(), truth)


def judge_all_numbers(out, truth):
    """What the rule was before it judged rows."""
    assert_close_as_baseline(out, truth.out, truth.allowed, truth.luck)


@pytest.mark.parametrize("keys", [1, 5, 64, 513, 4096])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_good_kernel(keys, seed, dtype):
    verdict(keys, seed=seed, dtype=dtype)


@pytest.mark.parametrize("keys", [513, 4096])
@pytest.mark.parametrize(
    "mistake", ["drops the last key", "rounds scores", "rounds the accumulator"]
)
def test_mistake(keys, mistake):
    with pytest.raises(AssertionError, match=r"(max|mean) error|row "):
        verdict(keys, mistake)


def test_nan_and_lost_rows():
    golden = torch.randn(8, 2, 4, generator=torch.Generator().manual_seed(0)).double()
    for bad in (math.nan, math.inf, 0.0):
        actual = golden.float()
        actual[3] = bad
        with pytest.raises(AssertionError):
            assert_close_as_baseline(actual, golden, 1e-7 * golden.abs(), 1e-7 * golden.abs())


@pytest.mark.parametrize("keys", [1, 2, 7, 64, 513])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("factor", [0.99, 1.01])
def test_scaled_row(factor, keys, seed):
    """About one unit in the last place of each number, all of them in one direction."""
    args, truth = problem(keys, rows=2, seed=seed)
    out = online(*args)
    row, head = divmod(int(truth.out.norm(dim=-1).argmin()), 4)
    out[row, head] *= factor
    judge_all_numbers(out, truth)
    with pytest.raises(AssertionError, match=f"row {row} of head {head}: error"):
        assert_accurate(out, truth.softmax_lse.float(), truth)


def test_row_without_one_key():
    """One row of many, whose lost key is one of many, beside a larger row that sees one key."""
    (q, k, v), truth = problem(513, rows=64)
    alone, small = problem(1, rows=1)
    truth = Truth.joined([small, truth])
    out = torch.cat([online(*alone), online(q, k, v)])
    assert_accurate(out, truth.softmax_lse.float(), truth)
    out[41, 2] = online(q[40:41], k, v, mistake="drops the last key")[0, 2]
    judge_all_numbers(out, truth)
    with pytest.raises(AssertionError, match="row 41 of head 2: error"):
        assert_accurate(out, truth.softmax_lse.float(), truth)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "error, rows", [(9e-4, slice(None)), (5e-5, slice(3, 4)), (1e-5, slice(None))]
)
def test_lse(error, rows, dtype):
    args, truth = problem(64, dtype=dtype)
    lse = truth.softmax_lse.float()
    out = online(*args)
    assert_accurate(out, lse, truth)
    lse[:, rows] += error
    with pytest.raises(AssertionError, match="softmax_lse is off by"):
        assert_accurate(out, lse, truth)


def test_products_added_up_one_by_one():
    """Products that point one way have long partial sums, each of which float32 rounds."""
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 1, 128, generator=g) + 0.5 for n in (2048, 1))
    k, v = (64 * k).round(), torch.ones(1, 1, 128)
    truth = Truth.of(flash_varlen, q, k, v, cumulative([2048]), cumulative([1]))
    dots = torch.zeros(2048)
    for x, y in zip(q[:, 0].T, k[0, 0], strict=True):
        dots += x * y
    lse = dots[None] * 128**-0.5
    assert_accurate(v.expand_as(q), lse, truth)
    with pytest.raises(AssertionError, match="softmax_lse is off by"):
        assert_accurate(v.expand_as(q), lse * (1 + 2e-6), truth)


def test_rows_without_a_key_are_exact():
    _, truth = problem(64)
    out, lse = torch.zeros(17, 4, 64), torch.full((4, 17), -math.inf)
    truth = dataclasses.replace(truth, out=out.double(), softmax_lse=lse.double())
    assert_accurate(out.bfloat16(), lse, truth)
    lse[2, 5] = -1e30
    with pytest.raises(AssertionError, match="rows that see no key"):
        assert_accurate(out.bfloat16(), lse, truth)


def products(dtype, seed=0):
    """A product in a dtype, and the factors in float64: what a layer of a model comes to."""
    g = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(64, 64, generator=g).to(dtype) for _ in range(2))
    return a, b, a.double() @ b.double()


def with_fewer_digits(x):
    return (16 * x.float()).to(torch.float8_e4m3fn).to(x.dtype) / 16


WRONG_PRODUCTS = {
    "a term is lost": lambda a, b: a[:, 1:] @ b[1:],
    "a row is scaled": lambda a, b: torch.cat([1.03 * (a[:1] @ b), a[1:] @ b]),
    "fewer digits": lambda a, b: with_fewer_digits(a) @ b,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_as_right_as_a_peer(dtype):
    """The same sums in another order are."""
    a, b, golden = products(dtype)
    halves = a[:, :32].float() @ b[:32].float() + a[:, 32:].float() @ b[32:].float()
    assert_as_right_as(halves.to(dtype), golden, a @ b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mistake", WRONG_PRODUCTS)
def test_not_as_right_as_a_peer(mistake, dtype):
    a, b, golden = products(dtype)
    with pytest.raises(AssertionError, match=r"(max|mean) error"):
        assert_as_right_as(WRONG_PRODUCTS[mistake](a, b), golden, a @ b)


def test_two_formulas_in_float64():
    a, b, golden = products(torch.float32)
    a, b = a.double(), b.double()
    assert_same_in_float64(a[:, :32] @ b[:32] + a[:, 32:] @ b[32:], golden)
    with pytest.raises(AssertionError, match="off by"):
        assert_same_in_float64(golden * (1 + 1e-10), golden)
    with pytest.raises(AssertionError, match="float32"):
        assert_same_in_float64(golden.float(), golden)
    with pytest.raises(AssertionError, match="shape"):
        assert_same_in_float64(golden[:1], golden)
    with pytest.raises(AssertionError, match="off by"):
        assert_same_in_float64(golden.masked_fill(golden == golden.max(), math.nan), golden)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_merged_states(dtype):
    g = torch.Generator().manual_seed(0)
    parts = [
        x
        for _ in range(2)
        for x in (torch.randn(37, 5, 33, generator=g).to(dtype), torch.randn(5, 37, generator=g))
    ]
    out, lse = merge_states(*parts)
    dout, dlse = torch.randn(out.shape, generator=g).to(dtype), torch.randn(lse.shape, generator=g)
    truth = MergeGradients.by_reference(parts, dout, dlse, out, lse)
    assert_accurate_merge_gradients(truth.baseline, truth)
    for i, gradient in enumerate(truth.baseline):
        for factor in (0.97, 1.03):
            found = list(truth.baseline)
            found[i] = gradient * factor
            with pytest.raises(AssertionError, match=r"(max|mean) error"):
                assert_accurate_merge_gradients(found, truth)
