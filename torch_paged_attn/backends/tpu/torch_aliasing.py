"""What torch says of a cache's memory: which tensor it is a view of, and who else has it.

To XLA a view is a copy, and so are rows that fill no lanes. What a view shows may lie in a tensor
that a kernel reads as it is, for instance one whose rows fill lanes (`pages.packed_shape`): the
kernel is given that tensor.
"""

import torch
from torch import Tensor

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
