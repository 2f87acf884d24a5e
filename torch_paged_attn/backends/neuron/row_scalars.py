"""The numbers of each query row and KV head: sink, slope, factors of its scores and result."""

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.kernels.load_item import NUM_SCALARS
from torch_paged_attn.backends.neuron.kernels.query_tile import LOWEST, MASKED
from torch_paged_attn.backends.neuron.work_info import Heads


def row_scalars(call: AttentionCall, scale: float, heads: Heads) -> Tensor:
    """`(num_rows, heads.together * NUM_SCALARS)` float32; one row where no option needs any."""
    descales = call.q_descale, call.k_descale, call.v_descale
    if all(values is None for values in (call.sinks, call.alibi_slopes, *descales)):
        return torch.zeros(1, heads.together * NUM_SCALARS, device=call.q.device)
    sequence = sequences_of(call)
    q_descale, k_descale, v_descale = (per_token(d, 1.0, sequence, heads) for d in descales)
    is_padding = (sequence == call.batch)[:, None, None]
    sinks = per_token(call.sinks, 0.0, sequence, heads)
    columns = (
        # padding tokens see no sink either
        sinks.clamp(min=LOWEST).masked_fill(is_padding | (sinks == float("-inf")), MASKED),
        per_token(call.alibi_slopes, 0.0, sequence, heads),
        q_descale * k_descale * scale,
        v_descale,
    )
    return torch.stack(columns, 3).reshape(-1, heads.together * NUM_SCALARS)


def sequences_of(call: AttentionCall) -> Tensor:
    """The sequence of each query, `(total_q,)`; that of padding tokens is `batch`."""
    tokens = torch.arange(call.total_q, device=call.q.device, dtype=torch.int32)
    return torch.searchsorted(call.cu_seqlens_q[1:].contiguous(), tokens, right=True)


def per_token(values: Tensor | None, default: float, sequence: Tensor, heads: Heads) -> Tensor:
    """`(total_q, group_size, num_kv_heads)` of values per head, KV head, or sequence too."""
    num_kv_heads, group_size = heads.num_kv_heads, heads.group_size
    if values is None or values.numel() == 0:  # no sequence: padding tokens only
        values = torch.full((), default, device=sequence.device)
    if values.dim() == 2:  # padding tokens take the last sequence's
        values = values[sequence.clamp(max=len(values) - 1)]
    if values.dim() and values.shape[-1] == heads.num_heads:
        by_head = values.unflatten(-1, (num_kv_heads, group_size)).transpose(-1, -2)
    else:
        by_head = values[..., None, :] if values.dim() else values
    return by_head.expand(len(sequence), group_size, num_kv_heads)
