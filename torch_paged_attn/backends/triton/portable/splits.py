"""Whether the keys of one tile of queries are shared by several programs: decided by shapes.

Which program takes which keys is decided on the device, which knows the lengths: the work of the
whole batch is dealt out evenly, so that one long sequence among short ones does not run alone at
the end.
"""

import dataclasses

# fewer keys than this in a piece cost more in merging than they gain; for each row where few warps
# merge many rows
MIN_KEYS, MIN_KEYS_OF_ROW = 64, 16

# of so many programs one may be left out to have the others end together: memory, not they, is busy
LEAST_BUSY = 16

# keys in a piece when results must depend on a sequence alone
FIXED_KEYS = 2048


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """`programs` of each head share all keys (0: they do not), at least `min_keys` to each; or
    there is a program for every `fixed_keys` of a tile.
    """

    programs: int = 0
    min_keys: int = MIN_KEYS
    fixed_keys: int = 0

    @property
    def is_split(self) -> bool:
        """Whether there may be partial results to merge."""
        return self.programs > 0 or self.fixed_keys > 0


def plan_splits(
    tiles: int, heads: int, busy: int, key_bound: int, slots: int, is_decode: bool, tall: int = 0
) -> SplitPlan:
    """For at most `tiles` tiles of at most `key_bound` keys in each of `heads` heads, about `busy`
    of them not empty, on a chip that runs `slots` programs at once. `tall` is the rows of
    a part that few warps merge, 0 of other parts.

    Decode is split even if it fills the chip, for its lengths may differ; prefill only if it does
    not. A cache of few keys is not worth it.
    """
    if key_bound <= MIN_KEYS or not (is_decode or 2 * busy * heads <= slots):
        return SplitPlan()
    programs = _evenly(max(slots // heads, 1), max(busy, 1))
    least = max(MIN_KEYS, MIN_KEYS_OF_ROW * tall)
    return SplitPlan(min(programs, tiles * -(-key_bound // least)), least)


def _evenly(programs: int, tiles: int) -> int:
    """A few programs less, if then tiles of one length are whole in a program, or cut in parts of
    one length: what is whole is not merged, and all programs end together.
    """
    tiles_of_program = -(-tiles // programs)
    parts_of_tile = max(programs // tiles, 1)
    even = -(-tiles // tiles_of_program) * parts_of_tile
    return even if even * LEAST_BUSY >= programs * (LEAST_BUSY - 1) else programs


def plan_fixed_splits(tiles: int, key_bound: int) -> SplitPlan:
    """The same boundaries for a sequence whatever batch it comes in."""
    return SplitPlan(tiles * max(1, -(-key_bound // FIXED_KEYS)), fixed_keys=FIXED_KEYS)
