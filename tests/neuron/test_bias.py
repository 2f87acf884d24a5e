"""A float bias masks by -inf alone: a key with any other bias counts, however low it is."""

import dataclasses
import itertools

import pytest
import torch
from covering import every_row

from torch_paged_attn.testing import PROBLEMS, assert_accurate, build

T5 = dataclasses.replace(
    PROBLEMS["t5/bias/f32"], num_heads=2, num_kv_heads=2, seqs=((5, 30), (3, 0))
)
MIN = torch.finfo(torch.float32).min
INF = float("inf")

# the biases of a row's keys, one after the other, over and over
MIXTURES = {
    "min": (MIN,),
    "min and -inf": (MIN, -INF),
    "min and half of it": (MIN, MIN / 2),
    "min and 0": (MIN, 0.0),
    "-1e30 and -2e30": (-1e30, -2e30, -1e30),
    "-1e38 and -inf": (-1e38, -INF, -1e38),
    "-inf": (-INF,),
}


# with `--sample`, each mixture on one generation in float32 and on another in bfloat16
EACH = [
    pytest.param(
        *(dtype, mixture, generation),
        marks=() if (i + j) % 3 == generation - 2 else pytest.mark.device_suite,
    )
    for j, dtype in enumerate((torch.bfloat16, torch.float32))
    for i, mixture in enumerate(MIXTURES)
    for generation in (2, 3, 4)
]


@pytest.mark.parametrize(("dtype", "mixture", "machine"), EACH, indirect=["machine"])
def test_low_bias(dtype, mixture, run, machine):
    call = build(dataclasses.replace(T5, dtype=dtype))
    bias = call.args["attn_bias"]
    columns = torch.arange(bias.shape[2]) % len(MIXTURES[mixture])
    # every other row, but for the columns past its keys, which are NaN
    low = torch.tensor(MIXTURES[mixture])[columns].expand_as(bias)
    bias[:, ::2] = low.where(~bias.isnan(), bias)[:, ::2]
    assert_accurate(*run(call), call.truth())


@pytest.mark.parametrize(
    ("machine", "kind", "name"),
    # the sample has each kind and name on one generation
    every_row(3, itertools.product((2, 3, 4), ("bool", "float"), ("k", "v"))),
    indirect=["machine"],
)
def test_a_key_that_a_bias_hides_from_all_may_be_nan(kind, name, run, machine):
    """It lies among keys that rows see, and is gathered with them."""
    call = build(dataclasses.replace(T5, bias=kind))
    call.args["attn_bias"][..., 7] = False if kind == "bool" else -INF
    call.args[name][7] = float("nan")
    out, lse = run(call)
    assert out.isfinite().all() and lse.isfinite().all()
    call.args[name][7] = 0.0
    assert_accurate(out, lse, call.truth())


@pytest.mark.parametrize("sink", [MIN, -INF, -1e38])
def test_low_sink(sink, run, machine):
    problem = dataclasses.replace(
        PROBLEMS["gpt_oss/sinks_window/bf16"], seqs=((5, 30), (3, -3), (2, 0))
    )
    call = build(problem)
    call.args["sinks"].fill_(sink)
    assert_accurate(*run(call), call.truth())
