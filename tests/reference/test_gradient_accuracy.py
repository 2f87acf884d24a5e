"""The accuracy rule sees the mistakes that backward kernels make, and lets a good kernel pass."""

import functools

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.testing import Gradients, assert_accurate_gradients
from torch_paged_attn.testing.inputs import cumulative

HEADS, DIM = 2, 64


@functools.cache
def problem(keys, rows, seed, dtype, first=1.0):
    """A call of one sequence, what a loss hands back, and the truth about it. The first row's is
    multiplied by a number.
    """
    g = torch.Generator().manual_seed(seed)
    q, k, v, dout = (
        torch.randn(n, HEADS, DIM, generator=g).to(dtype) for n in (rows, keys, keys, rows)
    )
    dlse = torch.randn(HEADS, rows, generator=g)
    dout[0] *= first
    dlse[:, 0] *= first
    lengths = {"cu_seqlens_q": cumulative([rows]), "cu_seqlens_k": cumulative([keys])}
    call = {"q": q, "k": k, "v": v, **lengths}
    return call, dout, dlse, Gradients.by_reference("flash_varlen", call, dout, dlse)


def kernel(call, dout, dlse, tile=256, mistake=""):
    """A tiled backward without masks in float32, weights rounded, and one mistake at a time."""
    q, k, v = (call[name] for name in "qkv")
    out, lse = reference.flash_varlen(**call, precision=reference.BASELINE)
    dtype, scale = q.dtype, DIM**-0.5

    def rounded(x, to=dtype):
        return x.to(to).float()

    def heads_first(x):
        return x.transpose(0, 1).float()

    lse = lse[..., None] + 1e-3 * (mistake == "lse off by 1e-3")
    q, dout = heads_first(q), heads_first(dout)
    d = (dout * heads_first(out)).sum(-1, keepdim=True)
    if mistake != "forgets dlse":
        d = d - dlse[..., None]
    if mistake == "rounds D":
        d = rounded(d, torch.bfloat16)
    dq, dk, dv = torch.zeros_like(q), [], []
    for start in range(0, k.shape[0], tile):
        k_tile, v_tile = (heads_first(x[start : start + tile]) for x in (k, v))
        p = (q @ k_tile.mT * scale - lse).exp()
        if mistake == "drops a key" and start == tile:
            p[..., 7] = 0.0
        dp = dout @ v_tile.mT
        if mistake == "rounds dP":
            dp = rounded(dp)
        ds = rounded((rounded(p) if mistake == "rounds P in dS" else p) * (dp - d))
        dq += scale * ds @ k_tile
        if mistake == "adds dQ up in 16 bits":
            dq = rounded(dq)
        dk.append(scale * ds.mT @ q)
        dv.append(rounded(p).mT @ dout)
    tensors = dq, torch.cat(dk, 1), torch.cat(dv, 1)
    none = torch.empty(0, dtype=dtype)
    return *(x.transpose(0, 1).to(dtype) for x in tensors), none, none.clone()


DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("keys, rows", [(1, 1), (5, 3), (64, 2), (2048, 64), (300, 300)])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_good_kernel(keys, rows, seed, dtype):
    call, dout, dlse, truth = problem(keys, rows, seed, dtype)
    for tile in (256, 100):
        assert_accurate_gradients(kernel(call, dout, dlse, tile), truth)


@pytest.mark.parametrize(
    "dtype, mistake",
    [
        *((dtype, m) for dtype in DTYPES for m in ("drops a key", "forgets dlse")),
        *((torch.float16, m) for m in ("lse off by 1e-3", "rounds D", "rounds dP")),
        (torch.float16, "rounds P in dS"),
        *((torch.bfloat16, m) for m in ("rounds dP", "rounds P in dS", "adds dQ up in 16 bits")),
        (torch.float32, "lse off by 1e-3"),
        (torch.float32, "rounds D"),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "first",
    [1.0, pytest.param(16.0, marks=pytest.mark.thorough), 256.0],
    ids=["alike", "one large row", "one huge row"],
)
def test_mistake(dtype, mistake, first):
    """Also where one row of 64 has a fifth of all error, or most of it. In a call of one row, dQ
    that was added up in 16 bits cannot be told among luck."""
    call, dout, dlse, truth = problem(2048, 64, 0, dtype, first)
    with pytest.raises(AssertionError, match=r"^d[qkv]: ((max|mean) error|row )"):
        assert_accurate_gradients(kernel(call, dout, dlse, mistake=mistake), truth)


@pytest.mark.parametrize("which", range(3), ids=["dq", "dk", "dv"])
@pytest.mark.parametrize("keys, rows", [(300, 300), (2048, 64)])
@pytest.mark.parametrize("factor", [0.99, pytest.param(1.01, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scaled_row(dtype, factor, keys, rows, which):
    """In bfloat16 about one unit in the last place of each number, all in one direction."""
    call, dout, dlse, truth = problem(keys, rows, 0, dtype)
    found = kernel(call, dout, dlse)
    found[which][1, 1] *= factor
    name = ("dq", "dk", "dv")[which]
    with pytest.raises(AssertionError, match=rf"^{name}: (row 1 of head 1|m)"):
        assert_accurate_gradients(found, truth)


@pytest.mark.parametrize("factor", [0.8, 1.2])
def test_scaled_row_of_small_weights(factor):
    """Its weights are no normal numbers of float16: each is some percent off, their sum is not."""
    call, dout, dlse, truth = problem(2048, 64, 0, torch.float16, first=2.0**-12)
    found = kernel(call, dout, dlse)
    assert_accurate_gradients(found, truth)
    found[0][0, 1] *= factor
    with pytest.raises(AssertionError, match=r"^dq: row 0 of head 1"):
        assert_accurate_gradients(found, truth)


def test_what_was_not_asked_for():
    call, dout, dlse, truth = problem(5, 3, 0, torch.float32)
    found = kernel(call, dout, dlse)
    with pytest.raises(AssertionError, match="dbias: shape"):
        assert_accurate_gradients([*found[:3], torch.zeros(1, 3, 5), found[4]], truth)
    with pytest.raises(AssertionError, match=r"dk: torch\.float64"):
        assert_accurate_gradients([found[0], found[1].double(), *found[2:]], truth)
    for bad in (float("nan"), float("inf")):
        found[2][0, 0, 3] = bad
        with pytest.raises(AssertionError, match="dv: 1 values are not finite"):
            assert_accurate_gradients(found, truth)
