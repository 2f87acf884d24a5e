"""Faults of caches with scales by token and of int4, seeded one at a time: each has to be found."""

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.testing import EXTENDED, assert_accurate, build


def swap_nibbles(x):
    return x << 4 | x >> 4


def of_the_next_token(scales):
    """Each slot of a page with the scale of the slot behind it; the unwritten ones are 1."""
    return scales.nan_to_num(1.0).roll(-1, -1)


def of_the_other_head(scales):
    return scales.roll(1, 1)


def by_page(scales):
    """The scale of a page's first token for all of its tokens."""
    return scales[..., :1].expand_as(scales)


FAULTS = {
    "nibbles of keys swapped": ("vllm/tokens_int4/bf16", "k", swap_nibbles),
    "nibbles of values swapped": ("vllm/tokens_int4/bf16", "v", swap_nibbles),
    "unsigned int4": ("vllm/tokens_int4/bf16", "v", lambda x: x ^ 0x88),
    "next token's key scale": ("vllm/tokens_int8/bf16", "k_descale", of_the_next_token),
    "next token's value scale": ("vllm/tokens_int8/bf16", "v_descale", of_the_next_token),
    "other head's key scale": ("vllm/tokens_e4m3/f16", "k_descale", of_the_other_head),
    "other head's value scale": ("vllm/tokens_e4m3/f16", "v_descale", of_the_other_head),
    "page's value scale": ("vllm/tokens_int8/bf16", "v_descale", by_page),
    "no value scale": ("vllm/tokens_int8/bf16", "v_descale", torch.ones_like),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_each_fault_is_found(fault):
    name, argument, change = FAULTS[fault]
    call = build(EXTENDED[name])
    wrong = call.args | {argument: change(call.args[argument])}
    results = reference.flash_varlen(**wrong, precision=reference.BASELINE)
    with pytest.raises(AssertionError):
        assert_accurate(*results, call.truth())
