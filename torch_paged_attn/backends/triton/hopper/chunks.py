"""Chunks of prompts in pages: which have tiles of few rows, whose are numbered, and whose keys two
consumers divide.

The limits are those of measurements: docs/design/hopper_forward.md.
"""

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.support import (
    BLOCK_M,
    NARROW,
    OF_LISTS,
    SMALL,
    converts,
    gathers,
    has_few_tiles,
    has_low_rows,
    is_float8,
    may_divide,
    reach_of,
    width_of,
)
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.ops.lacking import lacking

# chunks of prompts that are told apart without a list of tiles, and for quarters of the chip that
# their tiles fill, keys of the longest sequence from which on they had better be cut
MOST_CHUNKS, MOST_NUMBERED = 4, (512, 512, 1024, 2048, 2048)

# keys past which prompts of narrow heads that do not fill the chip are this kernel's
LEAST_CONTEXT = 200

# of 8-bit caches, keys up to which such tiles have one consumer and are not cut, of so many rows to
# a multiprocessor; and keys up to which they have one of fewer rows
MOST_LOW_8_BIT, MOST_ROWS_8_BIT = 1024, 80
MOST_LOW_8_BIT_OF_FEW, MOST_ROWS_8_BIT_OF_FEW = 2048, 32

# chunks whose keys two consumers divide, by keys of the longest sequence: of so many, rows to a
# multiprocessor; where rows of keys are copied, the first alone. Of fewer rows, past the first, one
# consumer's tiles are better
ROWS_DIVIDED = {1024: range(129), 2048: range(161), 4160: range(13, 65), 8192: range(13, 25)}
ROWS_DIVIDED_NARROW = ROWS_DIVIDED | {2048: range(201)}  # of narrow heads
MOST_DIVIDED_OF_CHUNKS = 2048
# the most such rows where rows of keys are copied for one chunk, and where a window hides most keys
MOST_ROWS_DIVIDED = 70

# of 8-bit caches of narrow heads, the same limit of one chunk, however many tiles it has
MOST_NUMBERED_8_BIT = 4096

# of several chunks whose tiles fill the chip, keys up to which nobody had better cut them; and of
# chunks of many tiles where rows of keys are copied
MOST_NUMBERED_OF_SEVERAL, MANY_COPIED, MANY_OF_THREE = 1024, range(1025, 4097), range(1025, 10241)
MOST_NUMBERED_OF_TWO = 1536
# keys up to which chunks have tiles of few keys, of which fewer are past the diagonal
MOST_SMALL_TILES = 768
# rows to a multiprocessor from which three consumers share copied rows of keys
LEAST_OF_THREE = 288


def is_divided_chunk(call: AttentionCall) -> bool:
    """Whether chunks of prompts have so few rows, for the keys that they see as far as anybody
    says, that two consumers had better divide the keys of a tile."""
    if not may_divide(call) or call.window_size_left in NARROW:
        return False
    reach = reach_of(call)
    if gathers(call) and reach > MOST_DIVIDED_OF_CHUNKS:
        return False
    # of more keys, low tiles read them more often
    limits = ROWS_DIVIDED_NARROW if width_of(call.head_dim) == 64 else ROWS_DIVIDED
    measured = next((rows for keys, rows in limits.items() if reach <= keys), range(0))
    rows = -(-call.total_q * call.num_heads // target_of(call.q.device).multiprocessors)
    is_copied = gathers(call) and call.batch == 1
    if is_copied or call.window_size_left in SMALL:
        measured = measured[: MOST_ROWS_DIVIDED + 1 - measured.start]
    return rows in measured


def has_small_tiles(call: AttentionCall) -> bool:
    """Whether chunks of prompts see so few keys that these had better come few at a time."""
    if call.block_table is None or call.layout is not None or converts(call):
        return False
    is_plain = width_of(call.head_dim) <= 128 and call.window_right == 0
    return is_plain and reach_of(call) <= MOST_SMALL_TILES


def has_three_consumers(call: AttentionCall) -> bool:
    """Whether three consumers share rows of keys that are copied, which takes about as many
    instructions as one of them: where rows of queries fill the chip with their tiles."""
    if not gathers(call) or converts(call) or width_of(call.head_dim) > 128:
        return False
    rows = call.total_q * call.num_heads
    return rows >= LEAST_OF_THREE * target_of(call.q.device).multiprocessors


def are_low_8_bit_chunks(call: AttentionCall) -> bool:
    """Whether chunks of prompts over an 8-bit cache have tiles of one consumer: those that see few
    keys, because a small tile converts fewer that nobody sees, and wide heads, because two
    consumers leave room for one stage of keys."""
    width = width_of(call.head_dim)
    if not converts(call) or is_float8(call) or call.block_table is None or width == 64:
        return False
    is_narrow = call.window_size_left in NARROW
    if width == 256:
        return not is_narrow
    if is_narrow:
        return True
    reach, rows = reach_of(call), call.total_q * call.num_heads
    most = MOST_ROWS_8_BIT if reach <= MOST_LOW_8_BIT else MOST_ROWS_8_BIT_OF_FEW
    is_near = reach <= MOST_LOW_8_BIT_OF_FEW
    return is_near and rows <= most * target_of(call.q.device).multiprocessors


def are_few_chunks(call: AttentionCall) -> bool:
    """Whether chunks of prompts are so few, and see so few keys as far as anybody says, that their
    tiles need no cutting, and no list."""
    if call.block_table is None or call.layout is not None or call.batch > MOST_CHUNKS:
        return False
    if lacking(call, OF_LISTS) is not None:
        return False
    if call.batch == 1 and converts(call) and width_of(call.head_dim) == 64:
        return reach_of(call) <= MOST_NUMBERED_8_BIT
    if has_three_consumers(call):
        return call.batch <= 2 and reach_of(call) in MANY_OF_THREE
    if not has_few_tiles(call):
        return gathers(call) and not converts(call) and reach_of(call) in MANY_COPIED
    if is_divided_chunk(call):
        return reach_of(call) <= MOST_DIVIDED_OF_CHUNKS
    is_narrow = call.window_size_left in NARROW
    if call.batch > 1 and width_of(call.head_dim) == 256 and not is_narrow:
        return False  # their tiles take long, and differ
    tiles = call.total_q * call.num_heads // (2 * BLOCK_M)
    quarters = min(4 * tiles // target_of(call.q.device).multiprocessors, 4)
    most = MOST_NUMBERED[quarters]
    if call.batch > 1 and quarters == 4:
        most = MOST_NUMBERED_OF_TWO if call.batch == 2 else MOST_NUMBERED_OF_SEVERAL
    least = MOST_LOW_8_BIT if are_low_8_bit_chunks(call) else 0
    return reach_of(call) <= max(most, least)


def are_small_prompts(call: AttentionCall) -> bool:
    """Whether this kernel is the faster one although tiles do not fill the chip: for few chunks of
    prompts, of heads of 64 if there is a context. On an H200, 70 tokens behind 500 keys take 10 us
    with heads of 64 and 13 with those of 256, by the portable kernel 14 and 29.
    """
    if has_low_rows(call) or not are_few_chunks(call):
        return False
    width = width_of(call.head_dim)
    if width == 128 or converts(call):
        return width == 128 and is_divided_chunk(call)
    return width == 256 or reach_of(call) > max(call.total_q, LEAST_CONTEXT)
