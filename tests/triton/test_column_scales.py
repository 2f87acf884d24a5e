"""Latents with scales by column, whose results the suite of all backends judges: the portable
kernel takes them on every GPU, and a plan for packed ones is for their number alone.
"""

import dataclasses

import pytest
from hopper_calls import HOPPER, hopper_call

from torch_paged_attn import explain
from torch_paged_attn.backends.triton import flash_varlen
from torch_paged_attn.backends.triton.runtime.target import assume
from torch_paged_attn.testing import EXTENDED, Layout, build

PAGED = EXTENDED["deepseek_mla/latent_columns/bf16"]
PACKED = dataclasses.replace(PAGED, page_size=None, cache_layout="hnd")
DECODES = dataclasses.replace(PAGED, seqs=((1, 700),) * 40)
SPARSE = dataclasses.replace(PAGED, layout=Layout())
NO_KERNEL = "it has no v_descale by column"


@pytest.mark.parametrize("problem", [PAGED, PACKED, DECODES, SPARSE], ids=lambda p: repr(p.seqs))
@pytest.mark.parametrize("is_invariant", [False, True])
def test_hoppers_kernels_leave_them_to_the_portable_one(problem, is_invariant):
    with assume(HOPPER):
        call = hopper_call(dataclasses.replace(problem, batch_invariant=is_invariant))
        assert flash_varlen.choose(call, 1) == flash_varlen.Choice("portable", NO_KERNEL)


def test_explain_says_why():
    path = explain("flash_varlen", **build(PAGED).args, target="sm90:132").paths["triton"]
    assert (path.kernel, path.reason) == ("portable", NO_KERNEL)
    assert "portable" in path.details


@pytest.mark.parametrize("problem, is_known", [(PAGED, True), (PACKED, False)])
def test_a_plan_for_packed_latents_is_for_their_number_alone(problem, is_known):
    """As their scales' first dimension follows from it, and no rule checks calls of other sizes."""
    assert (flash_varlen.sizes_of(hopper_call(problem)) is not None) == is_known
