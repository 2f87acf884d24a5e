"""The operator `paged_attn::append_slots`: the cache slots of new tokens.

It is internal, a step of `flash_attn_with_kvcache`, and no part of the public contract. On a GPU it
is one kernel launch, where torch operators would need about ten.
"""

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from torch_paged_attn.ops._library import LIBRARY
from torch_paged_attn.ops.backend import serving
from torch_paged_attn.ops.checks import check_devices, check_dim, check_dtype, check_lengths, fail

OP = "append_slots"
SlotsAndLengths = tuple[Tensor, Tensor]


def check(
    cache_seqlens: Tensor,
    block_table: Tensor,
    cu_seqlens_k_new: Tensor | None,
    page_size: int,
    num_tokens: int,
) -> None:
    """Raise for metadata that the kernel does not support."""
    check_dim(OP, "block_table", block_table, "(batch, max_pages)")
    check_dtype(OP, "block_table", block_table, (torch.int32,))
    batch = block_table.shape[0]
    check_lengths(OP, "cache_seqlens", cache_seqlens, batch, "(batch)")
    if cu_seqlens_k_new is not None:
        check_lengths(OP, "cu_seqlens_k_new", cu_seqlens_k_new, batch + 1, "(batch + 1)")
    elif num_tokens % max(batch, 1) != 0 or (batch == 0 and num_tokens != 0):
        fail(OP, "num_tokens", num_tokens, f"a multiple of batch = {batch}")
    others = {"block_table": block_table, "cu_seqlens_k_new": cu_seqlens_k_new}
    check_devices(OP, cache_seqlens.device, others)


def first_positions(cache_seqlens: Tensor, new: int | Tensor) -> Tensor:
    """The position of each sequence's first new token, int32 (batch,).

    cache_seqlens: (batch,) int32, tokens in the cache; negative for a row of padding
    new: number of new tokens of each sequence, one number or (batch,)

    For a row of padding it is -new, so that all its tokens have negative positions.
    """
    if not isinstance(new, Tensor):
        if new == 1:
            return cache_seqlens.clamp(min=-1)
        return cache_seqlens.masked_fill(cache_seqlens < 0, -new)
    return torch.where(cache_seqlens < 0, -new, cache_seqlens)


