"""The gradients of attention in closed form, one sequence at a time."""

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.reference.attention import FLOAT32, Precision, Scored, scored_sequences


@dataclasses.dataclass
class BackwardSums:
    """What the gradients of one sequence are sums of: rounding errors scale with it.

    `(heads, Lq, Lk)`: `p`, the probabilities, and `dropped`, what is left of them; `dp`, the
    gradient of `p`; `ds`, that of the logits, and `dx`, that of the products. `d` is
    `(heads, Lq, 1)`; `dout` and `out` are `(heads, Lq, dim_v)`, in rows that see a key.
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
    """dq, dk, dv, dbias, dsinks; `layout_mask` is that of `attend`."""
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
    """Add what one sequence has a part in."""
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
        """`(heads, Lk, dim)`: summed over the query heads of a KV head, tokens first."""
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
