"""Shapes as a compiled program sees them: counts rounded up, so that serving does not recompile.

How many sequences, tokens, pages and columns a call has changes from step to step, and each new
shape would be compiled anew. Here, and only here, such counts become the next power of two. The
true counts need no arguments of their own: padding tokens lie behind `cu_seqlens_q[-1]`, padding
sequences have no tokens and no keys, and padding slots are negative.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from torch_paged_attn.attention_call import per_sequence_tensors

LEAST = 8


def bucket(count: int) -> int:
    """The next power of two, from 8."""
    return max(LEAST, 1 << max(count - 1, 0).bit_length())


def pad_attention(arguments: dict[str, Any]) -> dict[str, Any]:
    """The tensors of an attention call, by name, in the shapes of their buckets."""
    padded = dict(arguments)
    total_q = arguments["q"].shape[0]
    batch = arguments["cu_seqlens_q"].shape[0] - 1
    padded["q"] = _grow(arguments["q"], 0, bucket(total_q))
    if arguments["attn_bias"] is not None:
        padded["attn_bias"] = _grow(arguments["attn_bias"], 1, bucket(total_q))
    if arguments["block_table"] is None:
        total_k = bucket(arguments["k"].shape[0])
        padded["k"], padded["v"] = (_grow(arguments[name], 0, total_k) for name in "kv")
    else:
        max_pages = bucket(arguments["block_table"].shape[1])
        padded["block_table"] = _grow(arguments["block_table"], 1, max_pages)
    if arguments.get("col_indices") is not None:
        nnz = bucket(arguments["col_indices"].shape[-1])
        padded["col_indices"] = _grow(arguments["col_indices"], -1, nnz)
    # padded with zeros; what has fewer dimensions is not per sequence
    for name, dimensions in per_sequence_tensors().items():
        tensor = padded.get(name)
        if tensor is not None and tensor.dim() == dimensions:
            padded[name] = _grow(tensor, 0, bucket(batch))
    for name in ("cu_seqlens_q", "cu_seqlens_k"):
        if arguments[name] is not None:
            end = arguments[name][-1:].expand(bucket(batch) - batch)
            padded[name] = torch.cat([arguments[name], end])
    return padded


def pad_tokens(key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """New keys and values, and slots of which those behind the last write nothing."""
    size = bucket(slots.shape[0])
    key, value = (_grow(x[: slots.shape[0]], 0, size) for x in (key, value))
    return key, value, pad(slots, (0, size - slots.shape[0]), value=-1)


def _grow(tensor: Tensor, dimension: int, size: int) -> Tensor:
    missing = size - tensor.shape[dimension]
    if missing == 0:
        return tensor
    behind = tensor.dim() - 1 - dimension % tensor.dim()
    return pad(tensor, (0, 0) * behind + (0, missing))
