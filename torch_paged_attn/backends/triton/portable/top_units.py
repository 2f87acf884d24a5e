"""The best units of a token, exactly, by a program per token and group.

A pass over a row of scores counts how many are at least as large as each of seven thresholds, which
cut the range of floats that may hold the last selected score into eight. So a few passes find a
threshold that `wanted` scores reach, or the score that is the last one among equals; the last pass
writes the ids of those that are selected, in ascending order. Floats are counted as integers of the
same order.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.index_scores import stop_of
from torch_paged_attn.backends.triton.portable.selected_keys import find_token

# into how many parts a pass cuts the range
PARTS = tl.constexpr(8)
# counters of a pass: a thread's scores are as many neighbours, some times
COUNTERS, TOGETHER = tl.constexpr(512), tl.constexpr(4)


@triton.jit
def _load_scores(
    u0, row_ptr, num_there, own, force_first, force_last, UNITS: tl.constexpr,
    HAS_FORCED: tl.constexpr,
):  # fmt: skip
    """Units from u0 on, their scores, and which are selected whatever their scores are. The scores
    of those, and of units that are not there, are -inf; NaN counts as infinity.
    """
    unit = u0 + tl.arange(0, UNITS)
    score = tl.load(row_ptr + unit, mask=unit < num_there, other=float("-inf"))
    score = tl.where(score != score, float("inf"), score)
    is_forced = tl.zeros([UNITS], tl.int1)
    if HAS_FORCED:
        is_forced = (unit < force_first) | (unit <= own) & (unit > own - force_last)
        is_forced = is_forced & (score > float("-inf"))
        score = tl.where(is_forced, float("-inf"), score)
    return unit, score, is_forced


@triton.jit
def _in_order(score):
    """A float as an integer of the same order."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _as_float(number):
    """The float that `_in_order` made a number of."""
    bits = number.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _added(counts, is_counted):
    """Counters, with those of more units added; no thread needs another's."""
    REPEATS: tl.constexpr = is_counted.shape[0] // COUNTERS // TOGETHER
    counted = tl.reshape(is_counted.to(tl.int32), [REPEATS, COUNTERS, TOGETHER])
    return counts + tl.sum(tl.sum(counted, 2), 0)


@triton.jit
def _count_parts(
    lo, step, hi, row_ptr, num_there, own, force_first, force_last, UNITS: tl.constexpr,
    HAS_FORCED: tl.constexpr,
):  # fmt: skip
    """How many scores reach lo + step, lo + 2 step, ..., which end before hi."""
    thresholds, counts = (), ()
    for i in tl.static_range(1, PARTS):
        thresholds += (_as_float(tl.minimum(lo + step * i, hi - 1)),)
        counts += (tl.zeros([COUNTERS], tl.int32),)
    for u0 in tl.range(0, num_there, UNITS):
        _, score, _ = _load_scores(
            u0, row_ptr, num_there, own, force_first, force_last, UNITS, HAS_FORCED
        )
        more = ()
        for i in tl.static_range(PARTS - 1):
            more += (_added(counts[i], score >= thresholds[i]),)
        counts = more
    totals = ()
    for i in tl.static_range(PARTS - 1):
        totals += (tl.sum(counts[i], 0),)
    return totals


@triton.jit(do_not_specialize=("first_row", "num_units", "wanted", "sizes"))
def _top_units_kernel(
    pointers, scores_ptr, ids_ptr, counts_ptr, first_row, num_units, wanted, width, force_first,
    force_last, sizes, strides,
    UNITS: tl.constexpr, HAS_FORCED: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """scores_ptr: (rows, G, num_units) float32, of which what a token sees is read; ids_ptr:
    (total_q, G, width), of which the first `wanted`, at most, are written; counts_ptr: (total_q,
    G)."""
    group = tl.program_id(1)
    token = find_token(first_row + tl.program_id(0), group, pointers, strides, sizes, OPTIONS)
    stop = stop_of(token, sizes, OPTIONS)
    num_there = tl.maximum((stop + OPTIONS.SELECT_SIZE - 1) // OPTIONS.SELECT_SIZE, 0).to(tl.int32)
    num_there = tl.minimum(num_there, num_units)
    own = tl.minimum(token.position, token.key_len - 1)
    own = tl.where(own < 0, -1, own // OPTIONS.SELECT_SIZE).to(tl.int32)
    row = (tl.program_id(0) * tl.num_programs(1) + group).to(tl.int64)
    row_ptr = scores_ptr + row * num_units

    there, forced = tl.zeros([COUNTERS], tl.int32), tl.zeros([COUNTERS], tl.int32)
    least = tl.full([UNITS], float("inf"), tl.float32)
    most = tl.full([UNITS], float("-inf"), tl.float32)
    for u0 in tl.range(0, num_there, UNITS):
        _, score, is_forced = _load_scores(
            u0, row_ptr, num_there, own, force_first, force_last, UNITS, HAS_FORCED
        )
        is_there = score > float("-inf")
        there = _added(there, is_there)
        if HAS_FORCED:
            forced = _added(forced, is_forced)
        least = tl.minimum(least, tl.where(is_there, score, float("inf")))
        most = tl.maximum(most, score)
    # at least `reaching` scores, as many as are left to be selected or more, are lo or larger;
    # fewer are hi or larger
    reaching = tl.sum(there, 0)
    forced_count = tl.sum(forced, 0)
    left = wanted - forced_count
    lo, hi = _in_order(tl.min(least, 0)), _in_order(tl.max(most, 0)) + 1
    above = tl.zeros([], tl.int32)
    while (reaching > left) & (hi - lo > 1):
        step = tl.maximum((hi - lo) // PARTS, 1)
        totals = _count_parts(
            lo, step, hi, row_ptr, num_there, own, force_first, force_last, UNITS, HAS_FORCED
        )
        begin, end = lo, hi
        for i in tl.static_range(PARTS - 1):
            threshold = tl.minimum(begin + step * (i + 1), end - 1)
            reaches = totals[i] >= left
            lo = tl.where(reaches, threshold, lo)
            reaching = tl.where(reaches, totals[i], reaching)
            # the first that too few reach
            is_next = (totals[i] < left) & (threshold < hi)
            hi = tl.where(is_next, threshold, hi)
            above = tl.where(is_next, totals[i], above)
    # all that reach lo are selected, or of those that are equal to it the first ones
    is_exact = reaching <= left
    last = _as_float(lo)
    before = tl.zeros([], tl.int32)
    equal_before = tl.zeros([], tl.int32)
    equal_left = left - above
    at = ((first_row + tl.program_id(0)) * tl.num_programs(1) + group).to(tl.int64)
    for u0 in tl.range(0, num_there, UNITS):
        unit, score, is_forced = _load_scores(
            u0, row_ptr, num_there, own, force_first, force_last, UNITS, HAS_FORCED
        )
        is_there = score > float("-inf")
        is_better = is_forced | is_there & ((score > last) | (is_exact & (score == last)))
        is_equal = is_there & (score == last) & (not is_exact)
        # both numbers in one sum
        both = is_better.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        so_far = tl.cumsum(both, 0)
        better, equal = before + (so_far & 0xFFFF), equal_before + (so_far >> 16)
        is_taken = is_better | is_equal & (equal <= equal_left)
        place = better + tl.minimum(equal, equal_left) - 1
        tl.store(ids_ptr + at * width + place, unit, mask=is_taken)
        total = tl.sum(both, 0)
        before += total & 0xFFFF
        equal_before += total >> 16
    tl.store(counts_ptr + at, forced_count + tl.minimum(tl.sum(there, 0), left))
