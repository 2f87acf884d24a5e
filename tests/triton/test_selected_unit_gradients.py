"""Gradients of selected units of keys on Hopper: what the kernel is given and what becomes of its
parts, which calls take it and, on a Hopper chip, its results."""

import dataclasses

import pytest
import torch
from hopper_calls import HAS_HOPPER, HOPPER, hopper_call
from planned_anew import planned_anew

from torch_paged_attn import reference
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.hopper.units import gradient_plan
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected import unit_gradients
from torch_paged_attn.backends.triton.runtime.target import assume
from torch_paged_attn.testing import Problem, Selected, assert_accurate_gradients, build
from torch_paged_attn.testing.inputs import hostile_gradients

bf16 = torch.bfloat16
SEQS = ((20, 300), (0, 4), (37, 0), (10, 500))
M3 = Selected(3, 128, "kv", own=True)
HOLES = Selected(4, 128, "kv", holes=0.3, counted=True, past=True)

PROBLEMS = {
    p.name: dataclasses.replace(p, padding_rows=2)
    for p in (
        Problem("m3", SEQS, 32, 2, 128, dtype=bf16, selected=M3),
        Problem("full", SEQS, 32, 2, 128, dtype=bf16, causal=False, selected=M3),
        Problem("window", SEQS, 32, 2, 128, dtype=bf16, window_size_left=90, selected=M3),
        Problem("one_list", SEQS, 32, 2, 128, dtype=bf16, selected=Selected(3, 128, own=True)),
        Problem("holes", SEQS, 32, 2, 128, dtype=bf16, selected=HOLES),
        Problem("8_heads", SEQS, 16, 2, 128, dtype=bf16, selected=M3),
        Problem("32_heads", SEQS, 32, 1, 128, dtype=bf16, selected=M3),
        Problem("64_heads", SEQS, 64, 1, 64, dtype=bf16, selected=M3),
        Problem("narrow_values", SEQS, 32, 2, 128, 64, dtype=bf16, selected=M3),
        Problem("wide_values", SEQS, 32, 2, 64, 128, dtype=bf16, selected=M3),
        Problem("sinks", SEQS, 32, 2, 128, dtype=bf16, sinks=True, selected=M3),
    )
}  # fmt: skip


