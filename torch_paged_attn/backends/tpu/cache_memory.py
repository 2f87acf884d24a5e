"""What torch says of a cache's memory: whose halves keys and values are, and who else has it."""

import torch
from torch import Tensor

# how many tensors, and Python objects, hold a storage
_USERS = getattr(torch._C, "_storage_Use_Count", None)


def whole_of(k: Tensor, v: Tensor) -> Tensor | None:
    """The tensor (2, *k.shape) whose halves k and v are, which a kernel reads as it lies; a half
    alone is a slice to XLA, and a slice that a kernel reads is a copy. None if they are no halves.
    """
    whole = k._base
    if whole is None or whole is not v._base or whole.shape != (2, *k.shape):
        return None
    first = whole.storage_offset()
    offsets = first, first + k.numel()
    is_halves = (k.storage_offset(), v.storage_offset()) == offsets and whole.is_contiguous()
    alike = k.dtype == v.dtype == whole.dtype and k.shape == v.shape
    return whole if is_halves and alike and k.is_contiguous() and v.is_contiguous() else None


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
