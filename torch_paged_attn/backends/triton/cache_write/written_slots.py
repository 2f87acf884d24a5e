"""Which tokens write: of several tokens with the same slot, only one.

With few tokens, each checks whether a later token has its slot. With many, a first kernel writes
each token's number to an array at its slot, and then the token whose number is found there writes.
The array need not be initialised, since only slots of the call are read.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.runtime.launch import gdc_wait
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# up to so many tokens, a program compares its slots with all others
FEW_TOKENS = 1024
FEW = tl.constexpr(FEW_TOKENS)
# numbers of tokens that a kernel is compiled for that compares all at once: fewer than 256 take as
# long with a size of their own
WIDTHS = (256, FEW_TOKENS)
# pairs of tokens that a kernel for any number compares at a time, so that registers hold them
PAIRS = 512

# tokens per program of the first kernel
CLAIMED = 256


@triton.jit
def slots_of(slot_ptr, stride_slot, token, num_tokens, num_slots):
    """The slots of these tokens; -1 for those that write nothing."""
    slot = tl.load(slot_ptr + token * stride_slot, mask=token < num_tokens, other=-1).to(tl.int64)
    return tl.where(slot < num_slots, slot, -1)


@triton.jit(do_not_specialize=("num_tokens", "num_slots"))
def _claim_kernel(
    slot_ptr,
    claims_ptr,
    stride_slot,
    num_tokens,
    num_slots,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """Write each token's number at its slot; of tokens with the same slot, one number stays."""
    gdc_wait(IS_DEPENDENT)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = slots_of(slot_ptr, stride_slot, token, num_tokens, num_slots)
    tl.store(claims_ptr + slot, token, mask=slot >= 0)


@triton.jit
def is_written_later(token, slot, other, other_slot):
    """Whether a later token among `other` has the same slot."""
    is_later = (other[None, :] > token[:, None]) & (other_slot[None, :] == slot[:, None])
    return tl.sum(is_later.to(tl.int32), 1) > 0


@triton.jit
def _is_claimed(token, slot, claims_ptr):
    """Whether each token writes its slot, where tokens have written their numbers."""
    writes = slot >= 0
    return writes & (tl.load(claims_ptr + slot, mask=writes, other=-1) == token)


@triton.jit
def writes_of(token, slot, pointers, strides, num_tokens, num_slots, WIDTH: tl.constexpr):
    """Whether each token writes its slot. WIDTH: tokens that are compared with, without claims."""
    if pointers.claims is not None:
        return _is_claimed(token, slot, pointers.claims)
    else:
        other = tl.arange(0, WIDTH)
        other_slot = slots_of(pointers.slots, strides.slots, other, num_tokens, num_slots)
        return (slot >= 0) & ~is_written_later(token, slot, other, other_slot)


@triton.jit
def writes_of_any(token, slot, pointers, strides, num_tokens, num_slots, WIDTH: tl.constexpr):
    """The same in a kernel for any number of tokens, which reads claims only if there are many.
    WIDTH: tokens that are compared with at a time."""
    if num_tokens > FEW:
        writes = _is_claimed(token, slot, pointers.claims)
    else:
        writes = slot >= 0
        # no token of an earlier chunk is later than these
        for first in tl.range(tl.min(token, 0) // WIDTH * WIDTH, num_tokens, WIDTH):
            other = first + tl.arange(0, WIDTH)
            other_slot = slots_of(pointers.slots, strides.slots, other, num_tokens, num_slots)
            writes &= ~is_written_later(token, slot, other, other_slot)
    return writes


def width_of(num_tokens: int) -> int:
    """Tokens that each token is compared with; 1 if the array of numbers is used."""
    return next((w for w in WIDTHS if num_tokens <= w), 1)


def claims_of(
    slot_mapping: Tensor, num_slots: int, is_dependent: dict[str, Any]
) -> tuple[Allocation, Launch] | tuple[None, None]:
    """The array of numbers and the launch that writes it, for many tokens."""
    num_tokens = slot_mapping.shape[0]
    if num_tokens <= FEW_TOKENS:
        return None, None
    claim = Launch(
        _claim_kernel,
        (cdiv(num_tokens, CLAIMED),),
        stride_slot=slot_mapping.stride(0),
        num_tokens=num_tokens,
        num_slots=num_slots,
        BLOCK=CLAIMED,
        **is_dependent,
    )
    return Allocation((num_slots,), torch.int32, slot_mapping.device), claim
