"""A float bias masks by -inf alone: a key with any other bias counts, however low it is."""

import dataclasses

import pytest
import torch

from torch_paged_attn.testing import PROBLEMS, assert_accurate, build

MIN = torch.finfo(torch.float32).min
INF = float("inf")

# the biases of a row's keys, one after the other, over and over
MIXTURES = (
    (MIN,),
    (MIN, -INF),
    (MIN, MIN / 2),
    (MIN, 0.0),
    (-1e30, -2e30, -1e30),
    (-1e38, -INF, -1e38),
    (-1.8e38, -1.7e38),
    (-INF,),
)


DTYPES = [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.thorough)]
# a row of each mixture; of the same sizes in each test, so that nothing is compiled anew
SEQS = ((len(MIXTURES), 30), (1, 4))


@pytest.mark.device_suite  # a bias of NaN in the sample
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_low_bias(dtype, run):
    """A row of each mixture, and one of as much over two sequences."""
    call = build(dataclasses.replace(PROBLEMS["t5/bias/f32"], dtype=dtype, seqs=SEQS))
    bias = call.args["attn_bias"] = call.args["attn_bias"].float()
    keys = torch.arange(bias.shape[2])
    for row, mixture in enumerate((*MIXTURES, (MIN,))):
        low = torch.tensor(mixture)[keys % len(mixture)].expand(bias.shape[0], -1)
        # columns behind the row's last key stay NaN
        bias[:, row] = low.where(~bias[:, row].isnan(), bias[:, row])
    out, lse = run(call, "on_wait")
    assert_accurate(out, lse, call.truth())
    assert lse[:, 0].eq(MIN).all() and lse[:, -1].eq(MIN).all()


@pytest.mark.device_suite
@pytest.mark.parametrize("sink", [MIN, -1e38, -INF])
def test_low_sink(sink, run):
    """A row without a key has its sink alone."""
    seqs = ((5, 30), (3, -3), (2, 0))
    call = build(dataclasses.replace(PROBLEMS["gpt_oss/sinks_window/bf16"], seqs=seqs))
    call.args["sinks"].fill_(sink)
    assert_accurate(*run(call, "on_wait"), call.truth())


# of a bias `make test` has tests/backends test_hidden_scales
@pytest.mark.device_suite
def test_nan_bias(run):
    """A bias of NaN is a number that makes its row NaN, and no mask."""
    call = build(dataclasses.replace(PROBLEMS["t5/bias/f32"], seqs=SEQS))
    call.args["attn_bias"][:, 1, 5] = float("nan")
    out, lse = run(call, "on_wait")
    assert out[1].isnan().all() and lse[:, 1].isnan().all()
    others = [row for row in range(len(out)) if row != 1]
    assert out[others].isfinite().all() and lse[:, others].isfinite().all()
