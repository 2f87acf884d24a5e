"""The numbers of each query row and KV head: sink, slope, factors of its scores and result."""

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.kernels.load_item import NUM_SCALARS
from torch_paged_attn.backends.neuron.kernels.query_tile import LOWEST, MASKED
from torch_paged_attn.backends.neuron.work_info import Heads


def row_scalars(call: AttentionCall, scale: float, heads: Heads) -> Tensor:
    """`(num_rows, heads.together * NUM_SCALARS)` float32; one row where no option needs any."""
    device, cu_seqlens_q, total_q = call.q.device, call.cu_seqlens_q, call.total_q
    descales = call.q_descale, call.k_descale, call.v_descale
    if all(values is None for values in (call.sinks, call.alibi_slopes, *descales)):
        return torch.zeros(1, heads.together * NUM_SCALARS, device=device)
    tokens = torch.arange(total_q, device=device, dtype=torch.int32)
    sequence = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens, right=True)
    num_kv_heads, group_size = heads.num_kv_heads, heads.group_size

    def per_token(values: Tensor | None, default: float) -> Tensor:
        """`(total_q, group_size, num_kv_heads)` of values per head, KV head, or sequence too."""
        if values is None or values.numel() == 0:  # no sequence: padding tokens only
            values = torch.full((), default, device=device)
        if values.dim() == 2:  # padding tokens take the last sequence's
            values = values[sequence.clamp(max=len(values) - 1)]
        if values.dim() and values.shape[-1] == heads.num_heads:
            by_head = values.unflatten(-1, (num_kv_heads, group_size)).transpose(-1, -2)
        else:
            by_head = values[..., None, :] if values.dim() else values
        return by_head.expand(total_q, group_size, num_kv_heads)

    q_descale, k_descale, v_descale = (per_token(d, 1.0) for d in descales)
    is_padding = (sequence == len(cu_seqlens_q) - 1)[:, None, None]
    sinks = per_token(call.sinks, 0.0)
    columns = (
        # padding tokens see no sink either
        sinks.clamp(min=LOWEST).masked_fill(is_padding | (sinks == float("-inf")), MASKED),
        per_token(call.alibi_slopes, 0.0),
        q_descale * k_descale * scale,
        v_descale,
    )
    return torch.stack(columns, 3).reshape(-1, heads.together * NUM_SCALARS)
