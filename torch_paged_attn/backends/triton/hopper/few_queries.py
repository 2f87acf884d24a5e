"""Sequences of few queries in pages, decodes and guessed tokens: who takes them, and in which form.

The limits are those of measurements: benchmarks/notes/gpu.md.
"""

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.support import (
    BLOCK_M,
    LEAST_KEYS,
    LEAST_TALL,
    OF_LISTS,
    converts,
    is_bound,
    may_divide,
    reach_of,
    width_of,
)
from torch_paged_attn.backends.triton.runtime.target import is_even, target_of
from torch_paged_attn.ops.lacking import lacking

# rows of a sequence's tile that the portable kernel is fast at; where tiles are no more than
# multiprocessors, fewer, of heads of up to 128 if there are so many keys; and fewer where nobody
# had better cut tiles that are so many, or see so few keys
MOST_PORTABLE, MOST_PORTABLE_OF_FEW, LEAST_KEYS_OF_FEW = 16, 7, 1024
MOST_PORTABLE_OF_UNCUT, LEAST_UNCUT, MOST_UNCUT_OF_FEW = 8, 33, 512
# tokens of a sequence, of groups of one head, that it is slow at all the same
LEAST_TOKENS = 3
# tiles of 128 keys for each multiprocessor, as far as is said, from which on they are dealt out, of
# guessed tokens and of decodes, also where groups are no power of two; of guessed tokens, keys of
# the longest sequence
LEAST_DEALT, LEAST_DEALT_OF_DECODES, LEAST_DEALT_OF_UNEVEN, LEAST_REACH = 64, 8, 80, 2048
# groups of heads, and tiles, of decodes whose keys are dealt out
EIGHT, DEALT_TILES = 8, range(17, 64)
# tiles, and keys, of decodes with wide heads
WIDE_TILES, MOST_WIDE_REACH = range(33, 133), 1024
# of guessed tokens, keys of the longest sequence up to which nobody had better cut tiles, and twice
# as many where tiles fill the chip twice; of decodes, heads of a group and tiles
MOST_UNCUT, FULL = 1024, 2
LEAST_UNCUT_GROUP, UNCUT_TILES = 5, range(33, 265)
# of 8-bit caches; of wide heads, if tiles are few; of decodes, where groups are no power of two
MOST_UNCUT_8_BIT, MOST_UNCUT_WIDE, MOST_UNCUT_OF_UNEVEN = 512, 512, 512
# heads of a group, of decodes whose keys two consumers divide, and of 8-bit caches
LEAST_DIVIDED_GROUP, LEAST_UNCUT_8_BIT = 4, 4
# keys where two consumers divide them: of guessed tokens with so many tiles, and of those with more
MOST_DIVIDED, DIVIDED_TILES, MOST_DIVIDED_OF_MANY = 4096, range(33, 133), 2048
# tiles of guessed tokens, and keys of the longest sequence, that are dealt out though they are few
MOST_FEW_DEALT, FEW_REACH = 32, 2048
# decodes whose tiles are not cut though they have up to 2048 keys
DIVIDED_DECODES = range(56, 133)
# tiles from which on nothing is dealt out
MOST_DEALT = 528


def is_guessed(call: AttentionCall, longest: int) -> bool:
    """Whether sequences have as many queries as tokens that were guessed are, by what is said of
    the longest one's: so few that all heads of a group fit in the rows of one consumer, and more
    than the portable kernel is fast at. Where nothing is said, the tokens of all stand for it: most
    of few sequences decode then. Decodes are among these where the portable kernel is slow at a
    group, and there are many keys.
    """
    if call.block_table is None or call.layout is not None:
        return False
    group = call.group_size
    if not 0 < longest * group <= BLOCK_M:
        return False
    rows, is_said = longest * group, bool(call.max_seqlen_k)
    if _are_decodes(call, longest):
        return _is_guessed_decode(call, not is_even(group), is_said)
    if rows > MOST_PORTABLE or (is_uncut(call, longest) and _is_uncut_sooner(call, rows)):
        return True
    if group == 1 and longest > LEAST_TOKENS:
        # the portable kernel is faster where a window shows few keys, or they are of 8 bits
        return not (converts(call) or is_bound(call.window_size_left))
    width, tiles = width_of(call.head_dim), call.batch * call.num_kv_heads
    is_long = width == 256 or (width == 128 and is_said and reach_of(call) > LEAST_KEYS_OF_FEW)
    if tiles > target_of(call.q.device).multiprocessors or not is_long:
        return False
    # few keys of wide heads are read as fast by the portable kernel
    is_wide = width == 256 and is_said and not converts(call) and reach_of(call) > MOST_UNCUT
    return rows > MOST_PORTABLE_OF_FEW or is_wide


