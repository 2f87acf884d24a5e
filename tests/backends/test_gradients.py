"""The backward of attention on every backend, over the problems that train.

What a loss hands back is hostile, too: NaN in rows that see no key and in those of padding. A
backend that has no gradients of a problem says so, and refuses the forward that would need them.
"""

import dataclasses
import re

import pytest
import torch
import truths
from gaps import all_with_gaps, shorter
from same_bits import assert_same_bits
from sampling import ALL_DIFFERENTIABLE, no_gradients

from torch_paged_attn.backward_call import GRADIENTS
from torch_paged_attn.testing import (
    Call,
    assert_accurate_gradients,
    build,
)
from torch_paged_attn.testing.inputs import cumulative, hostile_gradients

pytestmark = pytest.mark.gradients
INF = float("inf")


def over(keep):
    """Parametrise over the problems that `keep` picks."""
    return pytest.mark.over({name: p for name, p in ALL_DIFFERENTIABLE.items() if keep(p)})


# of every kind one: a problem for each promise that does not depend on the problem
FEW = (
    "llama3_8b/prefill_ragged/bf16",
    "more_queries_than_keys/f32",
    "training/everything/f32",
    "training/gpt_oss/bf16",
    "training/one_bias/bf16",
    "training/blocksparse_wide/f32",
)
few = over(lambda p: p.name in FEW)
one = over(lambda p: p.name == "training/everything/f32")


def forward(case, runner):
    """A call, and what its backward takes."""
    call = build(case)
    out, lse = runner.attend(call)
    dout, dlse = hostile_gradients(call, out, lse)
    return call, dout, dlse, out, lse


@over(lambda p: True)
def test_gradients_agree(case, runner):
    call, *given = forward(case, runner)
    found = runner.gradients(call, *given)
    assert all(x.is_contiguous() for x in found)
    assert_accurate_gradients(found, truths.of_gradients(case))


@few
def test_gradients_same_bits(case, runner):
    """Twice, and whatever the hints."""
    call, *given = forward(case, runner)
    first = runner.gradients(call, *given)
    assert_same_bits(first, runner.gradients(call, *given))
    if not runner.heeds_hints:
        for hint in (0, 2**31 + 5):
            hints = {"max_seqlen_q": hint, "max_seqlen_k": hint}
            assert_same_bits(first, runner.gradients(call, *given, **hints))


