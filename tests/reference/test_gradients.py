"""The closed forms of the gradients are those of the float64 formulas by torch.autograd."""

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.reference import GOLDEN
from torch_paged_attn.testing import assert_same_in_float64, build
from torch_paged_attn.testing.training_problems import DIFFERENTIABLE, EXTENDED_DIFFERENTIABLE

FORWARD_ALONE = ("out_dtype", "batch_invariant")
INPUTS = ("q", "k", "v", "attn_bias", "sinks")


def in_float64(args):
    """The call with float64 leaves, without NaN in memory that is not read."""
    leaves = {n: args[n].double().requires_grad_() for n in INPUTS if is_float(args.get(n))}
    return args | leaves, leaves


def is_float(x):
    return x is not None and x.is_floating_point()


def loss_gradients(out, lse, seed=0):
    """What a loss hands back: NaN in rows that see no key, and in those of padding."""
    g = torch.Generator().manual_seed(seed)
    dout = torch.randn(out.shape, generator=g, dtype=torch.float64)
    dlse = torch.randn(lse.shape, generator=g, dtype=torch.float64)
    return dout, dlse


@pytest.mark.parametrize("name", DIFFERENTIABLE | EXTENDED_DIFFERENTIABLE)
def test_attention(name):
    call = build((DIFFERENTIABLE | EXTENDED_DIFFERENTIABLE)[name])
    args, leaves = in_float64(call.args)
    out, lse = getattr(reference, call.op)(**args, precision=GOLDEN)
    dout, dlse = loss_gradients(out, lse)
    seen = lse > float("-inf")
    loss = (out * dout).sum() + torch.where(seen, lse, 0.0).mul(dlse).sum()
    wanted = dict(zip(leaves, torch.autograd.grad(loss, list(leaves.values())), strict=True))
    dout = dout.masked_fill(~seen.mT[..., None], float("nan"))
    given = {n: x for n, x in call.args.items() if n not in FORWARD_ALONE}
    results = dict(out=out.detach(), softmax_lse=lse.detach(), dout=dout, dlse=dlse)
    found = getattr(reference, f"{call.op}_backward")(**given, **results, precision=GOLDEN)
    for x, which in zip(found, INPUTS, strict=True):
        if which in leaves:
            assert_same_in_float64(x, wanted[which])
        else:
            assert x.shape == (0,)


def test_a_part_of_the_keys_has_its_share():
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, 2, 8, dtype=torch.float64) for n in (5, 12, 12))
    bounds = torch.tensor([0, 5], dtype=torch.int32)

    def of(part):
        n = part.stop - part.start
        lengths = bounds, torch.tensor([0, n], dtype=torch.int32)
        return dict(q=q, k=k[part], v=v[part], cu_seqlens_q=lengths[0], cu_seqlens_k=lengths[1])

    whole, parts = of(slice(0, 12)), [of(slice(0, 7)), of(slice(7, 12))]
    out, lse = reference.flash_varlen(**whole, precision=GOLDEN)
    dout, dlse = loss_gradients(out, lse)
    given = dict(dout=dout, dlse=dlse, out=out, softmax_lse=lse, precision=GOLDEN)
    dq, dk, dv, *_ = reference.flash_varlen_backward(**whole, **given)
    a, b = (reference.flash_varlen_backward(**part, **given) for part in parts)
    assert_same_in_float64(a[0] + b[0], dq)
    assert_same_in_float64(torch.cat([a[1], b[1]]), dk)
    assert_same_in_float64(torch.cat([a[2], b[2]]), dv)

    # and so have parts that are merged, each by its own results
    states = [reference.flash_varlen(**part, precision=GOLDEN) for part in parts]
    flat = [x for state in states for x in state]
    results = dict(dout=dout, dlse=dlse, out=out, softmax_lse=lse)
    names = "out_a", "lse_a", "out_b", "lse_b"
    merged = dict(zip(names, flat, strict=True))
    gradients = reference.merge_states_backward(**results, **merged, precision=GOLDEN)
    a, b = (
        reference.flash_varlen_backward(*gradients[i : i + 2], **part, **results, precision=GOLDEN)
        for i, part, results in (
            (0, parts[0], dict(out=flat[0], softmax_lse=flat[1])),
            (2, parts[1], dict(out=flat[2], softmax_lse=flat[3])),
        )
    )
    assert_same_in_float64(a[0] + b[0], dq)
    assert_same_in_float64(torch.cat([a[1], b[1]]), dk)
    assert_same_in_float64(torch.cat([a[2], b[2]]), dv)


def test_merge_states():
    torch.manual_seed(1)
    parts = [torch.randn(shape, dtype=torch.float64) for shape in ((6, 2, 3), (2, 6)) * 2]
    parts[1][:, ::2] = float("-inf")
    parts[3][:, ::3] = float("-inf")
    leaves = [part.requires_grad_() for part in parts]
    out, lse = reference.merge_states(*leaves, precision=GOLDEN)
    dout, dlse = loss_gradients(out, lse)
    seen = lse > float("-inf")
    lse_loss = torch.where(seen, lse, 0.0).mul(dlse).sum()
    wanted = torch.autograd.grad((out * dout).sum() + lse_loss, leaves)
    nan = float("nan")
    dout, dlse = dout.masked_fill(~seen.mT[..., None], nan), dlse.masked_fill(~seen, nan)
    values = [leaf.detach() for leaf in leaves]
    values[0] = values[0].masked_fill((values[1] == float("-inf")).mT[..., None], nan)
    results = out.detach(), lse.detach()
    found = reference.merge_states_backward(dout, dlse, *values, *results, precision=GOLDEN)
    for x, y in zip(found, wanted, strict=True):
        assert_same_in_float64(x, y.nan_to_num(0.0))


class Attend(torch.autograd.Function):
    """The forward and the closed form behind it, as autograd sees them."""

    @staticmethod
    def forward(ctx, lengths, q, k, v, bias, sinks):
        call = lengths | {"q": q, "k": k, "v": v, "attn_bias": bias, "sinks": sinks}
        out, lse = reference.flash_varlen(**call, precision=GOLDEN)
        ctx.call = call | {"out": out, "softmax_lse": lse}
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        given = ctx.call | {"dout": dout, "dlse": dlse}
        return None, *reference.flash_varlen_backward(**given, precision=GOLDEN)


@pytest.mark.parametrize("heads", [1, 2], ids=["one_bias", "bias_of_heads"])
def test_finite_differences(heads):
    torch.manual_seed(2)
    lengths = {"cu_seqlens_q": torch.tensor([0, 2, 3], dtype=torch.int32), "softcap": 2.0}
    lengths |= {"cu_seqlens_k": torch.tensor([0, 3, 4], dtype=torch.int32), "causal": True}
    shapes = (3, 2, 4), (4, 1, 4), (4, 1, 2), (heads, 3, 3), (2,)
    leaves = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes]
    assert torch.autograd.gradcheck(lambda *x: Attend.apply(lengths, *x), leaves)
