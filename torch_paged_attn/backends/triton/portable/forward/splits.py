"""Whether several programs share the keys of a tile of queries; the host decides it from shapes.

Which keys a program computes is decided on the device (`work_info.py`), which knows the lengths.
The work of the whole batch is divided evenly, so that a long sequence among short ones does not
take longer than the rest.
"""

import dataclasses

# the smallest piece, in keys: merging smaller ones takes longer than it saves. The second number is
# for each row of a tall tile. On an H200, a prompt of 642 tokens behind 747 takes 68 us whole, and
# 134 in four pieces; one of 94 behind 7,560 180 us whole, 63 in four, and 81 in sixteen
MIN_KEYS, MIN_KEYS_OF_ROW = 64, 16

# up to one in so many programs may be omitted so that all end at the same time: decode is limited
# by memory bandwidth, which fewer programs use as well
LEAST_BUSY = 16

# keys in a piece of batch-invariant calls
FIXED_KEYS = 2048


@dataclasses.dataclass(frozen=True)
class SplitPlan:
    """How keys are shared.

    programs: number of programs per head that share all keys of the batch; 0: keys are not shared
    min_keys: the smallest piece, in keys
    fixed_keys: if not 0, every piece has so many keys of one tile
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
    """Choose whether and how keys are shared.

    tiles, key_bound: upper bounds of the tiles per head, and of the keys per tile
    busy: about how many of the tiles are not empty
    slots: number of programs that the GPU runs at the same time
    tall: rows of a tile, if merging it takes long; else 0

    Decode is always split, since lengths may differ, unless there are few keys. Prefill is split
    only if it does not fill the GPU, and there are keys for more than one piece.
    """
    least = max(MIN_KEYS, MIN_KEYS_OF_ROW * tall)
    few = MIN_KEYS if is_decode else least
    if key_bound <= few or not (is_decode or 2 * busy * heads <= slots):
        return SplitPlan()
    programs = evenly(max(slots // heads, 1), max(busy, 1))
    return SplitPlan(min(programs, tiles * -(-key_bound // least)), least)


def evenly(programs: int, tiles: int) -> int:
    """`programs`, or slightly fewer if then, with tiles of equal length, each program has whole
    tiles, or each tile is divided into equal parts. Whole tiles need no merging, and all programs
    end at the same time.
    """
    tiles_of_program = -(-tiles // programs)
    parts_of_tile = max(programs // tiles, 1)
    even = -(-tiles // tiles_of_program) * parts_of_tile
    return even if even * LEAST_BUSY >= programs * (LEAST_BUSY - 1) else programs


def plan_fixed_splits(tiles: int, key_bound: int) -> SplitPlan:
    """Batch-invariant splits: the pieces of a sequence do not depend on the rest of the batch."""
    return SplitPlan(tiles * max(1, -(-key_bound // FIXED_KEYS)), fixed_keys=FIXED_KEYS)
