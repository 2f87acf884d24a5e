"""Sizes of tensors are rounded up to powers of two (*buckets*), so that serving does not recompile.

The numbers of sequences, tokens, pages of a sequence and columns of a layout change from call to
call, and XLA compiles for each shape. Here, and only here, they become the next power of two. The
true counts need no arguments of their own: padding tokens come after `cu_seqlens_q[-1]`, padding
sequences have no tokens and no keys, and padding slots are negative.
"""

import dataclasses
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_paged_attn.attention_call import per_sequence_tensors
from torch_paged_attn.backends.tpu.call import Call

LEAST = 8

PER_SEQUENCE = per_sequence_tensors()


def bucket(count: int) -> int:
    """The next power of two, 8 at least."""
    return max(LEAST, 1 << max(count - 1, 0).bit_length())


def pad_attention(call: Call) -> Call:
    """The call with tensors whose sizes are buckets, and with a bucket as `max_seqlen_q`."""
    total_q, batch = bucket(call.total_q), bucket(call.batch)
    padded: dict[str, Any] = {
        "q": _grow(call.q, 0, total_q),
        "max_seqlen_q": bucket(int(call.max_seqlen_q)),
    }
    if call.attn_bias is not None:
        padded["attn_bias"] = _grow(call.attn_bias, 1, total_q)
    if call.block_table is None:
        total_k = bucket(call.k.shape[0])
        padded |= {"k": _grow(call.k, 0, total_k), "v": _grow(call.v, 0, total_k)}
    else:
        padded["block_table"] = _grow(call.block_table, 1, bucket(call.block_table.shape[1]))
    if call.col_indices is not None:
        padded["col_indices"] = _grow(call.col_indices, -1, bucket(call.col_indices.shape[-1]))
    # padded with zeros; what has fewer dimensions is not per sequence
    for name, dimensions in PER_SEQUENCE.items():
        tensor = padded.get(name, getattr(call, name))
        if tensor is not None and tensor.dim() == dimensions:
            padded[name] = _grow(tensor, 0, batch)
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        bounds = getattr(call, name)
        if bounds is not None and batch > call.batch:
            padded[name] = torch.cat([bounds, bounds[-1:].expand(batch - call.batch)])
    return dataclasses.replace(call, **padded)


def pad_results(total_q: int, *results: Tensor | None) -> list[Tensor | None]:
    """Results of a forward, or their gradients, padded to the `total_q` rows of a padded call."""

    def padded(x: Tensor | None) -> Tensor | None:
        # lse has its rows last, and two dimensions
        return None if x is None else _grow(x, 0 if x.dim() == 3 else 1, total_q)

    return [padded(x) for x in results]


def pad_tokens(key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """New keys, values and their slots, padded; a padding slot is -1, which writes nothing."""
    size = bucket(slots.shape[0])
    key, value = (_grow(x[: slots.shape[0]], 0, size) for x in (key, value))
    return key, value, pad(slots, (0, size - slots.shape[0]), value=-1)


def _grow(tensor: Tensor, dimension: int, size: int) -> Tensor:
    missing = size - tensor.shape[dimension]
    if missing == 0:
        return tensor
    behind = tensor.dim() - 1 - dimension % tensor.dim()
    return pad(tensor, (0, 0) * behind + (0, missing))
