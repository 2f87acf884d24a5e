"""`flash_varlen_out` on every backend: the bits of `flash_varlen`, wherever `out` is."""

import dataclasses

import pytest
import torch
from same_bits import assert_same_bits
from sampling import ALL

from torch_paged_attn.testing import PROBLEMS, build

NAMES = (
    "sglang/page1/f16",
    "minilm/packed/f32",
    "llama3_8b/mixed/bf16",
    "llama3_70b_tp8/decode/bf16",
    "llama3_8b/prefill/out_e4m3",
    "deepseek_mla/decode/bf16",
    "vllm/tokens_int8/bf16",
)
CASES = {name: ALL[name] for name in NAMES}


def places(total_q, num_heads, head_dim, dtype):
    """Tensors (total_q, num_heads, head_dim) of ones, each with the whole that it is a part of."""

    def ones(*sizes):
        return torch.ones(sizes).to(dtype)

    whole = ones(total_q, num_heads, head_dim)
    yield whole, whole
    whole = ones(total_q + 2, num_heads, head_dim)
    yield whole[1 : total_q + 1], whole
    whole = ones(total_q, num_heads + 3, head_dim + 16)
    yield whole[:, 2 : num_heads + 2, :head_dim], whole
    whole = ones(num_heads, total_q, head_dim)
    yield whole.transpose(0, 1), whole
    whole = ones(total_q * num_heads * head_dim + 1)
    yield whole[1:].view(total_q, num_heads, head_dim), whole


@pytest.mark.over(CASES)
def test_out(case, runner):
    """No bit differs, padding rows included, and nothing beside `out` is written."""
    call = build(dataclasses.replace(case, padding_rows=2))
    out, lse = runner.attend(call)
    for view, whole in places(*out.shape, out.dtype):
        written, found = runner.attend_into(call, view, whole)
        view.copy_(out)
        assert_same_bits((whole, lse), (written, found))


def test_out_of_no_sequences(runner):
    call = build(dataclasses.replace(PROBLEMS["sglang/page1/f16"], seqs=()))
    out = call.args["q"].new_empty(0, call.args["q"].shape[1], call.args["v"].shape[-1])
    written, lse = runner.attend_into(call, out, out)
    assert written.shape == out.shape and lse.shape == (out.shape[1], 0)
