"""How many programs share the keys of one tile of queries: decided by shapes, never by lengths."""

import dataclasses

# fewer keys than this in a split cost more in the combining pass than they gain
MIN_KEYS = 256
MAX_SPLITS = 128

# of what the best number of splits fills
FILLED_ENOUGH = 0.9

# keys in a split when results must not depend on the batch
FIXED_KEYS = 2048


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """`num_splits` programs a tile. Each takes the same share of the tile's keys, at least
    `min_keys`, or exactly `fixed_keys` of them.
    """

    num_splits: int = 1
    min_keys: int = MIN_KEYS
    fixed_keys: int = 0


def plan_splits(tiles: int, key_bound: int, slots: int) -> SplitPlan:
    """Fill a chip's `slots` for programs with `tiles` tiles of at most `key_bound` keys each.

    The fewest splits whose last round of programs leaves few slots empty.
    """
    most = max(1, min(-(-key_bound // MIN_KEYS), MAX_SPLITS, -(-slots // max(tiles, 1))))

    def filled(num_splits: int) -> float:
        programs = max(tiles, 1) * num_splits
        return programs / (-(-programs // slots) * slots)

    best = max(filled(n) for n in range(1, most + 1))
    return SplitPlan(next(n for n in range(1, most + 1) if filled(n) >= FILLED_ENOUGH * best))


def plan_fixed_splits(key_bound: int) -> SplitPlan:
    """The same boundaries for a sequence whatever batch it comes in."""
    return SplitPlan(max(1, -(-key_bound // FIXED_KEYS)), fixed_keys=FIXED_KEYS)