def _are_decodes(call: AttentionCall, longest: int) -> bool:
    """Whether sequences have one query each: where nothing is said, `longest` is that of all."""
    return longest == 1 or call.total_q <= call.batch


def _is_uncut_sooner(call: AttentionCall, rows: int) -> bool:
    """Whether guessed tokens of few rows are among these since nobody had better cut tiles."""
    if converts(call):
        return call.group_size >= LEAST_UNCUT_8_BIT
    is_full = call.batch * call.num_kv_heads >= LEAST_UNCUT or reach_of(call) <= MOST_UNCUT_OF_FEW
    return width_of(call.head_dim) == 128 and rows > MOST_PORTABLE_OF_UNCUT and is_full


def _is_guessed_decode(call: AttentionCall, is_uneven: bool, is_said: bool) -> bool:
    """The same of decodes. A group is uneven if it is no power of two; others come here only where
    something is said of their keys."""
    tiles, width = call.batch * call.num_kv_heads, width_of(call.head_dim)
    if is_said and is_uncut(call, 1) and width <= 128 and tiles in UNCUT_TILES:
        measured = DIVIDED_TILES if reach_of(call) <= MOST_UNCUT else DIVIDED_DECODES
        is_measured = call.group_size == LEAST_DIVIDED_GROUP and tiles in measured
        is_large = call.group_size >= LEAST_UNCUT_GROUP or (is_measured and width == 128)
        return is_large and not (is_uneven and reach_of(call) <= MOST_UNCUT_OF_UNEVEN)
    if is_uneven:
        is_few = tiles < target_of(call.q.device).multiprocessors
        return is_few and (reach_of(call) >= LEAST_TALL if converts(call) else is_dealt(call, 1))
    if converts(call) or not is_said:
        return False
    if width == 256:
        return tiles in WIDE_TILES and reach_of(call) <= MOST_WIDE_REACH
    is_measured = call.group_size == EIGHT and width == 128 and tiles in DEALT_TILES
    return is_measured and is_dealt(call, 1)


def is_uncut(call: AttentionCall, longest: int) -> bool:
    """Whether tiles of guessed tokens, or of decodes, are numbered: by what is said of the longest
    sequence's keys nobody had better cut them, so that there is no list and nothing to add up."""
    if not call.max_seqlen_k or lacking(call, OF_LISTS) is not None:
        return False
    tiles, are_tokens = call.batch * call.num_kv_heads, not _are_decodes(call, longest)
    most = MOST_UNCUT
    if converts(call):
        most = MOST_UNCUT_8_BIT if are_tokens else 0
    elif may_divide(call) and not are_tokens:
        most = MOST_DIVIDED_OF_MANY if tiles in DIVIDED_DECODES else MOST_UNCUT
    elif may_divide(call) and tiles >= DIVIDED_TILES.start:
        most = MOST_DIVIDED if tiles in DIVIDED_TILES else MOST_DIVIDED_OF_MANY
    elif width_of(call.head_dim) == 256 and tiles < DIVIDED_TILES.start:
        most = MOST_UNCUT_WIDE
    elif are_tokens and tiles >= FULL * target_of(call.q.device).multiprocessors:
        most = FULL * MOST_UNCUT
    return reach_of(call) <= most


def is_dealt(call: AttentionCall, longest: int) -> bool:
    """Whether sequences of few queries have so many keys that they are better dealt out in equal
    shares: of fewer, or of tiles of few keys, a list of tiles is the better one.
    """
    reach, are_decodes = reach_of(call), _are_decodes(call, longest)
    tiles = call.batch * call.num_kv_heads * (-(-reach // (2 * LEAST_KEYS)))
    is_few = call.batch * call.num_kv_heads <= MOST_FEW_DEALT and not are_decodes
    # 8-bit caches have taller tiles of more keys
    few_reach = range(FEW_REACH, (2 if converts(call) else 1) * FEW_REACH + 1)
    if is_few and call.max_seqlen_k and reach in few_reach:
        return True
    if call.batch * call.num_kv_heads > MOST_DEALT:
        return False  # a program has so many that few have to be cut
    is_decode = are_decodes and call.group_size == EIGHT
    least = LEAST_DEALT_OF_DECODES if is_decode else LEAST_DEALT
    if are_decodes and not is_even(call.group_size):
        least = LEAST_DEALT_OF_UNEVEN
    is_long = is_decode or reach >= LEAST_REACH
    return is_long and tiles >= least * target_of(call.q.device).multiprocessors
