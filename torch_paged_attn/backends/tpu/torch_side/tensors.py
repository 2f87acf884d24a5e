"""Torch's tensors before a program sees them: rounded-up sizes, and the memory behind views.

The numbers of sequences, tokens, pages of a sequence and columns of a layout change from call to
call, and XLA compiles for each shape. Here, and only here, they become the next power of two
(*buckets*), so that serving does not recompile. The true counts need no arguments of their own:
padding tokens come after `cu_seqlens_q[-1]`, padding sequences have no tokens and no keys, and
padding slots are negative.

To XLA a view is a copy, and so are rows that fill no lanes. What a view shows may lie in a tensor
that a kernel reads as it is, for instance one whose rows fill lanes (`pages.packed_shape`): the
kernel is given that tensor.
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
    longest = int(call.max_seqlen_q)  # tiles of one token are for decodes
    padded: dict[str, Any] = {
        "q": _grow(call.q, 0, total_q),
        "max_seqlen_q": longest if longest == 1 else bucket(longest),
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


# how many tensors, and Python objects, hold a storage
_USERS = getattr(torch._C, "_storage_Use_Count", None)


def memory_of(cache: Tensor) -> Tensor:
    """The tensor that a cache (..., num_kv_heads, page_size, head_dim) is a view of, if a kernel
    can read it in the cache's place, else the cache.
    """
    base = cache._base
    return base if base is not None and _shows(cache, base) else cache


def whole_of(k: Tensor, v: Tensor) -> Tensor | None:
    """The tensor of two planes of which k is the first and v the second, which a kernel reads as it
    lies; a plane alone is a slice to XLA. None if they are no planes.
    """
    whole = k._base
    if whole is None or whole is not v._base or whole.dim() != 5 or whole.shape[0] != 2:
        return None
    is_each = k.shape == v.shape and _shows(k, whole[0]) and _shows(v, whole[1])
    return whole if is_each else None


def is_front_of(v: Tensor, k: Tensor) -> bool:
    """Whether values are the first numbers of keys, in the same memory."""
    is_alike = v.shape[:-1] == k.shape[:-1] and v.shape[-1] <= k.shape[-1] and v.dtype == k.dtype
    is_there = v.stride() == k.stride() and v.storage_offset() == k.storage_offset()
    base = v._base
    return is_alike and is_there and base is not None and (base is k or base is k._base)


def _shows(cache: Tensor, rows: Tensor) -> bool:
    """Whether a kernel that is given `rows` takes it for what the cache shows: of each row several
    keys, or one and numbers of no key behind it.
    """
    if rows.dim() != cache.dim():
        return False
    *front, page_size, head_dim = cache.shape
    *front_of_rows, num_rows, width = rows.shape
    if front != front_of_rows or cache.dtype != rows.dtype or not rows.is_contiguous():
        return False
    keys, is_filled = divmod(width, head_dim)
    if is_filled:
        keys, head_dim = 1, width
    strides = *rows.stride()[:-2], head_dim, 1
    is_there = cache.stride() == strides and cache.storage_offset() == rows.storage_offset()
    return is_there and keys > 0 and page_size == num_rows * keys


def is_alone(cache: Tensor) -> bool:
    """Whether the cache is all of its memory and no other tensor shares it: it may then be given
    away for the new cache's.
    """
    if _USERS is None or cache._base is not None or not cache.is_contiguous():
        return False
    storage = cache.untyped_storage()
    # the tensor, and `storage`
    users = _USERS(storage._cdata)
    return storage.nbytes() == cache.numel() * cache.itemsize and users <= 2
