"""Whether the keys of one tile of queries are shared by several programs: decided by shapes.

How many share them is decided on the device, which knows the lengths: the work of the whole batch
is cut into equal pieces, so that one long sequence among short ones does not run alone at the end.
"""

import dataclasses

# fewer keys than this in a piece cost more in the combining pass than they gain
MIN_KEYS = 256

# keys in a piece when results must not depend on the batch
FIXED_KEYS = 2048


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """Cut the work for `programs` programs (0: not at all), no piece smaller than `min_keys`; or
    into pieces of `fixed_keys`.
    """

    programs: int = 0
    min_keys: int = MIN_KEYS
    fixed_keys: int = 0

    @property
    def is_split(self) -> bool:
        """Whether there may be partial results to combine."""
        return self.programs > 0 or self.fixed_keys > 0


def plan_splits(tiles: int, key_bound: int, slots: int, is_decode: bool) -> SplitPlan:
    """`tiles` tiles of at most `key_bound` keys each, on a chip that runs `slots` programs at once.

    Decode is split even if it fills the chip, for its lengths may differ; prefill only if it does
    not. A cache of few keys is not worth it.
    """
    if key_bound <= MIN_KEYS or not (is_decode or 2 * tiles <= slots):
        return SplitPlan()
    return SplitPlan(slots)


def plan_fixed_splits() -> SplitPlan:
    """The same boundaries for a sequence whatever batch it comes in."""
    return SplitPlan(fixed_keys=FIXED_KEYS)


def most_programs(plan: SplitPlan, tiles: int, key_bound: int, heads: int) -> int:
    """How many pieces there can be for one of `heads` heads, whatever the lengths are."""
    if plan.fixed_keys:
        return tiles * max(1, -(-key_bound // plan.fixed_keys))
    return tiles + -(-plan.programs // heads)
