"""Where each entry of lists of single keys comes among the entries that name the same key.

Entries of a key come in the order of their tokens, and those of the next key follow, so that the
place of each entry is the same every time. The tokens that name a key are bits of a row of words,
set in any order; a token's rank is the number of bits before its own.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedOptions,
    SelectedPointers,
    SelectedSizes,
    find_keys,
    find_token,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2
from torch_paged_attn.backends.triton.runtime.workspace import Allocation

# tokens of a word; entries that a program marks at a time; keys and words that one counts
WORD = tl.constexpr(32)
ENTRIES, KEYS, WORDS = 512, 16, 128


class Ranks(NamedTuple):
    """Of some tokens and, for each group of lists, of each row of k."""

    words: Any  # (G, total_k, words) int32: bit i of word w is token 32 w + i
    before: Any  # the same shape: entries of the row in the words before
    starts: Any  # (G * total_k + 1,) int32: entries of the rows before, and of the groups before


@triton.jit
def bits_of(x):
    """How many bits of 32-bit numbers are set."""
    x = x.to(tl.uint32, bitcast=True)
    x = x - ((x >> 1) & 0x55555555)
    x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    x = (x + (x >> 4)) & 0x0F0F0F0F
    return ((x * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def places_of(slot, is_seen, local, group, ranks, num_words, num_rows):
    """Where entries of a token come among those of all groups. slot: rows of k; local: the token's
    number among those that have ranks."""
    row = group * num_rows + slot
    at = row * num_words + local // WORD
    words = tl.load(ranks.words + at, mask=is_seen, other=0)
    before = tl.load(ranks.before + at, mask=is_seen, other=0)
    start = tl.load(ranks.starts + row, mask=is_seen, other=0)
    lower = (tl.full([], 1, tl.int32) << (local % WORD)) - 1
    return start + before + bits_of(words & lower)


@triton.jit(do_not_specialize=("first_row", "num_words", *SelectedSizes._fields))
def _mark_keys_kernel(
    pointers, words_ptr, first_row, num_words,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, scalars, OPTIONS: tl.constexpr,
):  # fmt: skip
    """Set the bits of a token and a group. Rows of keys that the token does not see have none."""
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    local, group = tl.program_id(0), tl.program_id(1)
    token = find_token(first_row + local, group, pointers, strides, sizes, OPTIONS)
    bit = tl.full([OPTIONS.BLOCK_N], 1, tl.int32) << (local % WORD)
    for n0 in tl.range(0, token.count, OPTIONS.BLOCK_N):
        _, slot, is_seen = find_keys(n0, token, pointers, strides, sizes, scalars, OPTIONS)
        at = (group.to(tl.int64) * num_rows + slot) * num_words + local // WORD
        tl.atomic_or(words_ptr + at, bit, mask=is_seen, sem="relaxed")


@triton.jit(do_not_specialize=("num_rows", "num_words"))
def _count_marks_kernel(
    words_ptr, before_ptr, counts_ptr, num_rows, num_words, KEYS: tl.constexpr,
    WORDS: tl.constexpr,
):  # fmt: skip
    """Of KEYS rows of k of all groups: marks before each word, and all of them."""
    row = (tl.program_id(0) * KEYS + tl.arange(0, KEYS)).to(tl.int64)
    total = tl.zeros([KEYS], tl.int32)
    for w0 in tl.range(0, num_words, WORDS):
        w = w0 + tl.arange(0, WORDS)
        at = row[:, None] * num_words + w[None, :]
        inside = (row < num_rows)[:, None] & (w < num_words)[None, :]
        marks = bits_of(tl.load(words_ptr + at, mask=inside, other=0))
        tl.store(before_ptr + at, total[:, None] + tl.cumsum(marks, 1) - marks, mask=inside)
        total += tl.sum(marks, 1)
    tl.store(counts_ptr + row, total, mask=row < num_rows)


def num_words(count: int) -> int:
    """Words of a row of k for so many tokens."""
    return cdiv(count, WORD.value)


def plan_ranks(
    call: AttentionCall, options: SelectedOptions, first: int, count: int
) -> Callable[[SelectedPointers], Ranks]:
    """What makes the ranks of `count` tokens from query row `first` on, of calls like this one.
    options: those of a kernel."""
    groups, entries = call.lists.key_indices.shape[1:]
    rows, words_of_row = call.k.shape[0], num_words(count)
    mark = Launch(
        _mark_keys_kernel,
        (count, groups),
        first_row=first,
        num_words=words_of_row,
        **selected.sizes_of(call)._asdict(),
        strides=selected.strides_of(call),
        scalars=selected.scalars_of(call),
        OPTIONS=options._replace(BLOCK_N=min(next_power_of_2(entries), ENTRIES)),
        num_warps=4,
    )
    count_marks = Launch(
        _count_marks_kernel,
        (cdiv(groups * rows, KEYS),),
        num_rows=groups * rows,
        num_words=words_of_row,
        KEYS=KEYS,
        WORDS=WORDS,
        num_warps=4,
    )
    new_words = Allocation((groups, rows, words_of_row), torch.int32, call.q.device)
    new_counts = Allocation((groups * rows,), torch.int32, call.q.device)

    def make(given: SelectedPointers) -> Ranks:
        words, before, counts = new_words().zero_(), new_words(), new_counts()
        mark(given, words)
        count_marks(words, before, counts)
        starts = torch.nn.functional.pad(torch.cumsum(counts, 0, dtype=torch.int32), (1, 0))
        return Ranks(words, before, starts)

    return make