@few
def test_gradients_at_any_order(case, runner, monkeypatch):
    """As fast as may be, not the same bits every time: as right."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    call, *given = forward(case, runner)
    found = runner.gradients(call, *given, deterministic=False)
    assert_accurate_gradients(found, truths.of_gradients(case))


@over(lambda p: p.dropout_p == 0.0 and p.name in FEW)
def test_gradients_alone(case, runner):
    """A sequence alone has the bits that it has in its batch, but for what all share."""
    with runner.batch_invariant():
        call, dout, dlse, out, lse = forward(case, runner)
        dq, dk, dv, dbias, _ = runner.gradients(call, dout, dlse, out, lse)
        q_bounds = call.args["cu_seqlens_q"].tolist()
        k_bounds = call.args.get("cu_seqlens_k", call.args["cu_seqlens_q"]).tolist()
        for b in range(len(case.seqs)):
            rows, keys = (slice(*bounds[b : b + 2]) for bounds in (q_bounds, k_bounds))
            results = dout[rows], dlse[:, rows], out[rows], lse[:, rows]
            one = runner.gradients_alone(call, b, *results)
            assert_same_bits(one[:3], (dq[rows], dk[keys], dv[keys]))
            if dbias.numel():
                assert_same_bits(one[3:4], [dbias[:, rows]])


@few
def test_gradients_unseen_memory(case, runner):
    """Memory that no query may see is NaN in every problem, and zero here: no bit changes."""
    call, *given = forward(case, runner)
    first = runner.gradients(call, *given)
    for name in ("q", "k", "v", "attn_bias"):
        if call.args.get(name) is not None and call.args[name].is_floating_point():
            call.args[name][call.args[name].isnan()] = 0.0
    assert_same_bits(first, runner.gradients(call, *(x.nan_to_num(0.0, INF, -INF) for x in given)))


@few
def test_gradients_any_strides(case, runner):
    """What a loss hands back may lie as it likes, and be one number for all."""
    call, dout, dlse, out, lse = forward(case, runner)
    first = runner.gradients(call, dout, dlse, out, lse)
    turned = dout.permute(2, 0, 1).contiguous().permute(1, 2, 0), dlse.mT.contiguous().mT
    assert_same_bits(first, runner.gradients(call, *turned, out, lse))
    one = torch.tensor(0.75)
    expanded = one.to(dout.dtype).expand(dout.shape), one.expand(dlse.shape)
    whole = (x.contiguous() for x in expanded)
    wanted = runner.gradients(call, *whole, out, lse)
    assert_same_bits(wanted, runner.gradients(call, *expanded, out, lse))


@one
def test_gradients_gaps(case, runner):
    """Lengths, bounds, masks and slopes may lie with gaps."""
    call, *given = forward(shorter(case), runner)
    assert_same_bits(runner.gradients(call, *given), runner.gradients(all_with_gaps(call), *given))


@few
def test_gradients_asked_for(case, runner):
    """Each alone has the bits that it has among all; the others are empty."""
    call, *given = forward(case, runner)
    every = runner.gradients(call, *given)
    for i in range(len(GRADIENTS)):
        mask = tuple(i == j for j in range(len(GRADIENTS)))
        found = runner.gradients(call, *given, output_mask=mask)
        assert_same_bits(found[i : i + 1], every[i : i + 1])
        others = [x for j, x in enumerate(found) if j != i]
        assert all(x.shape == (0,) and x.dtype == case.dtype for x in others)


@few
def test_gradients_of_out_alone(case, runner):
    """No gradient of softmax_lse is one of zeros."""
    call, dout, dlse, *results = forward(case, runner)
    found = runner.gradients(call, dout, None, *results)
    assert_accurate_gradients(found, call.gradients(dout, None))
    zeros = torch.zeros_like(dlse)
    assert_accurate_gradients(
        runner.gradients(call, dout, zeros, *results), call.gradients(dout, zeros)
    )


@over(lambda p: p.name == "minilm/packed/f32")
def test_gradients_of_parts(case, runner):
    """Parts of the keys have their share of the gradients of the whole, given its results."""
    case = dataclasses.replace(case, seqs=((40, 0), (3, 0)), num_heads=4, num_kv_heads=2)
    call, *given = forward(case, runner)
    dq, dk, dv, *_ = runner.gradients(call, *given)
    bounds, cut = call.args["cu_seqlens_q"], 17  # of the first sequence's keys
    first = call.args | {"cu_seqlens_k": bounds, "seqused_k": torch.tensor([cut, 0]).int()}
    rest = call.args | {"cu_seqlens_k": cumulative([40 - cut, 3])}
    rest |= {name: call.args[name][cut:] for name in "kv"}
    shares = [runner.gradients(Call(call.op, args), *given) for args in (first, rest)]
    keys = [torch.cat([a[:cut], b]) for a, b in zip(*(s[1:3] for s in shares), strict=True)]
    added = shares[0][0] + shares[1][0]
    truth = call.gradients(*given[:2])
    assert_accurate_gradients((dq, dk, dv, *shares[0][3:]), truth)
    assert_accurate_gradients((added, *keys, *shares[0][3:]), truth)


@one
def test_gradients_only_read(case, runner):
    call, *given = forward(case, runner)
    inputs = {n: x for n, x in call.args.items() if isinstance(x, torch.Tensor)}
    inputs |= dict(enumerate(given))
    before = {name: x.clone() for name, x in inputs.items()}
    runner.gradients(call, *given)
    for name, x in before.items():
        assert_same_bits([x], [inputs[name]])


@one
def test_gradients_of_nothing(case, runner):
    """An empty batch has none: keys that no query sees have gradients 0."""
    for seqs in ((), ((0, 0),), ((0, 7),), ((7, -7),)):
        call, *given = forward(dataclasses.replace(case, seqs=seqs, dropout_p=0.0), runner)
        found = runner.gradients(call, *given)
        assert_accurate_gradients(found, call.gradients(*given[:2]))
        assert all(not x.any() for x in found[:4])


@one
def test_gradients_beside_a_large_sink(case, runner):
    """softmax_lse is the sink's, and dropout takes the only key of half the rows, which have a
    result of 0: they see a key all the same, and a gradient of softmax_lse reaches it."""
    call = build(dataclasses.replace(case, seqs=((1, 0),) * 12, dropout_p=0.5))
    call.args["sinks"].fill_(20.0)
    out, lse = runner.attend(call)
    dout, dlse = hostile_gradients(call, out, lse)
    taken = (out == 0.0).all(-1) & (lse.mT == 20.0)
    assert taken.any()
    found = runner.gradients(call, dout, dlse, out, lse)
    assert_accurate_gradients(found, call.gradients(dout, dlse))
    assert found[0][taken].any()


@few
def test_gradients_by_autograd(case, runner):
    """Autograd hands on the bits of the backward, and nothing for what has no gradient."""
    call = build(case)
    dout, dlse = hostile_gradients(call, *runner.attend(call))
    found, results = runner.by_autograd(call, dout, dlse)
    wanted = runner.gradients(call, dout, dlse, *results)
    by_name = dict(zip(GRADIENTS.values(), wanted, strict=True))
    assert found.keys() == {name for name, x in by_name.items() if x.numel()}
    for name, x in found.items():
        assert_same_bits([x], [by_name[name]])


def test_gradients_refused(runner):
    """A forward whose gradients the backend does not have is refused, and says why."""
    for case in ALL_DIFFERENTIABLE.values():
        if (reason := no_gradients(runner, case)) is not None:
            call = build(case).to(runner.device).needs()
            with pytest.raises(
                NotImplementedError, match=f"q requires grad, and {re.escape(reason)}"
            ):
                call.run()
