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
        return j // RUN * (RUN * OPTIONS.KEY_RANKS) + scalars.key_rank * RUN + j % RUN


@triton.jit
def keys_before(position, scalars, OPTIONS: tl.constexpr):
    """How many keys stand before a position: the number of the first one that does not."""
    RUN: tl.constexpr = OPTIONS.KEY_INTERLEAVE
    if OPTIONS.KEY_RANKS == 1:
        return position
    else:
        ROUND: tl.constexpr = RUN * OPTIONS.KEY_RANKS
        position = tl.maximum(position, 0)
        begun = position % ROUND - scalars.key_rank * RUN
        return position // ROUND * RUN + tl.minimum(tl.maximum(begun, 0), RUN)
