"""With `batch_invariant`, all calls of a model on Hopper take one kernel with one order of sums, or
are refused: prompts packed and in pages, chunks, draft tokens and decodes, in any batch.
"""

import dataclasses

import torch
from hopper_calls import HOPPER, hopper_call
from hypothesis import given, settings
from hypothesis import strategies as st

from torch_paged_attn.backends.triton import flash_varlen
from torch_paged_attn.backends.triton.common.seqlen_info import key_bound
from torch_paged_attn.backends.triton.hopper.forward import choices, tiles
from torch_paged_attn.backends.triton.portable.forward import tiles as portable
from torch_paged_attn.backends.triton.runtime.target import assume, target_of
from torch_paged_attn.testing import Problem

BF16 = torch.bfloat16
PACKED = {"packed": ((300, 0), (70, 0))}
PAGED = {
    "prompts": ((300, 0), (70, 0)),
    "chunk": ((130, 500),),
    "guessed": ((4, 700), (4, 31)),
    "decode": ((1, 900),),
    "decodes": ((1, 90),) * 40,
    "mixed": ((1, 300), (129, 0), (1, 5)),
}
REFUSED = "refused"


@st.composite
def models(draw):
    """A model's attention, with a cache in pages."""
    kv_heads, group = draw(st.sampled_from([1, 2, 4])), draw(st.integers(1, 9))
    dim = draw(st.sampled_from([16, 64, 72, 80, 96, 112, 128, 192, 256]))
    kv_dtype = draw(st.sampled_from([None, None, None, torch.float8_e4m3fn, torch.int8]))
    window = draw(st.sampled_from([-1, -1, 50, 700]))
    page_size = draw(st.sampled_from([1, 2, 3, 4, 8, 12, 16, 24, 32, 64, 100, 128]))
    options = {"kv_dtype": kv_dtype, "window_size_left": window, "page_size": page_size}
    options |= {"sinks": draw(st.booleans()), "softcap": draw(st.sampled_from([0.0, 20.0]))}
    if draw(st.booleans()) and kv_dtype is None:
        options["alibi"] = "heads"
    dtype = draw(st.sampled_from([BF16, torch.float16, torch.float32]))
    heads = (group * kv_heads, kv_heads, dim)
    return Problem("model", PAGED["decode"], *heads, dtype=dtype, batch_invariant=True, **options)


def order_of_sums(problem):
    """The kernel of a call, and all of its choices that say in which order a row is added up."""
    call = hopper_call(problem)
    call, _ = flash_varlen.with_aligned_copies(call)
    try:
        flash_varlen.refuse_other_bits(call)
    except NotImplementedError:
        return REFUSED
    choice = flash_varlen.choose(call)
    if choice.kernel == "hopper":
        form = choice.form
        options = tiles.options_of(call, *choices.choose_tiles(call, form), form)
        return choice.kernel, options.BLOCK_N, options.WIDTH, options.COLUMNS, options.STRETCH
    traits = portable.traits_of(call, target_of(call.q.device))
    chosen = portable.choose_tiles(traits, call.total_q, call.batch, key_bound(call))
    return choice.kernel, chosen.config, chosen.block_n, chosen.fixed_units


@given(models())
@settings(max_examples=40, deadline=None)
def test_all_calls_of_a_model_add_up_in_one_order(model):
    with assume(HOPPER):
        found = {
            name: order_of_sums(dataclasses.replace(model, seqs=seqs))
            for name, seqs in PAGED.items()
        }
        if model.kv_dtype is None:
            packed = dataclasses.replace(model, seqs=PACKED["packed"], page_size=None)
            found["packed"] = order_of_sums(packed)
            assert found["packed"] != REFUSED
    # a refusal is of a page size, of all calls or of none
    assert len({found[name] for name in PAGED}) == 1, found
    assert REFUSED in found.values() or len(set(found.values())) == 1, found
    if model.page_size % 16 == 0:
        assert REFUSED not in found.values()


def test_what_is_refused():
    """Pages that Hopper's kernel cannot read, of heads that it runs elsewhere."""
    for dim, page_size, is_refused in [
        (96, 1, True), (96, 16, False), (128, 1, False), (128, 24, True), (20, 24, False),
    ]:  # fmt: skip
        problem = Problem(
            "pages",
            PAGED["decode"],
            8,
            2,
            dim,
            dtype=BF16,
            page_size=page_size,
            batch_invariant=True,
        )
        with assume(HOPPER):
            assert (order_of_sums(problem) == REFUSED) is is_refused, (dim, page_size)
            free = dataclasses.replace(problem, batch_invariant=False)
            assert order_of_sums(free) != REFUSED
