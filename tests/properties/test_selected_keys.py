"""Any plan of `selected_attention`: right by the one rule, the same bits alone and beside NaN."""

import dataclasses

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from same_bits import assert_same_bits
from served import BACKEND, HAS
from unselected import unselected

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops.selected_checks import selected_keys
from torch_paged_attn.testing import (
    Problem,
    Selected,
    assert_accurate,
    assert_accurate_gradients,
    build,
)
from torch_paged_attn.testing.inputs import hostile_gradients
from torch_paged_attn.testing.strategies import selected_problems

if not (BACKEND.is_compiled or BACKEND.has("selected_attention")):
    pytest.skip(f"the {BACKEND.name} backend has no selected_attention", allow_module_level=True)


@given(selected_problems(optional=HAS))
def test_selected_attention_agrees_with_the_reference(problem):
    call = build(problem)
    found = call.run()
    assert_accurate(*found, call.truth())
    again = call.run(max_seqlen_q=0, max_seqlen_k=2**31 - 1)
    assert_same_bits(found, again)


@given(selected_problems(optional=HAS))
def test_selected_bits_depend_on_no_other_sequence_and_no_unseen_key(problem):
    call = build(problem)
    is_unseen = unselected(call)
    names = ["k"] if problem.kv_dtype is None else []
    names += ["v"] if problem.kv_dtype == problem.v_dtype is None else []
    names += {"tokens": ["k_descale", "v_descale"], "columns": ["v_descale"]}.get(
        problem.descale, []
    )
    for name in names:
        call.args[name][call.args[name].isnan()] = 0.0
    out, lse = call.run()
    bounds = call.args["cu_seqlens_q"].tolist()
    for b in range(len(problem.seqs)):
        rows = slice(bounds[b], bounds[b + 1])
        assert_same_bits(call.alone(b).run(), (out[rows], lse[:, rows]))
    for name in names:
        call.args[name][is_unseen] = float("nan")
    assert_same_bits(call.run(), (out, lse))


masks = st.one_of(st.just((True,) * 5), st.tuples(*[st.booleans()] * 5))
PLAIN = Problem("plain", ((2, 12), (0, 4), (3, 0)), 8, 2, 24, 16, selected=Selected(5, 1, "kv"))


@given(selected_problems(trains=True), masks)
@example(PLAIN, (False, True, False, False, False))
def test_selected_gradients_agree_with_the_reference(problem, mask):
    """All of them, and some, of which the others are empty."""
    call = build(problem)
    out, lse = call.run()
    gradients = hostile_gradients(call, out, lse)
    every = call.backward(*gradients, out, lse).run()
    some = call.backward(*gradients, out, lse, output_mask=mask).run()
    truth = call.gradients(*gradients)
    assert_accurate_gradients(every, truth)
    asked = [x if wanted else y for wanted, x, y in zip(mask, some, every, strict=True)]
    assert_accurate_gradients(asked, truth)
    assert all(wanted or x.shape == (0,) for wanted, x in zip(mask, some, strict=True))


@pytest.mark.skipif(BACKEND.name != "cpu", reason="accelerators read no values")
@given(selected_problems(optional=HAS))
def test_a_unit_that_is_listed_twice_is_refused(problem):
    """Anywhere in a list, if the query sees a key of it."""
    selected = dataclasses.replace(problem.selected, counted=False)
    call = build(dataclasses.replace(problem, selected=selected))
    lists = call.args["key_indices"]
    total = int(call.args["cu_seqlens_q"][-1])
    attention = AttentionCall.selected_attention(**call.args)
    _, _, is_seen = selected_keys(attention, slice(0, total))
    counts = is_seen.unflatten(-1, (lists.shape[2], selected.size)).any(-1).nonzero()
    further = torch.full_like(lists[..., :1], -1)
    if len(counts):
        row, group, entry = counts[problem.seed % len(counts)].tolist()
        further[row, group] = lists[row, group, entry]
        with pytest.raises(ValueError, match=rf"key_indices\[{row}, {group}\]"):
            call.run(key_indices=torch.cat([lists, further], -1))
    further[:] = -1
    assert_accurate(*call.run(key_indices=torch.cat([further, lists], -1)), call.truth())
