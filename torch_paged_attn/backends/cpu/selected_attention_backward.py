"""`selected_attention_backward` on CPUs, composed of PyTorch operators in chunks of bounded size.

Gradients of keys are added up in float32, in the order of the tokens: the same bits every time.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.backends.cpu.gathered import Chunk, announce, chunks
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops.selected_checks import check_selected_values


def selected_attention_backward(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Arguments as in `ops.selected_attention_backward`."""
    call = BackwardCall.selected_attention(*args, **kwargs)
    forward = call.forward
    check_selected_values(call.named_forward())
    announce("selected_attention_backward")
    results = call.new_results()
    dq, dk, dv, dbias, dsinks = (torch.zeros_like(x, dtype=torch.float32) for x in results)
    wants_q, wants_k, wants_v, _, wants_sinks = call.wanted
    group = forward.num_kv_heads, forward.group_size
    for rows, parts in chunks(forward):
        lse = call.softmax_lse[:, rows].T[..., None]  # (rows, heads, 1)
        empty = lse == float("-inf")
        dout = call.dout[rows].float().masked_fill(empty, 0.0)
        d = (dout * call.out[rows].float()).sum(-1, keepdim=True)
        if call.dlse is not None:
            d = d - call.dlse[:, rows].T[..., None]
        d = d.masked_fill(empty, 0.0)
        if wants_sinks:
            assert forward.sinks is not None
            weight = (forward.sinks[:, None] - lse).exp().masked_fill(empty, 0.0)
            dsinks -= (weight * d).sum((0, 2))
        lse, empty, dout, d = (x.unflatten(1, group) for x in (lse, empty, dout, d))
        for entries in parts:
            x = Chunk.of(forward, rows, entries)
            scores, is_seen = x.scores(), x.is_seen[:, :, None]
            p = (scores - lse).exp().masked_fill(~is_seen | empty, 0.0)
            ds = p * (dout @ x.v.mT - d)
            if forward.softcap > 0.0:
                ds = ds * (1.0 - (scores / forward.softcap).square())
            if wants_q:
                dq[rows] += forward.scale * (ds @ x.k).flatten(1, 2)
            if wants_k:
                _add_rows(dk, x.where, forward.scale * (ds.mT @ x.q))
            if wants_v:
                _add_rows(dv, x.where, p.mT @ dout)
    found = zip((dq, dk, dv, dbias, dsinks), results, strict=True)
    return tuple(x.to(like.dtype) for x, like in found)


def _add_rows(total: Tensor, where: Tensor, rows: Tensor) -> None:
    """Add `rows` `(tokens, num_kv_heads, keys, dim)` to the rows `where` of `total`, which are the
    same for all heads or not. What a query does not see is 0.
    """
    heads = total.shape[1]
    if total.shape[0] == 0:
        return
    place = where.expand(-1, heads, -1) * heads + torch.arange(heads)[:, None]
    total.view(-1, total.shape[-1]).index_add_(0, place.flatten(), rows.flatten(0, 2))
