"""Which queries a program has; the device computes it from cumulative lengths.

The tiles of all sequences are numbered with gaps: the first tile of sequence b is number
`cu_seqlens_q[b] // TOKENS + GAP * b`. So the number of programs depends on shapes only, and a
program finds its sequence by counting how many start before its number. Rows after the last
sequence count as one more sequence, without keys.
"""

import triton
import triton.language as tl

from torch_paged_attn.attention_call import AttentionCall

# windows this wide hide nothing: no sequence is as long
UNBOUNDED = 2**30


def is_bound(window: int) -> bool:
    """Whether a window hides keys."""
    return 0 <= window < UNBOUNDED


def key_bound(call: AttentionCall) -> int:
    """How many keys a sequence may have, by shapes."""
    if call.block_table is None:
        return call.k.shape[0]
    return call.block_table.shape[1] * call.page_size


def num_tiles(total_q: int, batch: int, tokens: int, gap: int) -> int:
    """The number of programs that cover all rows, whatever the lengths are."""
    return total_q // tokens + gap * (batch + 1)


def programs_in_turns(total_q: int, batch: int, longest: int, tokens: int) -> int:
    """The number of programs that share the tiles of a sequence: program p of n has tiles p, p + n,
    ... `longest` is the hint max_seqlen_q. There are at most twice as many as a sequence of mean
    length has tiles, because further ones would mostly have nothing to do.
    """
    mean = -(-total_q // max(batch, 1))
    if mean * batch == total_q:
        # probably all sequences have this number of queries
        longest = min(longest, mean)
    return max(min(-(-longest // tokens), 2 * -(-mean // tokens)), 1)


@triton.jit
def find_tile(number, cu_seqlens_q_ptr, batch, TOKENS: tl.constexpr, GAP: tl.constexpr):
    """The sequence of tile `number`, and which of its tiles it is; past its last one there is
    nothing to do.
    """
    WIDTH: tl.constexpr = 128
    started = tl.full([], 0, tl.int32)
    for b0 in tl.range(0, batch + 1, WIDTH):
        b = b0 + tl.arange(0, WIDTH)
        bound = tl.load(cu_seqlens_q_ptr + b, mask=b <= batch, other=0)
        first = bound // TOKENS + GAP * b
        started += tl.sum(((b <= batch) & (first <= number)).to(tl.int32), 0)
    b = tl.maximum(started - 1, 0)
    return b, number - tl.load(cu_seqlens_q_ptr + b) // TOKENS - GAP * b


@triton.jit
def query_span(b, cu_seqlens_q_ptr, batch, total_q):
    """First query row of sequence b and the row after its last."""
    start = tl.load(cu_seqlens_q_ptr + b, mask=b <= batch, other=0)
    stop = tl.load(cu_seqlens_q_ptr + b + 1, mask=b < batch, other=0)
    return start, tl.where(b < batch, stop, total_q)


@triton.jit
def key_span(
    b,
    cu_seqlens_q_ptr,
    cu_seqlens_k_ptr,
    seqused_k_ptr,
    batch,
    max_keys,
    IS_PAGED: tl.constexpr,
    k_start_ptr=None,
):
    """The first row of sequence b's packed keys, and its number of keys (0 for padding rows)."""
    exists = b < batch
    if cu_seqlens_k_ptr is not None:
        start = tl.load(cu_seqlens_k_ptr + b, mask=exists, other=0)
        length = tl.load(cu_seqlens_k_ptr + b + 1, mask=exists, other=0) - start
    elif IS_PAGED:
        start = 0
        length = 0
    else:
        start = tl.load(cu_seqlens_q_ptr + b, mask=exists, other=0)
        length = tl.load(cu_seqlens_q_ptr + b + 1, mask=exists, other=0) - start
    if seqused_k_ptr is not None:
        length = tl.load(seqused_k_ptr + b, mask=exists, other=0)
    if k_start_ptr is not None:
        start = tl.load(k_start_ptr + b, mask=exists, other=0)
        start = tl.minimum(tl.maximum(start, 0), max_keys)
    # unchecked lengths must not lead outside the keys or the table
    room = max_keys if IS_PAGED else max_keys - start
    return start, tl.maximum(tl.minimum(length, room), 0)


@triton.jit
def keys_of(b, lengths, batch, max_keys, IS_PAGED: tl.constexpr):
    """`key_span` with the pointers in one tuple: cu_seqlens_q, cu_seqlens_k, seqused_k, k_start,
    and q_position, which is not used.
    """
    return key_span(b, lengths[0], lengths[1], lengths[2], batch, max_keys, IS_PAGED, lengths[3])


@triton.jit
def without_left_out(b, query_len, seqused_k_ptr, batch, SKIPS: tl.constexpr):
    """query_len, and with SKIPS 0 for sequences whose number of keys is negative: another launch
    computes their rows.
    """
    if SKIPS:
        query_len = tl.where(tl.load(seqused_k_ptr + b, mask=b < batch, other=0) < 0, 0, query_len)
    return query_len


@triton.jit
def position_of_first(b, query_len, key_len, q_position_ptr, batch):
    """The position of sequence b's first query: q_position[b] if it is given, else key_len -
    query_len, so that the last query is at the last key.
    """
    if q_position_ptr is None:
        return key_len - query_len
    else:
        return tl.load(q_position_ptr + b, mask=b < batch, other=0)
