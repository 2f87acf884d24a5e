"""Plain PyTorch `selected_mass`: arguments as in `ops`, plus `precision`."""

import functools
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.reference.attention import FLOAT32, Precision, scored_sequences
from torch_paged_attn.reference.selected_attention import selected_mask, with_sequences
from torch_paged_attn.selection_calls import MassCall


def selected_mass(*args: Any, precision: Precision = FLOAT32, **kwargs: Any) -> Tensor:
    """Masses by their formula; `precision=GOLDEN` is float64 throughout."""
    call = MassCall.of(*args, **kwargs)
    attention, selection, compute = call.attention, call.selection, precision.compute
    attention = with_sequences(attention)
    groups, entries = selection.key_indices.shape[1:]
    mass = torch.zeros_like(selection.key_indices, dtype=compute)
    for x in scored_sequences(attention, compute, functools.partial(selected_mask, attention)):
        lse = call.softmax_lse[:, x.rows, None].to(compute)
        p = (x.logits - lse).exp().masked_fill(~x.visible | (lse == float("-inf")), 0.0)
        of_key = p.unflatten(0, (groups, -1)).sum(1)  # (G, Lq, Lk)
        size = selection.select_size
        num_units = -(-of_key.shape[-1] // size)
        padded = torch.nn.functional.pad(of_key, (0, (num_units + 1) * size - of_key.shape[-1]))
        of_unit = padded.unflatten(-1, (num_units + 1, size)).sum(-1).transpose(0, 1)
        units = selection.key_indices[x.rows].long()
        counts = (units >= 0) & (units < num_units)
        if selection.num_selected is not None:
            place = torch.arange(entries, device=units.device)
            counts = counts & (place < selection.num_selected[x.rows][..., None])
        mass[x.rows] = of_unit.gather(-1, units.where(counts, num_units))
    return mass if not precision.round_out else mass.float()
