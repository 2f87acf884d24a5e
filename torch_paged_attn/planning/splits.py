"""How many programs share the keys of one tile of queries: decided by shapes, never by lengths."""

import dataclasses

# fewer keys than this in a split cost more in the combining pass than they gain
MIN_KEYS = 256
MAX_SPLITS = 128

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
    """Fill a chip's `slots` for programs with `tiles` tiles of at most `key_bound` keys each."""
    wanted = -(-slots // max(tiles, 1))
    useful = -(-key_bound // MIN_KEYS)
    return SplitPlan(max(1, min(wanted, useful, MAX_SPLITS)))


def plan_fixed_splits(key_bound: int) -> SplitPlan:
    """The same boundaries for a sequence whatever batch it comes in."""
    return SplitPlan(max(1, -(-key_bound // FIXED_KEYS)), fixed_keys=FIXED_KEYS)
