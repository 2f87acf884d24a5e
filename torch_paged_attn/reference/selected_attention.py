"""Plain PyTorch `selected_attention`: the formula of `flash_varlen` with one more mask."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.reference.attention import FLOAT32, Precision, attend


def selected_attention(
    *args: Any, precision: Precision = FLOAT32, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.selected_attention`, plus `precision`."""
    call = with_sequences(AttentionCall.selected_attention(*args, **kwargs))
    return attend(call, precision, functools.partial(selected_mask, call))


def with_sequences(call: AttentionCall) -> AttentionCall:
    """The call, or for units of a cache one whose sequences all have the whole cache as keys."""
    if not call.is_slots:
        return call
    pages = torch.arange(call.k.shape[0], dtype=torch.int32, device=call.k.device)
    lengths = torch.full_like(call.cu_seqlens_q[:-1], pages.numel() * call.page_size)
    table = pages.expand(call.batch, -1)
    return dataclasses.replace(call, block_table=table, seqused_k=lengths)


def selected_mask(call: AttentionCall, b: int, positions: Tensor, keys: Tensor) -> Tensor:
    """Bool `(num_heads, Lq, Lk)`: whether each query's list names the unit of each key.

    b: the sequence; positions: (Lq,) of its queries; keys: (Lk,) of its keys
    """
    selection = call.selection
    assert selection is not None
    rows = slice(*call.cu_seqlens_q[b : b + 2].tolist())
    units = selection.key_indices[rows].long()  # (Lq, G, K)
    counts = units >= 0
    if selection.num_selected is not None:
        place = torch.arange(units.shape[-1], device=units.device)
        counts = counts & (place < selection.num_selected[rows][..., None])
    size = selection.select_size
    num_units = -(-keys.numel() // size)
    counts = counts & (units < num_units)
    # entries that do not count go to a unit that is cut off
    units = units.where(counts, num_units)
    listed = units.new_zeros(*units.shape[:-1], num_units + 1, dtype=torch.bool)
    listed = listed.scatter(-1, units, True)[..., :num_units]
    mask = listed.repeat_interleave(size, -1)[..., : keys.numel()].transpose(0, 1)
    return mask.repeat_interleave(call.num_heads // mask.shape[0], 0)
