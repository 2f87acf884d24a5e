"""Numbers of the units that lists name: by these, entries are sorted (`inverse_lists.py`)."""

import triton
import triton.language as tl

# entries of a list that a program takes at a time
ENTRIES = tl.constexpr(128)


@triton.jit
def rows_seen(token, scalars, OPTIONS: tl.constexpr):
    """The first and the last row of k that a token sees, int64. The token is one of `find_token`,
    keys are packed."""
    low = token.k_first
    high = token.k_first + token.key_len - 1
    if OPTIONS.HAS_RIGHT:
        high = tl.minimum(high, token.k_first + token.position + scalars.right)
    if OPTIONS.HAS_LEFT:
        low = tl.maximum(low, token.k_first + token.position - scalars.left)
    return low, high


@triton.jit
def number_units(
    token, group, low, high, numbered, strides, sizes, run, OPTIONS: tl.constexpr
):  # fmt: skip
    """Write the numbers of the entries of a token's list, and what they are counted from. low,
    high: of `rows_seen`; numbered: `NumberedEntries`; run: `RunSizes`."""
    SIZE: tl.constexpr = OPTIONS.SIZE
    PIECES: tl.constexpr = OPTIONS.PIECES
    first_unit = token.k_first // SIZE
    if SIZE > 1:
        first_unit += token.b
    if group == 0:
        tl.store(numbered.first_rows + token.row, token.k_first)
        tl.store(numbered.first_units + token.row, first_unit)
        tl.store(numbered.lengths + token.row, token.key_len)
        tl.store(numbered.lows + token.row, low.to(tl.int32))
        tl.store(numbered.highs + token.row, high.to(tl.int32))
    run_number = token.row // run.step
    of_token = sizes.entries * PIECES
    to = numbered.numbers + (group * sizes.total_q + token.row) * of_token
    for first in tl.range(0, of_token, ENTRIES):
        e = first + tl.arange(0, ENTRIES)
        entry = e // PIECES
        list_ptr = token.list_ptr + entry.to(tl.int64) * strides.index_entry
        unit = tl.load(list_ptr, mask=entry < token.count, other=-1).to(tl.int64)
        counts = unit >= 0
        unit = unit * PIECES + e % PIECES
        row = token.k_first + unit * SIZE
        counts = counts & (row <= high) & (row + SIZE > low)
        number = first_unit + unit
        # unchecked bounds must not lead outside the lists
        counts = counts & (number >= 0) & (number < run.units)
        number = tl.where(counts, number * run.runs + run_number, -1)
        tl.store(to + e, number.to(to.dtype.element_ty), mask=e < of_token)
