"""Which form a launch of Hopper's kernel takes, which tiles it has, and how many heads share one.

All of it follows from a call's description, its sizes, and what the caller says of the longest
sequence; no tensor is read. The limits are those of measurements: docs/design/hopper_forward.md.
"""

from typing import NamedTuple

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.chunks import (
    MOST_LOW_8_BIT,
    are_few_chunks,
    are_low_8_bit_chunks,
    has_small_tiles,
    has_three_consumers,
    is_divided_chunk,
)
from torch_paged_attn.backends.triton.hopper.support import (
    BLOCK_M,
    LEAST_TALL,
    NARROW,
    OF_LISTS,
    SMALL,
    are_far,
    converts,
    gathers,
    has_few_tiles,
    is_bound,
    is_float8,
    key_bound,
    may_divide,
    mean_length,
    reach_of,
    sharing_heads,
    width_of,
)
from torch_paged_attn.backends.triton.runtime.launcher import HAS_KNOWN_MAPS
from torch_paged_attn.backends.triton.runtime.target import is_even, target_of
from torch_paged_attn.backends.triton.tuning import (
    HopperConfig,
    choose_8_bit_config,
    choose_copied_config,
    choose_guessed_8_bit_config,
    choose_guessed_config,
    choose_hopper_config,
    choose_narrow_config,
    choose_short_config,
    choose_split_config,
)
from torch_paged_attn.ops.lacking import lacking

# of the rows of tiles of one head, the share that may be empty
MOST_EMPTY = 0.05
# of the queries of a batch, all heads counted: for so many rows to a multiprocessor, beginnings and
# ends take longer than products
MOST_ROWS = 256
# rows to a multiprocessor up to which two consumers divide the keys that a narrow window shows
MOST_ROWS_NARROW_DIVIDED = 60
# keys of the longest sequence up to which tiles of one consumer are better, if there are few:
# of head_dim 256, and of 128
MOST_LOW_WIDE, MOST_LOW = 4096, 4096
# of the keys of the longest sequence, queries up to which all tiles see about as many keys
MOST_ALIKE = 0.4
# rows to a multiprocessor from which on chunks beside decodes of 8 bits have two consumers
LEAST_ROWS_8_BIT = 2 * BLOCK_M
# of mixed batches whose tiles are numbered: keys of the longest sequence, rows to a multiprocessor
# unless a window is narrow, tiles of decodes to one, and where rows of keys are copied; there, of
# many rows
MOST_REACH, MOST_ROWS_NUMBERED, MOST_DECODES, MOST_COPIED = 2048, 512, 9, 1
MOST_COPIED_OF_MANY = 2
# the same limits of narrow heads
MOST_ROWS_NARROW, MOST_COPIED_NARROW = 704, 2
# keys if there is no more than one wave of tiles, and decodes under a narrow window
MOST_REACH_OF_WAVE, MOST_NARROW_DECODES = 4096, 32
# tiles of decodes to a multiprocessor that wide heads take beside chunks
MOST_WIDE_DECODES = 3
# rows of a mixed batch's chunks, all heads counted, for a tile of decodes, from which on they are
# most of the work
MOSTLY_ROWS = 350
# the same where few sequences have more keys
MOSTLY_ROWS_OF_LONG, LEAST_LONG = 110, 8192
# where another kernel takes short sequences, the queries of the shortest that are left
LEAST_LENGTH = 32


class Form(NamedTuple):
    """What is known of a batch's lengths before they are there."""

    short: int = 0  # another kernel may do sequences of up to so many queries, and does padding
    longest: int = 0  # no sequence has more queries: their tiles are taken in turns; 0: listed
    is_guessed: bool = False  # one consumer's rows hold all queries of a sequence
    is_dealt: bool = False  # of these, keys are dealt out in equal shares, without a list of tiles
    is_divided: bool = False  # of these, two consumers divide the keys of a tile
    is_tall: bool = False  # of these, tiles of 8-bit keys are tall
    # sequences of any lengths have so few keys that tiles need no cutting, and no list; where bits
    # depend on a sequence alone, tiles of few queries are cut in a number of stretches that the
    # host says
    is_numbered: bool = False
    is_mixed: bool = False  # most sequences are short, a few are long
    are_few: bool = False  # packed sequences, all of them short


FORM = Form()


