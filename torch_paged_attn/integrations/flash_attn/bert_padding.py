"""flash-attn's submodule `flash_attn.bert_padding`: conversion of padded batches to packed rows and
back. As in flash-attn, the host reads the mask.
"""

import torch
from torch import Tensor

__all__ = [
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
    "unpad_input_for_concatenated_sequences",
]


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows `indices` (n,) of x (rows, ...)."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor (first_axis_dim, ...) whose rows `indices` are `values` (n, ...), the others 0."""
    empty = values.new_zeros(first_axis_dim, *values.shape[1:])
    return empty.index_put((indices,), values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of a padded batch without the padding, as packed rows.

    hidden_states: (batch, seqlen, ...)
    attention_mask: (batch, seqlen) bool or int, 1 for a token
    unused_mask: (batch, seqlen) bool or int, 1 for a padding position that is kept

    Returns the rows (total, ...), their indices in the flattened batch (total,), cu_seqlens
    (batch + 1,) int32, the longest sequence, and the number of tokens of each sequence (batch,)
    int32.
    """
    tokens = attention_mask.bool()
    kept = tokens if unused_mask is None else tokens | unused_mask.bool()
    indices = kept.flatten().nonzero().flatten()
    cu_seqlens, longest = _bounds(kept.sum(1))
    used = tokens.sum(1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """`unpad_input` for a batch whose rows contain several sequences one after the other.

    hidden_states: (batch, seqlen, ...)
    attention_mask_in_length: (batch, seqlen) int, the lengths of a row's sequences, then zeros

    Returns the rows (total, ...), their indices in the flattened batch (total,), cu_seqlens
    (sequences + 1,) int32 and the longest sequence.
    """
    positions = torch.arange(hidden_states.shape[1], device=hidden_states.device)
    tokens = positions < attention_mask_in_length.sum(1, keepdim=True)
    indices = tokens.flatten().nonzero().flatten()
    lengths = attention_mask_in_length.flatten()
    cu_seqlens, longest = _bounds(lengths[lengths > 0])
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch (batch, seqlen, ...) whose rows `indices` are those of hidden_states
    (total, ...); padding is 0.
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def _bounds(lengths: Tensor) -> tuple[Tensor, int]:
    """cu_seqlens of sequences of these lengths, and the longest."""
    cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return cu_seqlens, int(lengths.max()) if len(lengths) else 0
