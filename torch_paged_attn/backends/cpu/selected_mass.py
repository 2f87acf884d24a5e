"""`selected_mass` on CPUs, composed of PyTorch operators in chunks of bounded size."""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.backends.cpu.gathered import Chunk, announce, chunks
from torch_paged_attn.ops.selected_checks import check_selected_values
from torch_paged_attn.selection_calls import MassCall


def selected_mass(*args: Any, **kwargs: Any) -> Tensor:
    """Arguments as in `ops.selected_mass`."""
    call = MassCall.of(*args, **kwargs)
    attention, selection = call.attention, call.selection
    check_selected_values(attention)
    announce("selected_mass")
    mass = torch.zeros_like(selection.key_indices, dtype=torch.float32)
    group = attention.num_kv_heads, attention.group_size
    for rows, parts in chunks(attention):
        lse = call.softmax_lse[:, rows].T[..., None].unflatten(1, group)
        for entries in parts:
            x = Chunk.of(attention, rows, entries)
            p = (x.logits() - lse).exp().masked_fill(lse == float("-inf"), 0.0)
            of_key = p.sum(2)
            if mass.shape[1] == 1:
                of_key = of_key.sum(1, keepdim=True)
            mass[rows, :, entries] = of_key.unflatten(-1, (-1, selection.select_size)).sum(-1)
    return mass