def pack_heads(call: AttentionCall) -> int:
    """How many heads share a tile: all of a group, or one where tiles of one head are as good as
    full of queries, or hold a row of a layout's blocks."""
    length, layout = mean_length(call), call.layout
    most = even_heads(call)
    if layout is not None:
        length, pack = min(length, layout.q_block_size), 1
        while pack < most and pack * length < 2 * BLOCK_M:
            pack *= 2
        return pack
    # lengths of chunks of prompts differ
    is_alike = call.total_q == length * call.batch and (call.batch == 1 or call.block_table is None)
    empty = -length % (2 * BLOCK_M) if is_alike else BLOCK_M
    full = length / (length + empty) * (1 + MOST_EMPTY)
    for pack in (whole_group(call), most):
        # rows that are some token's
        if full < BLOCK_M // pack * pack / BLOCK_M:
            return pack
    return 1


def even_heads(call: AttentionCall) -> int:
    """The most heads of a group that fill as many rows of a tile: a power of two."""
    sharing = sharing_heads(call)
    return min(sharing & -sharing, BLOCK_M)


def whole_group(call: AttentionCall) -> int:
    """All heads of a group, where they may share a tile, whatever their number."""
    group = sharing_heads(call)
    if call.layout is not None or group > BLOCK_M or not (is_even(group) or HAS_KNOWN_MAPS):
        return even_heads(call)
    return group


def _has_few_rows(call: AttentionCall, most: int) -> bool:
    """Whether a multiprocessor has so many rows of queries at most."""
    return call.total_q * call.num_heads <= most * target_of(call.q.device).multiprocessors


def heads_beside(call: AttentionCall) -> int:
    """How many heads share a tile where another kernel takes short sequences: all of a group that
    is no power of two only if that makes all work one launch, as was measured when these left rows
    of a tile empty."""
    heads = whole_group(call) if _has_few_rows(call, MOST_ROWS) else even_heads(call)
    # what decodes cost this kernel is underestimated where heads are narrow
    return min(heads, 4) if width_of(call.head_dim) == 64 and heads == even_heads(call) else heads


