"""Gradients of gradients, torch.func's transforms, and tensor subclasses."""

import pytest
import torch
from gradient_cases import assert_same, by_hand, case, gradients, is_float, loss_of

import torch_paged_attn

pytestmark = pytest.mark.usefixtures("reference_backward")


def test_gradients_of_gradients_are_refused():
    _, args, leaves = case()
    out, _ = torch_paged_attn.flash_varlen(**args)
    (dq,) = torch.autograd.grad(out.sum(), leaves["q"], create_graph=True)
    with pytest.raises(NotImplementedError, match=r"^flash_varlen_backward\(\): double"):
        torch.autograd.grad(dq.square().sum(), leaves["q"])


def loss_by_q(args, function):
    return lambda q: loss_of(*function(**args | {"q": q}))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms():
    from torch.func import grad, jacrev, vjp, vmap

    _, args, leaves = case(seqs=((3, 2),))
    args = {n: x.detach() if is_float(x) else x for n, x in args.items()}
    ours = loss_by_q(args, torch_paged_attn.flash_varlen)
    q = args["q"]
    batch = torch.stack([q, q * 2.0])
    wanted = []
    for x in batch:
        leaf = x.clone().requires_grad_()
        wanted += gradients(by_hand("flash_varlen"), args | {"q": leaf}, {"q": leaf})
    assert_same([grad(ours)(q)], wanted[:1])
    assert_same([vjp(ours, q)[1](torch.tensor(1.0))[0]], wanted[:1])
    assert_same([jacrev(ours)(q)], wanted[:1])
    assert_same(vmap(grad(ours))(batch), wanted)
    assert_same(grad(lambda x: vmap(ours)(x).sum())(batch), wanted)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        grad(lambda x: grad(ours)(x).sum())(q)
    assert leaves.keys() == {"q", "k", "v", "attn_bias", "sinks"}


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_forward_mode_over_reverse_mode():
    """Products with a Hessian: a tangent that only the outer transform sees is found."""
    from torch.func import grad, hessian, jvp, vjp, vmap

    _, args, _ = case(seqs=((3, 2),))
    args = {n: x.detach() if is_float(x) else x for n, x in args.items()}
    ours = loss_by_q(args, torch_paged_attn.flash_varlen)
    q, out, lse = args["q"], torch.randn(3, 2, 8), torch.randn(2, 3)
    one = torch.tensor(1.0)
    for transform in (
        lambda: jvp(grad(ours), (q,), (q,)),
        lambda: jvp(grad(grad(ours)), (q,), (q,)),
        lambda: jvp(lambda x: vjp(ours, x)[1](one)[0], (q,), (q,)),
        lambda: jvp(vmap(grad(ours)), (q[None],), (q[None],)),
        lambda: hessian(ours)(q),
        lambda: jvp(
            grad(lambda x: torch_paged_attn.merge_states(x, lse, x, lse)[0].sum()), *2 * [(out,)]
        ),
    ):
        with pytest.raises(NotImplementedError, match="has a tangent"):
            transform()
    scaled = jvp(lambda x: (grad(ours)(q) * x).sum(), (one,), (one,))[1]
    assert_same([scaled], [grad(ours)(q).sum()])


def test_subclasses():
    from torch.testing._internal.two_tensor import TwoTensor

    _, args, leaves = case()
    q = TwoTensor(leaves["q"].detach(), leaves["q"].detach() * 2.0).requires_grad_()
    (dq,) = torch.autograd.grad(loss_of(*torch_paged_attn.flash_varlen(**args | {"q": q})), q)
    for part, factor in ((dq.a, 1.0), (dq.b, 2.0)):
        scaled = (leaves["q"].detach() * factor).requires_grad_()
        wanted = gradients(by_hand("flash_varlen"), args | {"q": scaled}, {"q": scaled})
        assert_same([part], wanted)
