"""`selected_attention` on every backend that has it, over the problems of `selected_problems.py`.

What no list names is NaN in no problem of its own: `test_selected_unseen_memory` makes it NaN.
"""

import dataclasses

import pytest
import torch
import truths
from gaps import all_with_gaps
from same_bits import assert_same_bits
from sampling import lacked
from unselected import unselected

from torch_paged_attn.testing import (
    SELECTED,
    SELECTED_DIFFERENTIABLE,
    assert_accurate,
    assert_accurate_gradients,
    build,
)
from torch_paged_attn.testing.inputs import hostile_gradients

INF = float("inf")
WITH_GAPS = "selected/everything/f32", "selected/slots_of_units/f32"


def over(keep):
    """Parametrise over the problems that `keep` picks."""
    return pytest.mark.over({name: p for name, p in SELECTED.items() if keep(p)})


@over(lambda p: True)
def test_selected_agrees(case, runner):
    out, lse = runner.attend(build(case))
    assert out.dtype == (case.out_dtype or case.dtype) and lse.dtype == torch.float32
    assert out.is_contiguous() and lse.is_contiguous()
    assert_accurate(out, lse, truths.of(case))


@pytest.mark.lacking(SELECTED)
def test_selected_refuses(case, runner):
    """What a backend lacks, by the argument's name."""
    call = build(case)
    named = [name.partition(" ")[0] for name in lacked(runner, case) - {case.op}]
    named = named or ["select_size", "window_size_left", "k is packed"]
    with pytest.raises(NotImplementedError, match="|".join(named)) as error:
        runner.attend(call)
    assert str(error.value).startswith("selected_attention()")


@over(lambda p: True)
def test_selected_same_bits(case, runner):
    """Twice, and whatever the hints."""
    call = build(case)
    first = runner.attend(call)
    assert_same_bits(first, runner.attend(call))
    assert_same_bits(first, runner.attend(call, max_seqlen_q=0, max_seqlen_k=2**31 + 5))


@over(lambda p: p.page_size is not None and not p.selected.slots)
def test_selected_page_order(case, runner):
    """The order of a cache's pages changes no bit."""
    moved = dataclasses.replace(case, page_seed=case.page_seed + 1, spare_pages=9)
    assert_same_bits(runner.attend(build(case)), runner.attend(build(moved)))


@over(lambda p: p.k_ranges == "")
def test_selected_alone(case, runner):
    """A sequence alone has the bits that it has in its batch."""
    call = build(case)
    with runner.batch_invariant():
        out, lse = runner.attend(call)
        assert_accurate(out, lse, truths.of(case))
        bounds = call.args["cu_seqlens_q"].tolist()
        for b in range(len(case.seqs)):
            rows = slice(bounds[b], bounds[b + 1])
            assert_same_bits(runner.alone(call, b), (out[rows], lse[:, rows]))


@over(lambda p: p.kv_dtype is None and p.v_dtype is None)
def test_selected_unseen_memory(case, runner):
    """Keys that no list names are NaN: no bit changes. So are pages that are not there."""
    call = build(case)
    is_unseen = unselected(call)
    for name in ("k", "v"):
        call.args[name][call.args[name].isnan()] = 0.0
    first = runner.attend(call)
    for name in ("k", "v"):
        call.args[name][is_unseen] = float("nan")
    assert_same_bits(first, runner.attend(call))
    assert first[0].float().isfinite().all()


@over(lambda p: p.name in WITH_GAPS)
def test_selected_gaps(case, runner):
    """Lengths, lists and scales may lie with gaps: no bit changes."""
    call = build(case)
    assert_same_bits(runner.attend(call), runner.attend(all_with_gaps(call)))


@over(lambda p: p.selected.units == "all" or p.selected.own)
def test_selected_order_of_a_list(case, runner):
    """It changes rounding alone."""
    call = build(case)
    flipped = call.args["key_indices"].flip(-1)
    assert_accurate(*runner.attend(call, key_indices=flipped), truths.of(case))


@over(lambda p: p.name == "selected/nothing/f32")
def test_selected_nothing(case, runner):
    """Tokens that see no key are 0, and -inf or the sink in softmax_lse; rows of padding -inf."""
    call = build(dataclasses.replace(case, padding_rows=2))
    out, lse = runner.attend(call)
    assert (out == 0).all() and (lse[:, -2:] == -INF).all()
    assert torch.equal(lse[:, :-2], call.args["sinks"][:, None].expand_as(lse[:, :-2]))


def over_training(keep=lambda p: True):
    return pytest.mark.over({n: p for n, p in SELECTED_DIFFERENTIABLE.items() if keep(p)})


@pytest.mark.gradients
@over_training()
def test_selected_gradients_agree(case, runner):
    call = build(case)
    out, lse = runner.attend(call)
    given = *hostile_gradients(call, out, lse), out, lse
    found = runner.gradients(call, *given)
    assert all(x.is_contiguous() for x in found)
    assert_accurate_gradients(found, truths.of_gradients(case))
    assert_same_bits(found, runner.gradients(call, *given))


@pytest.mark.gradients
@over_training(lambda p: p.name.startswith("selected/training"))
def test_selected_gradients_asked_for(case, runner):
    """Each alone is right; the others are empty."""
    call = build(case)
    out, lse = runner.attend(call)
    given = *hostile_gradients(call, out, lse), out, lse
    alone = []
    for i in range(5):
        mask = tuple(i == j for j in range(5))
        found = runner.gradients(call, *given, output_mask=mask)
        alone.append(found[i])
        assert all(x.shape == (0,) for x in (*found[:i], *found[i + 1 :]))
    assert_accurate_gradients(alone, truths.of_gradients(case))


@pytest.mark.gradients
@over_training(lambda p: p.k_ranges == "" and p.name.startswith("selected/training"))
def test_selected_gradients_unseen_memory(case, runner):
    """Keys that no list names are NaN, and their gradients 0."""
    call = build(case)
    is_unseen = unselected(call)
    for name in ("k", "v"):
        call.args[name][is_unseen] = float("nan")
    out, lse = runner.attend(call)
    dq, dk, dv, *_ = runner.gradients(call, *hostile_gradients(call, out, lse), out, lse)
    assert dq.isfinite().all() and dk.isfinite().all() and dv.isfinite().all()
    assert (dk[is_unseen] == 0).all() and (dv[is_unseen] == 0).all()


@pytest.mark.gradients
@over_training(lambda p: p.name == "selected/training_shared_list/f32")
def test_selected_gradients_by_autograd(case, runner):
    call = build(case)
    out, lse = runner.attend(call)
    dout, dlse = hostile_gradients(call, out, lse)
    found, _ = runner.by_autograd(call, dout, dlse)
    dq, dk, dv, _, dsinks = runner.gradients(call, dout, dlse, out, lse)
    wanted = {"q": dq, "k": dk, "v": dv, "sinks": dsinks}
    assert_same_bits(list(found.values()), [wanted[name] for name in found])