def by_formula(call, sizes, given, statistics, gradients):
    """What the function writes that `gradient_plan.plan_units` makes; sizes: of the run."""
    size, dim, device = call.lists.select_size, call.head_dim, call.q.device
    heads = torch.arange(call.group_size, device=device)
    # an interpreter has bfloat16 as bits
    bits = {torch.int16: torch.bfloat16}
    dk, dv, q, k, v, dout = (
        x.view(bits.get(x.dtype, x.dtype))
        for x in (gradients.dk, gradients.dv, given.q, given.k, given.v, gradients.dout)
    )
    for head in range(call.num_kv_heads):
        group = head if call.lists.key_indices.shape[1] > 1 else 0
        own = slice(head * call.group_size, (head + 1) * call.group_size)
        for unit in range(sizes.units):
            at = unit * sizes.runs + sizes.run
            entries = slice(*gradients.bounds[group, at : at + 2].tolist())
            tokens = gradients.tokens[group, entries]
            if len(tokens) == 0:
                continue
            first = (unit - int(gradients.first_units[tokens[0]])) * size
            row = int(gradients.first_rows[tokens[0]]) + first
            count = min(size, int(gradients.lengths[tokens[0]]) - first, len(k) - row)
            rows = torch.arange(row, row + count, device=device)
            keys, values = (x[rows, head].float().nan_to_num(0.0, 0.0, 0.0) for x in (k, v))
            queries, do = (x[tokens, own].float() for x in (q, dout))
            lse, d, *ends = statistics[tokens, head].unbind(1)
            low, high = (x.contiguous().view(torch.int32)[..., None] for x in ends)
            p = torch.exp2(queries @ keys.T * (call.scale * LOG2E.value) - lse[..., None])
            p = torch.where((rows >= low) & (rows <= high), p, 0.0)
            ds = p * (do @ values.T - d[..., None])
            dv[rows, head] += torch.einsum("nhk,nhd->kd", p, do).to(dv.dtype)
            dk[rows, head] += (torch.einsum("nhk,nhd->kd", ds, queries) * call.scale).to(dk.dtype)
            part = (ds @ keys).unflatten(-1, (2, dim // 2))
            scale = part.abs().amax(-1).clamp(min=2.0**-60).log2().floor().exp2()
            part = (part / scale[..., None]).flatten(-2).unflatten(-1, (dim // 32, 4, 4, 2))
            places = gradients.places[group, entries] + head * sizes.head_places
            at = ((places - sizes.first_place)[:, None] * call.group_size + heads).flatten()
            gradients.parts_q[at] = part.transpose(-3, -2).reshape(-1, dim).half()
            gradients.scale_q[at] = scale.reshape(-1, 2)


@pytest.mark.parametrize("heads", ["one", "kv"])
def test_what_a_kernel_gets_and_leaves(heads, device, monkeypatch):
    small = selected.SelectedConfig(32, 32, 4, 1)
    monkeypatch.setattr(selected, "unit_config_of", lambda call, target: small)
    monkeypatch.setattr(selected, "leaves_query_parts", lambda call, target: True)
    monkeypatch.setattr(gradient_plan, "unsupported", lambda call, dout: None)
    visits = []

    def plan_units(call, sizes):
        def add(run, *tensors):
            visits.append(run)
            by_formula(call.forward, sizes[run], *tensors)

        return add

    monkeypatch.setattr(gradient_plan, "plan_units", plan_units)
    problem = Problem(
        "units", ((5, 70), (0, 4), (20, 30)), 8, 2, 64, dtype=bf16, padding_rows=1,
        window_size_left=60, selected=Selected(3, 32, heads, holes=0.2),
    )  # fmt: skip
    call = build(problem)
    out, lse = reference.selected_attention(**call.args)
    given = hostile_gradients(call, out, lse)
    asked, truth = call.backward(*given, out, lse).to(device), call.gradients(*given)
    for most in (2**31, 8 * 3 * 64 * 2 * 10):  # all tokens at a time, and ten
        monkeypatch.setattr(unit_gradients, "MOST_BYTES", most)
        assert_accurate_gradients(planned_anew(asked), truth)
    assert visits == [0, 0, 1, 2]
    visits.clear()
    some = call.backward(*given, out, lse, output_mask=(True, False, True, False, False))
    planned_anew(some.to(device))
    assert not visits  # the kernel has no form that leaves a gradient out


REFUSED = {
    "units of 64": {"selected": Selected(3, 64, "kv", own=True)},
    "for 4 heads": {"num_heads": 8},
    "k torch.float32": {"dtype": torch.float32},
    "k torch.float16": {"dtype": torch.float16},
    "head_dim is 192": {"head_dim": 192},
    "softcap": {"softcap": 20.0},
    "k_start": {"k_ranges": "shared"},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_calls_that_take_the_portable_kernel(reason):
    call = hopper_call(dataclasses.replace(PROBLEMS["m3"], **REFUSED[reason]))
    with assume(HOPPER):
        assert reason in gradient_plan.unsupported(call, torch.empty_like(call.q))


@pytest.mark.parametrize("name", PROBLEMS)
def test_calls_that_take_the_kernel(name):
    call = hopper_call(PROBLEMS[name])
    dout = call.q.new_empty(*call.q.shape[:2], call.head_dim_v)
    with assume(HOPPER):
        assert gradient_plan.unsupported(call, dout) is None
        assert selected.leaves_query_parts(call, HOPPER)


@pytest.mark.skipif(not HAS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("most", [2**31, 2**19], ids=["whole", "runs"])
@pytest.mark.parametrize("name", PROBLEMS)
def test_results(name, most, monkeypatch):
    monkeypatch.setattr(unit_gradients, "MOST_BYTES", most)
    call = build(PROBLEMS[name])
    out, lse = reference.selected_attention(**call.args)
    given = hostile_gradients(call, out, lse)
    asked = call.backward(*given, out, lse).to("cuda")
    found = planned_anew(asked)
    assert_accurate_gradients(found, call.gradients(*given))
    assert all(torch.equal(a, b.cpu()) for a, b in zip(found, asked.run(), strict=True))
