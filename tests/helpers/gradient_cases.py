"""Small calls with their gradients, beside the same gradients by the reference's backward."""

import inspect

import torch

import torch_paged_attn
from torch_paged_attn import reference
from torch_paged_attn.testing import Layout, Problem, build

SEQS = ((3, 2), (0, 0), (5, 0))
SPARSE = {"layout": Layout(16, 16, "kv")}
PROBLEM = Problem("glue", SEQS, 4, 2, 8, 6, bias="float", sinks=True, softcap=3.0)
INPUTS = ("q", "k", "v", "attn_bias", "sinks")


def case(**changes):
    """A call without NaN, its leaves, and a loss of both of its results."""
    call = build(Problem(**{**vars(PROBLEM), **changes}))
    args = {n: x.nan_to_num(0.0) if is_float(x) else x for n, x in call.args.items()}
    leaves = {n: args[n].requires_grad_() for n in INPUTS if is_float(args.get(n))}
    return call.op, args, leaves


def is_float(x):
    return isinstance(x, torch.Tensor) and x.is_floating_point()


def loss_of(out, lse):
    return (out.float() ** 2).sum() + torch.where(lse > float("-inf"), lse, 0.0).sin().sum()


def gradients(function, args, leaves):
    loss = loss_of(*function(**args))
    return torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)


class ByHand(torch.autograd.Function):
    """An op whose backward is called here, not by the package's way to it."""

    @staticmethod
    def forward(ctx, op, args, *inputs):
        ctx.op, ctx.args = op, args
        out, lse = getattr(torch_paged_attn, op)(**args, **dict(zip(INPUTS, inputs, strict=True)))
        ctx.save_for_backward(*inputs, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, dout, dlse):
        *inputs, out, lse = ctx.saved_tensors
        args = ctx.args | dict(zip(INPUTS, inputs, strict=True))
        args |= {"dout": dout, "dlse": dlse, "out": out, "softmax_lse": lse}
        mask = ctx.needs_input_grad[2:]
        found = getattr(reference, f"{ctx.op}_backward")(**args, output_mask=mask)
        return None, None, *(x if wanted else None for x, wanted in zip(found, mask, strict=True))


def by_hand(op):
    signature = inspect.signature(getattr(torch_paged_attn, op))

    def call(*args, **options):
        given = signature.bind(*args, **options).arguments
        inputs = [given.pop(name, None) for name in INPUTS]
        return ByHand.apply(op, given, *inputs)

    return call


def assert_same(found, wanted):
    for x, y in zip(found, wanted, strict=True):
        assert (x is None) == (y is None)
        assert x is None or torch.equal(x, y)


class Attend(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.project = torch.nn.Linear(6, 8 * 8)

    def forward(self, x, bounds):
        q, k, v = self.project(x).unflatten(1, (8, 8)).split([4, 2, 2], 1)
        return torch_paged_attn.flash_varlen(q, k, v, bounds, causal=True)[0]