def _heads_in_turns(call: AttentionCall) -> int:
    """The same where sequences are short: what makes fewer tiles, of which fewer rows are past the
    end of a sequence."""
    length = mean_length(call)

    def tiles(heads: int) -> int:
        return -(-length // (2 * (BLOCK_M // heads))) * (call.group_size // heads)

    return min(even_heads(call), whole_group(call), key=tiles)


def choose_tiles(call: AttentionCall, form: Form = FORM) -> tuple[HopperConfig, int]:
    """Tiles, and how many heads share one. Of a call's sizes, they depend on its mean length, which
    says nothing where another kernel takes the short sequences."""
    layout, is_causal = call.layout, call.window_right == 0
    width = width_of(call.head_dim)
    is_narrow = is_causal and call.window_size_left in SMALL and layout is None and width <= 128
    if call.is_batch_invariant:
        return _choose_invariant_tiles(call, form)
    is_mixed = form.is_numbered and not form.is_guessed and not are_few_chunks(call)
    if (form.is_mixed or is_mixed) and _has_low_8_bit_tiles(call):
        if form.is_mixed and width == 128 and _has_many_rows_of_chunks(call):
            return choose_8_bit_config(width, False), whole_group(call)
        config = choose_guessed_8_bit_config(width, reach_of(call) >= LEAST_TALL)
        return config, whole_group(call)
    if form.is_mixed:
        return _choose_mixed_config(call), whole_group(call)
    if is_mixed:
        packed = whole_group(call)
    elif form.short:
        packed = heads_beside(call)
    elif form.is_guessed:
        packed = whole_group(call)
    elif form.longest:
        packed = _heads_in_turns(call)
    elif is_narrow:
        # the fewer tokens a tile has, the fewer keys a window hides from most of them
        packed = even_heads(call) if is_even(call.group_size) else whole_group(call)
    elif has_three_consumers(call) or (gathers(call) and not has_few_tiles(call)):
        packed = whole_group(call)
    else:
        packed = pack_heads(call)
    if converts(call) and form.is_guessed:
        return choose_guessed_8_bit_config(width, form.is_tall), packed
    if are_low_8_bit_chunks(call) and not form.short:
        return choose_guessed_8_bit_config(width, False), whole_group(call)
    shared = whole_group(call) if _shares_tiles(call) and not form.short else packed
    if converts(call):
        return choose_8_bit_config(width, is_float8(call)), shared
    if form.are_few:
        return choose_guessed_config(width), whole_group(call)
    if form.longest:
        return choose_short_config(width, mean_length(call) * packed), packed
    if form.is_guessed:
        return (choose_split_config if form.is_divided else choose_guessed_config)(width), packed
    if is_mixed:
        return _choose_numbered_config(call), packed
    if form.short and is_narrow and call.window_size_left in NARROW:
        return choose_narrow_config(width), packed
    if form.short and width > 64 and _has_few_rows(call, MOST_ROWS):
        return choose_guessed_config(width), packed
    if form.short:
        return _choose_tall_config(call, LEAST_LENGTH), packed
    if is_divided_chunk(call) or _is_narrow_divided(call):
        return choose_split_config(width), whole_group(call)
    if _has_low_tiles(call, packed):
        return choose_guessed_config(width), packed
    if is_narrow:
        return choose_narrow_config(width), packed
    if has_small_tiles(call) and not gathers(call):
        return choose_narrow_config(width), shared
    length = mean_length(call)
    if call.block_table is not None and not has_few_tiles(call):
        # of long contexts, the diagonal is little; of what is said, they have more than half
        length = max(length, call.max_seqlen_k // 2)
    return _choose_tall_config(call, length), shared


def _shares_tiles(call: AttentionCall) -> bool:
    """Whether chunks of prompts have all heads of a group in a tile of two consumers, which then
    holds fewer tokens, whose keys differ less, even where one head would fill it."""
    if call.block_table is None or call.layout is not None or call.window_right != 0:
        return False
    if width_of(call.head_dim) == 256 or gathers(call):
        return False
    heads = whole_group(call)
    is_full = BLOCK_M // heads * heads >= (1 - MOST_EMPTY) * BLOCK_M
    return is_full and (has_few_tiles(call) or has_small_tiles(call))


def _choose_tall_config(call: AttentionCall, length: int) -> HopperConfig:
    """Tiles of two or three consumers, each of which has rows of its own."""
    width, is_causal = width_of(call.head_dim), call.window_right == 0
    if has_three_consumers(call):
        return choose_copied_config(width, consumers=3)
    if gathers(call) and width == 128 and not converts(call):
        return choose_copied_config(width)
    return choose_hopper_config(width, length, is_causal, call.layout is not None, gathers(call))


def _is_narrow_divided(call: AttentionCall) -> bool:
    """Whether chunks of few rows see so few keys, by a window, that two consumers divide them."""
    is_narrow = call.window_size_left in NARROW and width_of(call.head_dim) == 128
    is_narrow = is_narrow and call.window_right == 0 and may_divide(call)
    return is_narrow and _has_few_rows(call, MOST_ROWS_NARROW_DIVIDED)


def _has_low_tiles(call: AttentionCall, packed_heads: int) -> bool:
    """Whether few queries in pages have tiles of one consumer: more, and sooner done, but the same
    keys are read for fewer rows."""
    width, reach = width_of(call.head_dim), reach_of(call)
    if call.block_table is None or call.layout is not None or width == 64:
        return False
    if call.window_size_left in NARROW and width == 128 and not _has_few_rows(call, BLOCK_M // 4):
        return False
    if _has_few_rows(call, BLOCK_M // 4) and (width == 256 or not are_far(call)):
        return True  # so few that each tile of one consumer is cut in fewer pieces
    if width == 256:
        return reach <= MOST_LOW_WIDE and _has_few_rows(call, 2 * BLOCK_M)
    # few enough that nobody had better cut them
    tokens = BLOCK_M // packed_heads
    tiles = (call.total_q // tokens + call.batch) * (call.num_heads // packed_heads)
    most = target_of(call.q.device).multiprocessors
    if reach > MOST_LOW or tiles > 2 * most:
        return False
    # where all tiles see about as many keys, a second round of them takes as long as the first
    return tiles <= most or call.total_q > MOST_ALIKE * reach


def decodes_of_program(call: AttentionCall) -> float:
    """Tiles of decodes, if all sequences are some, for each multiprocessor."""
    tiles = call.batch * call.num_heads / whole_group(call)
    return tiles / target_of(call.q.device).multiprocessors


def is_numbered(call: AttentionCall) -> bool:
    """Whether a batch of long and short sequences in pages is better off without a list of tiles
    and without another kernel: as far as anybody says, no sequence visits so many keys that its
    tiles should be cut, and short ones, each of which takes a tile, are not too many.
    """
    if lacking(call, OF_LISTS) is not None:
        return False
    # limits from measurements: docs/design/hopper_forward.md
    if reach_of(call) > (MOST_REACH_OF_WAVE if _is_one_wave(call) else MOST_REACH):
        return False
    is_narrow_head = width_of(call.head_dim) == 64
    is_narrow = call.window_size_left in NARROW
    if decodes_of_program(call) > (MOST_NARROW_DECODES if is_narrow else MOST_DECODES):
        return False
    if is_float8(call):
        return is_narrow and is_narrow_head
    if is_narrow:
        return True
    if converts(call) and width_of(call.head_dim) == 128 and not is_bound(call.window_size_left):
        return reach_of(call) <= MOST_LOW_8_BIT  # longer ones had better be cut
    if converts(call):
        return True
    most_copied = MOST_COPIED_NARROW if is_narrow_head else MOST_COPIED
    if not _has_few_rows(call, MOST_ROWS):
        most_copied = MOST_COPIED_OF_MANY
    if gathers(call) and decodes_of_program(call) > most_copied:
        return False  # the portable kernel reads small pages faster
    return _has_few_rows(call, MOST_ROWS_NARROW if is_narrow_head else MOST_ROWS_NUMBERED)


def _is_one_wave(call: AttentionCall) -> bool:
    """Whether tiles whose keys two consumers divide fill most of the chip, and it once."""
    if not may_divide(call) or is_bound(call.window_size_left):
        return False
    tiles = call.total_q * call.num_heads // BLOCK_M + call.batch * call.num_kv_heads
    most = target_of(call.q.device).multiprocessors
    return most // 2 <= tiles <= most


def is_one_launch(call: AttentionCall) -> bool:
    """Whether a batch of long and short sequences takes Hopper's kernel alone, by a list of tiles:
    where two consumers divide the keys of a tile, or one has a tile of wide heads or of an 8-bit
    cache, short sequences take no longer than with a kernel of their own."""
    width = width_of(call.head_dim)
    if call.window_size_left in SMALL:
        return False
    if converts(call):
        return width == 128 and not is_bound(call.window_size_left) and _has_low_8_bit_tiles(call)
    return width < 256 or decodes_of_program(call) <= MOST_WIDE_DECODES


def _has_low_8_bit_tiles(call: AttentionCall) -> bool:
    """Whether tiles of batches of long and short sequences in an 8-bit cache have one consumer."""
    return converts(call) and not is_float8(call) and width_of(call.head_dim) >= 128


def _has_many_rows_of_chunks(call: AttentionCall) -> bool:
    """Whether chunks are most of the work of such a batch, and their rows more than a tile for each
    multiprocessor."""
    return _are_mostly_chunks(call) and not _has_few_rows(call, LEAST_ROWS_8_BIT)


def _are_mostly_chunks(call: AttentionCall) -> bool:
    """Whether chunks of prompts are most of the work of such a batch; sooner where few sequences
    have long contexts, as far as the caller says."""
    rows, tiles = (call.total_q - call.batch) * call.num_heads, call.batch * call.num_kv_heads
    # where nothing is said, it is what the table has room for
    is_long = LEAST_LONG < call.max_seqlen_k < key_bound(call)
    is_few = tiles <= target_of(call.q.device).multiprocessors
    return rows > (MOSTLY_ROWS_OF_LONG if is_few and is_long else MOSTLY_ROWS) * tiles


def _choose_mixed_config(call: AttentionCall) -> HopperConfig:
    """Tiles where sequences are long and short, in a list, and keys are of 16 bits."""
    width = width_of(call.head_dim)
    is_tall = are_far(call) if width == 256 else _are_mostly_chunks(call)
    if is_tall:
        return _choose_tall_config(call, LEAST_LENGTH)
    return choose_guessed_config(width) if width == 256 else choose_split_config(width)


def _choose_numbered_config(call: AttentionCall) -> HopperConfig:
    """Tiles where sequences are long and short, and their tiles are numbered."""
    width = width_of(call.head_dim)
    if call.window_size_left in NARROW and width <= 128:
        if width == 64 and not _has_few_rows(call, MOST_ROWS_NUMBERED):
            return choose_narrow_config(width)
        return choose_guessed_config(width, is_narrow=True)
    if has_three_consumers(call) and _are_mostly_chunks(call):
        return choose_copied_config(width, consumers=3)
    # rows of keys that are copied arrive too late for two, unless rows of queries are many
    is_late = gathers(call) and _has_few_rows(call, MOST_ROWS)
    if is_late or not may_divide(call):
        return choose_guessed_config(width)
    return choose_split_config(width)


def _choose_invariant_tiles(call: AttentionCall, form: Form) -> tuple[HopperConfig, int]:
    """The same where bits depend on a sequence alone: as many keys at a time for all queries of all
    its calls, and products as high. How many consumers there are, and heads, is free."""
    width = width_of(call.head_dim)
    is_narrow = call.window_size_left in SMALL and width <= 128
    if form.is_guessed:
        return choose_guessed_config(width, is_narrow), whole_group(call)
    if is_narrow:
        return choose_narrow_config(width), even_heads(call)
    is_causal = call.window_right == 0
    config = choose_hopper_config(width, mean_length(call), is_causal, False, gathers(call))
    return config, pack_heads(call)
