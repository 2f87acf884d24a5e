"""Where a sequence's keys stand, if they are dealt out over ranks in runs of KEY_INTERLEAVE keys.

Key j of rank r stands at position `(j // RUN) * RUN * RANKS + r * RUN + j % RUN`. Positions ascend
with keys, so that what a row sees is a range of keys as ever, and only its bounds are translated.
"""

import triton
import triton.language as tl


@triton.jit
def key_position(j, scalars, OPTIONS: tl.constexpr):
    """The positions of keys j."""
    RUN: tl.constexpr = OPTIONS.KEY_INTERLEAVE
    if OPTIONS.KEY_RANKS == 1:
        return j
    else:
        j = tl.cast(j, OPTIONS.KEY_POSITION)
        first = tl.cast(scalars.key_rank, OPTIONS.KEY_POSITION) * RUN
        return j // RUN * (RUN * OPTIONS.KEY_RANKS) + first + j % RUN


@triton.jit
def keys_before(position, scalars, OPTIONS: tl.constexpr):
    """How many keys stand before a position, which is also the number of the first key that does
    not.
    """
    RUN: tl.constexpr = OPTIONS.KEY_INTERLEAVE
    if OPTIONS.KEY_RANKS == 1:
        return position
    else:
        ROUND: tl.constexpr = RUN * OPTIONS.KEY_RANKS
        position = tl.maximum(tl.cast(position, OPTIONS.KEY_POSITION), 0)
        first = tl.cast(scalars.key_rank, OPTIONS.KEY_POSITION) * RUN
        begun = tl.minimum(tl.maximum(position % ROUND - first, 0), RUN)
        return (position // ROUND * RUN + begun).to(tl.int32)


@triton.constexpr_function
def tiles_of_block(block, ranks, run, tile):
    """Tiles of so many keys that cover a block of a layout: a rank has a share of its positions."""
    if ranks > 1:
        rounds, rest = divmod(block, ranks * run)
        block = rounds * run + min(rest, run)
    return -(-block // tile)


@triton.jit
def block_of_keys(column, keys, scalars, OPTIONS: tl.constexpr):
    """The keys of a layout's column: the first, and the one after the last. Columns that lie past
    the last key, and bad ones, have none.
    """
    K_BLOCK: tl.constexpr = OPTIONS.K_BLOCK
    end = key_position(keys.key_len, scalars, OPTIONS)
    past_end = tl.cdiv(end, K_BLOCK)
    column = tl.where((column < 0) | (column > past_end), past_end, column)
    if OPTIONS.KEY_RANKS == 1:
        return column * K_BLOCK, keys.stop
    else:
        first = keys_before(column * K_BLOCK, scalars, OPTIONS)
        stop = keys_before((column + 1) * K_BLOCK, scalars, OPTIONS)
        return first, tl.minimum(stop, keys.stop)
