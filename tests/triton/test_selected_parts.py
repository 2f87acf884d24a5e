"""The backward of lists of single keys on GPUs, where it is done in pieces: more heads than a tile
has, and some tokens at a time."""

import dataclasses

import pytest
import torch
from covering import left_out
from planned_anew import planned_anew

from torch_paged_attn import reference
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected import parts as selected_parts
from torch_paged_attn.backends.triton.portable.selected import unit_gradients
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.testing import Problem, Selected, assert_accurate_gradients, build
from torch_paged_attn.testing.inputs import hostile_gradients

PROBLEM = Problem(
    "pieces", ((2, 12), (0, 4), (3, 0)), 34, 2, 24, 16, dtype=torch.bfloat16, padding_rows=1,
    selected=Selected(5, 1, "kv", holes=0.2),
)  # fmt: skip


def test_pieces(device, monkeypatch):
    small = selected.SelectedConfig(16, 16, 4, 1)
    monkeypatch.setattr(selected, "backward_config_of", lambda call, target: small)
    call = build(PROBLEM)
    out, lse = reference.selected_attention(**call.args)
    given = hostile_gradients(call, out, lse)

    def gradients(*wanted: bool) -> list[torch.Tensor]:
        asked = call.backward(*given, out, lse, output_mask=(*wanted, False, False)).to(device)
        return planned_anew(asked)

    whole = gradients(True, True, True)
    assert_accurate_gradients(whole, call.gradients(*given))
    # two tokens at a time
    monkeypatch.setattr(selected_parts, "MOST_BYTES", 2 * 2 * 5 * 40 * 4)
    assert_accurate_gradients(gradients(True, True, True), call.gradients(*given))
    # of some gradients, the same bits
    monkeypatch.undo()
    monkeypatch.setattr(selected, "backward_config_of", lambda call, target: small)
    _, dk, *others = gradients(False, True, False)
    assert torch.equal(dk, whole[1]) and others[0].numel() == 0


def test_parts_in_float16(device, monkeypatch):
    """As of 16-bit products, which an interpreter does not compute."""
    config = selected.SelectedConfig(16, 16, 4, 1)
    monkeypatch.setattr(selected, "parts_config_of", lambda call, target: config)
    monkeypatch.setattr(selected_parts, "part_dtype", lambda call, dtype: torch.float16)
    call = build(dataclasses.replace(PROBLEM, num_heads=32))
    out, lse = reference.selected_attention(**call.args)
    given = hostile_gradients(call, out, lse)
    asked = call.backward(*given, out, lse).to(device)
    found = planned_anew(asked)
    assert_accurate_gradients(found, call.gradients(*given))


@pytest.mark.parametrize(
    ("size", "dtype"),
    [
        *((32, torch.float16), (8, torch.float32)),
        *(left_out(8, torch.float16), left_out(32, torch.float32)),
    ],
)
def test_parts_of_units(size, dtype, device, monkeypatch):
    """dq from units that leave parts, units cut into tiles; all tokens at a time, and some."""
    small = selected.SelectedConfig(32, 16, 4, 1)
    monkeypatch.setattr(selected, "unit_config_of", lambda call, target: small)
    monkeypatch.setattr(selected, "leaves_query_parts", lambda call, target: True)
    monkeypatch.setattr(unit_gradients, "part_dtype", lambda call, of: dtype)
    problem = dataclasses.replace(
        PROBLEM, seqs=((5, 70), (0, 4), (20, 30)), num_heads=10, selected=Selected(3, size, "kv")
    )
    call = build(problem)
    out, lse = reference.selected_attention(**call.args)
    given = hostile_gradients(call, out, lse)
    asked = call.backward(*given, out, lse).to(device)
    truth = call.gradients(*given)
    for most in (2**31, 10 * 3 * 24 * 8 * size):
        monkeypatch.setattr(unit_gradients, "MOST_BYTES", most)
        found = planned_anew(asked)
        assert_accurate_gradients(found, truth)


def test_units_of_ranges_that_overlap(device):
    """Units are split into keys, which lists of several sequences name."""
    problem = dataclasses.replace(
        PROBLEM, num_heads=4, k_ranges="shared", selected=Selected(3, 4, "kv", holes=0.2)
    )
    call = build(problem)
    out, lse = reference.selected_attention(**call.args)
    given = hostile_gradients(call, out, lse)
    asked = call.backward(*given, out, lse).to(device)
    assert_accurate_gradients(planned_anew(asked), call.gradients(*given))


def test_only_lists_of_single_keys_leave_parts(device):
    call = build(dataclasses.replace(PROBLEM, selected=Selected(2, 8, "kv")))
    out, lse = reference.selected_attention(**call.args)
    asked = call.backward(*hostile_gradients(call, out, lse), out, lse)
    assert not selected_parts.leaves_parts(BackwardCall.selected_attention(**asked.args))
