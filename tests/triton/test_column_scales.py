"""Latents with scales by column, whose results the suite of all backends judges: Hopper's own
kernel takes decodes, the portable one the rest; and a plan for packed ones is for their number.
"""

import dataclasses

import pytest
import torch
from hopper_calls import HAS_HOPPER, HOPPER, hopper_call

from torch_paged_attn import explain
from torch_paged_attn.backends.triton import flash_varlen
from torch_paged_attn.backends.triton.runtime.target import assume
from torch_paged_attn.testing import EXTENDED, Layout, assert_accurate, build

PAGED = EXTENDED["deepseek_mla/latent_columns/bf16"]
PACKED = dataclasses.replace(PAGED, page_size=None, cache_layout="hnd")
DECODES = dataclasses.replace(PAGED, seqs=((1, 700), (1, 64), (1, 0)) * 9)
DRAWN = tuple(
    dataclasses.replace(DECODES, num_heads=heads, **changes)
    for heads, changes in (
        (16, {"causal": False}),
        (8, {"page_size": 1}),
        (5, {"page_size": 544, "seqs": ((1, 3000), (1, 1), (1, 20))}),
        (9, {"page_size": 48, "lengths": "cu_seqlens_k", "seqs": ((1, 9000),)}),
        (16, {"seqs": ((2, 700), (1, 1300), (0, 90), (1, -1))}),
        (7, {"seqs": ((1, 700), (0, 90), (0, 0), (1, 64)), "padding_rows": 2}),
        # more sequences than programs
        (8, {"seqs": tuple((1, 5 * i) for i in range(160))}),
        (16, {"seqs": tuple((1 + i % 2, 700 - 4 * i) for i in range(150)), "page_seed": 3}),
    )
)


def choice(problem, **changes):
    with assume(HOPPER):
        return flash_varlen.choose(hopper_call(problem, **changes), 1)


@pytest.mark.parametrize("problem", [DECODES, *DRAWN], ids=lambda p: f"h{p.num_heads}")
def test_decodes_take_hoppers_kernel(problem):
    assert choice(problem) == flash_varlen.Choice("hopper columns")


@pytest.mark.parametrize(
    "problem, changes, word",
    [
        (PAGED, {}, "more than 2 queries"),
        (dataclasses.replace(DECODES, seqs=((1, 60),) * 3), {}, "fewer than 500 keys"),
        (dataclasses.replace(DECODES, num_heads=17), {}, "more than 16 heads"),
        (dataclasses.replace(DECODES, dtype=torch.float16), {}, "float16"),
        (dataclasses.replace(DECODES, v_dtype=torch.uint8), {}, "uint8"),
        (dataclasses.replace(DECODES, head_dim=32), {}, "heads are 32"),
        (dataclasses.replace(DECODES, layout=Layout()), {}, "no layout"),
        (dataclasses.replace(DECODES, page_size=None, cache_layout="hnd"), {}, "equally far apart"),
        (DECODES, {"batch_invariant": True}, "depend on the batch"),
        (DECODES, {"softcap": 1.0}, "softcap"),
        (DECODES, {"window_size_left": 9}, "windows"),
        (DECODES, {"sinks": torch.zeros(16)}, "sinks"),
        (DECODES, {"q_position": torch.zeros(27, dtype=torch.int32)}, "q_position"),
        (DECODES, {"softmax_scale": -1.0}, "softmax_scale"),
        (DECODES, {"out_dtype": torch.float32}, "out_dtype"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_the_portable_kernel_takes_the_rest(problem, changes, word):
    found = choice(problem, **changes)
    assert found.kernel == "portable"
    assert word in found.reason


def test_explain_says_why():
    found = explain("flash_varlen", **build(PAGED).args, target="sm90:132").paths["triton"]
    assert (found.kernel, found.reason) == ("portable", choice(PAGED).reason)
    found = explain("flash_varlen", **build(DECODES).args, target="sm90:132").paths["triton"]
    assert found.kernel == "hopper columns"
    assert found.details["hopper"]["keys_per_tile"] == 128


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("problem", [DECODES, *DRAWN], ids=lambda p: f"h{p.num_heads}")
def test_agrees_with_the_reference(problem):
    first, second = (build(problem).to("cuda").run() for _ in range(2))
    assert_accurate(*first, build(problem).truth())
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("problem, is_known", [(PAGED, True), (PACKED, False)])
def test_a_plan_for_packed_latents_is_for_their_number_alone(problem, is_known):
    """As their scales' first dimension follows from it, and no rule checks calls of other sizes."""
    assert (flash_varlen.sizes_of(hopper_call(problem)) is not None) == is_known
