"""Biases of any size: only -inf hides a key."""

import pytest
import torch

from torch_paged_attn.testing import Problem, assert_accurate, build

LEAST = torch.finfo(torch.float32).min


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["f16", "f32"])
@pytest.mark.parametrize("page_size", [None, 16], ids=["packed", "paged"])
def test_least_bias(page_size, dtype, run, device):
    """The least float32 is what Transformers' masks hold: a row that has it everywhere is the mean
    of its values, and one that has it in places ignores those.
    """
    seqs = ((20, 0), (3, 0)) if page_size is None else ((1, 300), (3, 20))
    problem = Problem("least", seqs, 4, 2, 32, dtype=dtype, page_size=page_size, bias="float")
    call = build(problem)
    bias = call.args["attn_bias"].float()
    is_least = torch.ones_like(bias, dtype=torch.bool)
    is_least[:, -1, 1:] = False
    call.args["attn_bias"] = bias.masked_fill(is_least & ~bias.isnan(), LEAST)
    assert_accurate(*run(call.to(device)), call.truth())