def positions(
    starts: Tensor, cu_seqlens: Tensor | None, total: int
) -> tuple[Tensor, Tensor | None]:
    """The position of each new token in its sequence, int64, and the token's sequence.

    starts: (batch,) the position of each sequence's first new token
    cu_seqlens: (batch + 1,) the first new token of each sequence; None: all sequences have
        total / batch of them
    total: number of new tokens

    Returns:
        With cu_seqlens, positions and sequences, (total,) each; tokens past cu_seqlens[-1] are
        padding and have position -1. Without it, positions (batch, total / batch) and None.
    """
    batch = starts.shape[0]
    if cu_seqlens is None:
        first = starts.unsqueeze(1).long()
        if total == batch:
            return first, None
        return first + torch.arange(total // max(batch, 1), device=starts.device), None
    token = torch.arange(total, device=starts.device)
    sequence = torch.searchsorted(cu_seqlens[1:], token, right=True)
    padding = sequence == batch
    sequence = sequence.clamp(max=batch - 1)
    position = token - cu_seqlens[sequence] + starts[sequence]
    return position.masked_fill(padding, -1), sequence


def with_torch_operators(
    cache_seqlens: Tensor,
    block_table: Tensor,
    cu_seqlens_k_new: Tensor | None,
    page_size: int,
    num_tokens: int,
) -> SlotsAndLengths:
    """The operator's result computed with torch operators, on any device."""
    check(cache_seqlens, block_table, cu_seqlens_k_new, page_size, num_tokens)
    batch, max_pages = block_table.shape
    per_sequence = num_tokens // max(batch, 1)
    new = per_sequence if cu_seqlens_k_new is None else cu_seqlens_k_new.diff()
    starts = first_positions(cache_seqlens, new)
    seqused_k = starts + new
    if num_tokens == 0 or batch == 0 or max_pages == 0 or page_size == 0:
        nowhere = torch.full((num_tokens,), -1, dtype=torch.int64, device=cache_seqlens.device)
        return nowhere, seqused_k
    position, sequence = positions(starts, cu_seqlens_k_new, num_tokens)
    entry = position // page_size
    column = entry.clamp(0, max_pages - 1)
    page = block_table.gather(1, column) if sequence is None else block_table[sequence, column]
    # page * page_size + position % page_size, in 64 bits; page -1 gives a negative slot
    slot = torch.add(position, page - entry, alpha=page_size)
    return slot.masked_fill_(column != entry, -1).flatten(), seqused_k


def fake(
    cache_seqlens: Tensor,
    block_table: Tensor,
    cu_seqlens_k_new: Tensor | None,
    page_size: int,
    num_tokens: int,
) -> SlotsAndLengths:
    """Empty results of the operator's shapes and dtypes."""
    check(cache_seqlens, block_table, cu_seqlens_k_new, page_size, num_tokens)
    slots = cache_seqlens.new_empty((num_tokens,), dtype=torch.int64)
    return slots, cache_seqlens.new_empty(cache_seqlens.shape)


@functools.cache
def _gpu_kernel() -> Callable[..., SlotsAndLengths]:
    backend, _ = serving("CUDA")
    return with_torch_operators if backend is None else backend.function(OP)


def _on_gpu(*args: Tensor | int | None) -> SlotsAndLengths:
    return _gpu_kernel()(*args)


LIBRARY.define(
    f"{OP}(Tensor cache_seqlens, Tensor block_table, Tensor? cu_seqlens_k_new, SymInt page_size,"
    " SymInt num_tokens) -> (Tensor slot_mapping, Tensor seqused_k)",
    tags=[torch.Tag.pt2_compliant_tag],
)
torch.library.register_fake(f"paged_attn::{OP}", fake, lib=LIBRARY)
LIBRARY.impl(OP, with_torch_operators, "CompositeExplicitAutograd")
LIBRARY.impl(OP, _on_gpu, "CUDA")
# integers have no gradient
LIBRARY.impl(OP, torch.library.fallthrough_kernel, "Autograd")
_append_slots = torch.ops.paged_attn.append_slots.default


def append_slots(
    cache_seqlens: Tensor,
    block_table: Tensor,
    cu_seqlens_k_new: Tensor | None,
    page_size: int,
    num_tokens: int,
) -> SlotsAndLengths:
    """The slots of new tokens, and the sequence lengths with them.

    A sequence's new tokens follow those in the cache. A token for which block_table has no entry
    gets slot -1. An invalid page id (negative, or past the end of the cache) gives an invalid slot
    of the same kind. `reshape_and_cache` writes none of these on a GPU.

    Args:
        cache_seqlens: (batch,) int32, tokens of each sequence in the cache. A negative length marks
            a row of padding: its tokens get slot -1, and its new length is 0.
        block_table: (batch, max_pages) int32.
        cu_seqlens_k_new: (batch + 1,) int32, the first new token of each sequence; tokens past the
            last entry get slot -1. None: each sequence has num_tokens / batch new tokens.
        page_size: tokens of a page.
        num_tokens: number of new tokens, all sequences together.

    Returns:
        Slots (num_tokens,) int64, and lengths (batch,) int32.

    Raises:
        ValueError: a shape, dtype or device outside the above.
    """
    args = cache_seqlens, block_table, cu_seqlens_k_new, page_size, num_tokens
    # compilers of other devices can compile torch's operators but not this one
    if cache_seqlens.device.type in ("cpu", "cuda"):
        return _append_slots(*args)
    return with_torch_operators(*args)
