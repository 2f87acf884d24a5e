"""Plain PyTorch `select_keys`: arguments as in `ops`, plus `precision`."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.reference.attention import FLOAT32, Precision, Scored, scored_sequences
from torch_paged_attn.selection_calls import SelectKeysCall

INF = float("inf")


def select_keys(*args: Any, precision: Precision = FLOAT32, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Units by their scores' formula; `precision=GOLDEN` is float64 throughout."""
    call = SelectKeysCall.of(*args, **kwargs)
    key_indices, num_selected = (torch.zeros_like(x) for x in call.new_results())
    key_indices -= 1
    for rows, scores, is_forced in scored_units(call, precision.compute):
        # forced units first, then those of the best scores, the smallest id among equals
        ranked = scores.masked_fill(is_forced, INF)
        ids = torch.sort(ranked, dim=-1, descending=True, stable=True).indices[
            ..., : call.num_units
        ]
        is_there = ranked.gather(-1, ids) > -INF
        ids = ids.where(is_there, ranked.shape[-1]).sort(-1).values
        ids = ids.where(ids < ranked.shape[-1], -1).transpose(0, 1)
        key_indices[rows, :, : ids.shape[-1]] = ids.to(torch.int32)
        num_selected[rows] = (ids >= 0).sum(-1, dtype=torch.int32)
    return key_indices, num_selected


def scored_units(
    call: SelectKeysCall, compute: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each sequence its rows of q, the scores of its units `(G, Lq, units)`, -inf for a unit of
    which no key is visible, and which units are selected whatever their scores are.
    """
    attention = call.attention()
    firsts = attention.first_positions().tolist()
    for b, x in enumerate(scored_sequences(attention, compute, None)):
        key_len = x.k.shape[1]
        is_seen = x.visible[: call.groups]
        scores = _scores_of_keys(call, x)
        units = _units(scores.masked_fill(~is_seen, -INF), call.select_size, -INF)
        if call.pool == "max":
            pooled = units.amax(-1)
        else:
            pooled = _units(scores.masked_fill(~is_seen, 0.0), call.select_size, 0.0).sum(-1)
            if call.pool == "mean":
                pooled = pooled / (units > -INF).sum(-1).clamp(min=1)
        is_there = (units > -INF).any(-1)
        pooled = pooled.masked_fill(~is_there, -INF)
        unit = torch.arange(pooled.shape[-1], device=pooled.device)
        position = firsts[b] + torch.arange(is_seen.shape[1], device=pooled.device)
        own = position.clamp(max=key_len - 1).div(call.select_size, rounding_mode="floor")[:, None]
        is_forced = (unit < call.force_first) | (unit <= own) & (unit > own - call.force_last)
        yield x.rows, pooled, is_forced & is_there


def _scores_of_keys(call: SelectKeysCall, x: Scored) -> Tensor:
    """`(G, Lq, Lk)`: the weighted sum over the heads of each group."""
    products = x.q @ x.k.mT
    if call.score == "relu":
        products = products.relu()
    if call.weights is not None:
        products = products * call.weights[x.rows].to(products.dtype).mT[..., None]
    return products.unflatten(0, (call.groups, -1)).sum(1)


def _units(scores: Tensor, size: int, filler: float) -> Tensor:
    """`(..., Lk)` as `(..., units, size)`."""
    count = -(-scores.shape[-1] // size)
    room = count * size - scores.shape[-1]
    padded = torch.nn.functional.pad(scores, (0, room), value=filler)
    return padded.unflatten(-1, (count, size))
