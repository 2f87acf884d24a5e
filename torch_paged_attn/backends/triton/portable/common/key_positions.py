"""Positions of a sequence's keys if they are distributed over ranks, KEY_INTERLEAVE at a time.

With RUN = KEY_INTERLEAVE, key j of rank r is at position
`(j // RUN) * RUN * RANKS + r * RUN + j % RUN`. Positions increase with j, so that the keys that a
row sees are still a range of j, and only its bounds have to be computed from positions.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.common.named import type_of


@triton.jit
def key_position(j, scalars, OPTIONS: tl.constexpr):
    """The positions of keys j."""
    RUN: tl.constexpr = OPTIONS.KEY_INTERLEAVE
    if OPTIONS.KEY_RANKS == 1:
        return j
    else:
        j = tl.cast(j, type_of(OPTIONS.KEY_POSITION))
        first = tl.cast(scalars.key_rank, type_of(OPTIONS.KEY_POSITION)) * RUN
        return j // RUN * (RUN * OPTIONS.KEY_RANKS) + first + j % RUN


@triton.jit
def keys_before(position, scalars, OPTIONS: tl.constexpr):
    """The number of keys at positions below `position`; it is also the first key j that is not."""
    RUN: tl.constexpr = OPTIONS.KEY_INTERLEAVE
    if OPTIONS.KEY_RANKS == 1:
        return position
    else:
        ROUND: tl.constexpr = RUN * OPTIONS.KEY_RANKS
        position = tl.maximum(tl.cast(position, type_of(OPTIONS.KEY_POSITION)), 0)
        first = tl.cast(scalars.key_rank, type_of(OPTIONS.KEY_POSITION)) * RUN
        begun = tl.minimum(tl.maximum(position % ROUND - first, 0), RUN)
        return (position // ROUND * RUN + begun).to(tl.int32)


@triton.constexpr_function
def tiles_of_block(block, ranks, run, tile):
    """The number of tiles that cover a rank's keys of a block of `block` positions."""
    if ranks > 1:
        rounds, rest = divmod(block, ranks * run)
        block = rounds * run + min(rest, run)
    return -(-block // tile)


@triton.jit
def block_of_keys(column, keys, scalars, OPTIONS: tl.constexpr):
    """The range of keys (first, last + 1) in a layout's column. It is empty for columns past the
    last key and for invalid columns.
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
