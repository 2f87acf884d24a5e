"""`select_keys` on CPUs, composed of PyTorch operators until the library has a kernel.

Some tokens of a sequence are scored at a time, so that no tensor of scores has more than
`MOST_SCORES` numbers, unless one token has more keys.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import key_lengths
from torch_paged_attn.backends.cpu.gathered import announce
from torch_paged_attn.ops.attention_checks import check_attention_values
from torch_paged_attn.selection_calls import SelectKeysCall

INF = float("inf")
MOST_SCORES = 2**22


def select_keys(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.select_keys`."""
    call = SelectKeysCall.of(*args, **kwargs)
    attention = call.attention()
    check_attention_values(attention)
    announce("select_keys")
    key_indices, num_selected = (torch.zeros_like(x) for x in call.new_results())
    key_indices -= 1
    lengths = key_lengths(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k).tolist()
    bounds, firsts = call.cu_seqlens_q.tolist(), attention.first_positions().tolist()
    for b, key_len in enumerate(lengths):
        keys = _keys_of(call, b, key_len)
        step = max(1, MOST_SCORES // max(1, call.q.shape[1] * key_len))
        for first in range(bounds[b], bounds[b + 1] if key_len else bounds[b], step):
            rows = slice(first, min(first + step, bounds[b + 1]))
            position = firsts[b] + torch.arange(rows.start - bounds[b], rows.stop - bounds[b])
            ids = _select(call, _scores(call, b, rows, keys), position)
            key_indices[rows, :, : ids.shape[-1]] = ids.to(torch.int32)
            num_selected[rows] = (ids >= 0).sum(-1, dtype=torch.int32)
    return key_indices, num_selected


def _keys_of(call: SelectKeysCall, b: int, key_len: int) -> Tensor:
    """The keys of a sequence `(G, key_len, head_dim)` float32, descaled."""
    if call.block_table is None:
        first = int(call.attention().first_keys()[b])
        keys = call.k[first : first + key_len]
    else:
        page_size, j = call.k.shape[2], torch.arange(key_len)
        pages = call.block_table[b, : -(-key_len // page_size)].long()
        keys = call.k[pages].float().transpose(1, 2).flatten(0, 1)[j]
    return keys.transpose(0, 1).float() * _factors(call, call.k_descale, b)


def _factors(call: SelectKeysCall, scale: Tensor | None, b: int) -> Tensor | float:
    if scale is None:
        return 1.0
    return (scale[b] if scale.dim() == 2 else scale).expand(call.groups)[:, None, None]


def _scores(call: SelectKeysCall, b: int, rows: slice, keys: Tensor) -> Tensor:
    """`(rows, G, key_len)` float32."""
    group = call.groups, call.q.shape[1] // call.groups
    q = call.q[rows].float().unflatten(1, group) * _factors(call, call.q_descale, b)
    products = q @ keys.mT
    if call.score == "relu":
        products = products.relu_()
    if call.weights is not None:
        products *= call.weights[rows].float().unflatten(1, group)[..., None]
    return products.sum(2)


def _select(call: SelectKeysCall, scores: Tensor, position: Tensor) -> Tensor:
    """The selected units `(rows, G, <= num_units)`, ascending, then -1."""
    key_len, size = scores.shape[-1], call.select_size
    is_seen = torch.ones(len(position), 1, key_len, dtype=torch.bool)
    if call.causal:
        is_seen = (torch.arange(key_len) <= position[:, None])[:, None]
    count = -(-key_len // size)
    room = (0, count * size - key_len)
    seen = torch.nn.functional.pad(is_seen, room).unflatten(-1, (count, size))
    units = torch.nn.functional.pad(scores, room).unflatten(-1, (count, size))
    if call.pool == "max":
        pooled = units.masked_fill(~seen, -INF).amax(-1)
    else:
        pooled = units.masked_fill(~seen, 0.0).sum(-1)
        if call.pool == "mean":
            pooled = pooled / seen.sum(-1).clamp(min=1)
    is_there = seen.any(-1)
    unit = torch.arange(count)
    own = position.clamp(max=key_len - 1).div(size, rounding_mode="floor")[:, None, None]
    is_forced = (unit < call.force_first) | (unit <= own) & (unit > own - call.force_last)
    pooled = pooled.masked_fill(is_forced, INF).masked_fill(~is_there, -INF)
    ids = torch.sort(pooled, dim=-1, descending=True, stable=True).indices[..., : call.num_units]
    ids = ids.where(pooled.gather(-1, ids) > -INF, count).sort(-1).values
    return ids.where(ids < count, -1)
