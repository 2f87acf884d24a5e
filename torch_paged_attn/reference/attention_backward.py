"""The gradients of attention in closed form, one sequence at a time."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.reference.attention import FLOAT32, Precision, Scored, scored_sequences


@dataclasses.dataclass
class BackwardSums:
    """The terms of one sequence's gradients, from which `testing/gradient_scales.py` derives how
    large a kernel's rounding errors may be.

    Of shape `(heads, Lq, Lk)`: `p`, the probabilities; `dropped`, the same after dropout; and the
    gradients `dp` of the probabilities, `ds` of the logits, `dx` of the products `q . k`. `d` (the
    row sums D) and `lse` are `(heads, Lq, 1)`, `dout` and `out` `(heads, Lq, dim_v)`. Rows that see
    no key have dout = 0 and d = 0.
    """

    scored: Scored
    keys: slice  # rows of k and v
    dout: Tensor
    out: Tensor
    lse: Tensor
    p: Tensor
    dropped: Tensor
    dp: Tensor
    d: Tensor
    ds: Tensor
    dx: Tensor


def attend_backward(
    call: BackwardCall,
    precision: Precision = FLOAT32,
    layout_mask: Callable[[int, Tensor, Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, dbias and dsinks of a call. `layout_mask` is explained at `attend`."""
    forward, compute = call.forward, precision.compute
    results = [torch.zeros_like(x, dtype=compute) for x in call.new_results()]
    for x in scored_sequences(forward, compute, layout_mask):
        _add_sequence(call, x, precision, results)
    if precision.round_out:
        results = [y.to(like.dtype) for y, like in zip(results, call.new_results(), strict=True)]
    dq, dk, dv, dbias, dsinks = results
    return dq, dk, dv, dbias, dsinks


def _add_sequence(
    call: BackwardCall, x: Scored, precision: Precision, results: list[Tensor]
) -> None:
    """Add the gradients of one sequence to `results` (dq, dk, dv, dbias, dsinks)."""
    forward, compute, rows = call.forward, precision.compute, x.rows
    dq, dk, dv, dbias, dsinks = results
    lse = call.softmax_lse[:, rows, None].to(compute)  # (heads, Lq, 1)
    empty = lse == float("-inf")
    dout = call.dout[rows].transpose(0, 1).to(compute).masked_fill(empty, 0.0)
    out = call.out[rows].transpose(0, 1).to(compute)
    d = (dout * out).sum(-1, keepdim=True)
    if call.dlse is not None:
        d = d - call.dlse[:, rows, None].to(compute)
    d = d.masked_fill(empty, 0.0)

    p = (x.logits - lse).exp().masked_fill(~x.visible | empty, 0.0)
    dropped = x.dropped(p)
    dp = x.dropped(dout @ x.v.mT)
    ds = p * (dp - d)
    dx = ds
    if forward.softcap > 0.0:
        dx = ds * (1.0 - (x.scores / forward.softcap).square())
    keys = slice(x.first_key, x.first_key + x.k.shape[1])
    if precision.observe is not None:
        precision.observe(BackwardSums(x, keys, dout, out, lse, p, dropped, dp, d, ds, dx))
    if precision.round_probabilities:
        dropped, dx = (y.to(forward.q.dtype).to(compute) for y in (dropped, dx))

    def of_kv_heads(per_head: Tensor) -> Tensor:
        """`(heads, Lk, dim)` summed over each KV head's query heads: `(Lk, num_kv_heads, dim)`."""
        heads = per_head.unflatten(0, (forward.num_kv_heads, forward.group_size))
        return heads.sum(1).transpose(0, 1)

    wants_q, wants_k, wants_v, wants_bias, wants_sinks = call.wanted
    if wants_q:
        dq[rows] = forward.scale * (dx @ x.k).transpose(0, 1)
    if wants_k:
        dk[keys] += forward.scale * of_kv_heads(dx.mT @ x.q)
    if wants_v:
        dv[keys] += of_kv_heads(dropped.mT @ dout)
    if wants_bias:
        per_head = ds if dbias.shape[0] > 1 else ds.sum(0, keepdim=True)
        dbias[:, rows, : x.k.shape[1]] = per_head
    if wants_sinks:
        assert forward.sinks is not None
        weight = (forward.sinks.to(compute)[:, None, None] - lse).exp().masked_fill(empty, 0.0)
        dsinks -= (weight * d).sum((1, 2))
