"""The best units of a token, exactly, by a program per token and group.

The last score that is selected, or the first threshold that `wanted` scores reach, is found among
UNITS scores in registers, by bisection: of a short row all of them, of a longer one those between
two thresholds that a sample of the row suggests. If the sample misleads, because many scores are
equal, passes over the whole row cut the range that may hold the last score into eight, until it is
found. A last pass writes the ids of those that are selected, in ascending order. Floats are
compared as floats, and bisected as integers of the same order.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.portable.selected.index_scores import stop_of
from torch_paged_attn.backends.triton.portable.selected.keys import SelectedSizes, find_token

# neighbours that are sampled together: 32 bytes
RUN = tl.constexpr(8)
# thresholds of a sample are found as far as this power of two
COARSE = tl.constexpr(12)
# into how many parts a pass cuts the range
PARTS = tl.constexpr(8)
# counters of a pass: a thread's scores are as many neighbours, some times
COUNTERS, TOGETHER = tl.constexpr(256), tl.constexpr(4)


class Row(NamedTuple):
    """The scores of a token and group, as values of the kernel."""

    ptr: Any
    num_there: Any  # units that the token sees
    own: Any  # the unit that the token is in
    # how many of the first units, and of the last ones up to its own, are selected in any case
    force_first: Any
    force_last: Any


class TopPointers(NamedTuple):
    """Scores, and memory for what is made of them."""

    scores: Any  # (rows, G, num_units) float32, of which what a token sees is read
    rest: Any  # memory for (rows, G, UNITS) float32
    ids: Any  # (total_q, G, width), of which the first `wanted`, at most, are written
    counts: Any  # (total_q, G)


@triton.jit
def _load_scores(u0, row, UNITS: tl.constexpr, HAS_FORCED: tl.constexpr):
    """Units from u0 on, their scores, and which are selected whatever their scores are. The scores
    of those, and of units that are not there, are -inf; NaN counts as infinity.
    """
    unit = u0 + tl.arange(0, UNITS)
    score, is_forced = _scores_of(unit, row, HAS_FORCED)
    return unit, score, is_forced


@triton.jit
def _scores_of(unit, row, HAS_FORCED: tl.constexpr):
    """The same of units."""
    score = tl.load(row.ptr + unit, mask=unit < row.num_there, other=float("-inf"))
    score = tl.where(score != score, float("inf"), score)
    is_forced = tl.zeros_like(unit) > 0
    if HAS_FORCED:
        is_forced = unit < row.force_first
        is_forced = is_forced | (unit <= row.own) & (unit > row.own - row.force_last)
        is_forced = is_forced & (score > float("-inf"))
        score = tl.where(is_forced, float("-inf"), score)
    return score, is_forced


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
def _count_parts(lo, step, hi, row, UNITS: tl.constexpr, HAS_FORCED: tl.constexpr):
    """How many scores reach lo + step, lo + 2 step, ..., which end before hi."""
    thresholds, counts = (), ()
    for i in tl.static_range(1, PARTS):
        thresholds += (_as_float(tl.minimum(lo + step * i, hi - 1)),)  # type: ignore[assignment]
        counts += (tl.zeros([COUNTERS], tl.int32),)  # type: ignore[assignment]
    for u0 in tl.range(0, row.num_there, UNITS):
        _, score, _ = _load_scores(u0, row, UNITS, HAS_FORCED)
        more = ()
        for i in tl.static_range(PARTS - 1):
            more += (_added(counts[i], score >= thresholds[i]),)  # type: ignore[assignment]
        counts = more
    totals = ()
    for i in tl.static_range(PARTS - 1):
        totals += (tl.sum(counts[i], 0),)  # type: ignore[assignment]
    return totals


@triton.jit
def _cut(left, row, UNITS: tl.constexpr, HAS_FORCED: tl.constexpr):
    """As `_bisect`, of a whole row."""
    lo = _in_order(tl.full([], float("-inf"), tl.float32)) + 1
    hi = _in_order(tl.full([], float("inf"), tl.float32)) + 1
    reaching = tl.zeros([], tl.int32)
    for u0 in tl.range(0, row.num_there, UNITS):
        _, score, _ = _load_scores(u0, row, UNITS, HAS_FORCED)
        reaching += tl.sum((score > float("-inf")).to(tl.int32), 0)
    above = tl.zeros([], tl.int32)
    while (reaching > left) & (hi - lo > 1):
        step = tl.maximum((hi - lo) // PARTS, 1)
        totals = _count_parts(lo, step, hi, row, UNITS, HAS_FORCED)
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
    return lo, reaching, above


@triton.jit
def _bisect(score, left):
    """A threshold, as an integer, how many of the scores reach it, and how many are larger. If
    there are `left` or more, no fewer than `left` reach it; if more do, they are equal to it.
    """
    is_there = score > float("-inf")
    reaching = tl.sum(is_there.to(tl.int32), 0)
    lo = _in_order(tl.min(tl.where(is_there, score, float("inf")), 0))
    hi = _in_order(tl.max(score, 0)) + 1
    above = tl.zeros([], tl.int32)
    while (reaching > left) & (hi - lo > 1):
        middle = lo + (hi - lo) // 2
        count = tl.sum((score >= _as_float(middle)).to(tl.int32), 0)
        reaches = count >= left
        lo, hi = tl.where(reaches, middle, lo), tl.where(reaches, hi, middle)
        reaching = tl.where(reaches, count, reaching)
        above = tl.where(reaches, above, count)
    return lo, reaching, above


@triton.jit
def _suggest(left, row, UNITS: tl.constexpr, HAS_FORCED: tl.constexpr):
    """Two thresholds, as integers: by a sample of a row, `left` scores reach the lower one and not
    the higher one.
    """
    i = tl.arange(0, UNITS)
    unit = i // RUN * (RUN * (row.num_there // UNITS)) + i % RUN
    score, _ = _scores_of(unit, row, HAS_FORCED)
    rank = tl.maximum(left, 0).to(tl.float32) * UNITS / row.num_there.to(tl.float32)
    # neighbours may be alike: eight times their standard deviation if none are
    slack = 8.0 * tl.sqrt(rank) + 2.0 * RUN
    many, few = (rank + slack).to(tl.int32), tl.maximum(rank - slack, 0.0).to(tl.int32)
    least = _in_order(tl.full([], float("-inf"), tl.float32)) + 1
    most = _in_order(tl.full([], float("inf"), tl.float32)) + 1
    lo, lo_end, hi_begin, hi = least, most, least, most
    while lo_end - lo > 2**COARSE:
        middle, hi_middle = lo + (lo_end - lo) // 2, hi_begin + (hi - hi_begin) // 2
        # both counts in one sum
        both = (score >= _as_float(middle)).to(tl.int32)
        both += (score >= _as_float(hi_middle)).to(tl.int32) << 16
        both = tl.sum(both, 0)
        reaches, is_low = (both & 0xFFFF) >= many, (both >> 16) > few
        lo, lo_end = tl.where(reaches, middle, lo), tl.where(reaches, lo_end, middle)
        hi_begin, hi = tl.where(is_low, hi_middle, hi_begin), tl.where(is_low, hi, hi_middle)
    return lo, hi


@triton.jit
def _gather_between(lo, hi, rest_ptr, row, UNITS: tl.constexpr, HAS_FORCED: tl.constexpr):
    """How many scores of a row reach the higher threshold, and how many the lower one alone, of
    which the first UNITS are written to `rest_ptr`."""
    low, high = _as_float(lo), _as_float(hi)
    has_high = hi <= _in_order(tl.full([], float("inf"), tl.float32))
    above, between = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for u0 in tl.range(0, row.num_there, UNITS):
        _, score, _ = _load_scores(u0, row, UNITS, HAS_FORCED)
        is_above = (score >= high) & has_high
        is_between = (score >= low) & (score > float("-inf")) & (is_above == 0)
        so_far = tl.cumsum(is_between.to(tl.int32), 0)
        place = between + so_far - 1
        tl.store(rest_ptr + place, score, mask=is_between & (place < UNITS))
        both = tl.sum(is_between.to(tl.int32) + (is_above.to(tl.int32) << 16), 0)
        between += both & 0xFFFF
        above += both >> 16
    return above, between


@triton.jit(do_not_specialize=("first_row", "num_units", "wanted", *SelectedSizes._fields))
def _top_units_kernel(
    pointers, top, first_row, num_units, wanted, width, force_first, force_last,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides,
    UNITS: tl.constexpr, HAS_FORCED: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """A token's best units, `wanted` at most; `top` is a `TopPointers`."""
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    group = tl.program_id(1)
    token = find_token(first_row + tl.program_id(0), group, pointers, strides, sizes, OPTIONS)
    stop = stop_of(token, sizes, OPTIONS)
    num_there = tl.maximum((stop + OPTIONS.SELECT_SIZE - 1) // OPTIONS.SELECT_SIZE, 0).to(tl.int32)
    num_there = tl.minimum(num_there, num_units)
    own = tl.minimum(token.position, token.key_len - 1)
    own = tl.where(own < 0, -1, own // OPTIONS.SELECT_SIZE).to(tl.int32)
    number = (tl.program_id(0) * tl.num_programs(1) + group).to(tl.int64)
    row_ptr = top.scores + number * num_units
    row = Row(row_ptr, num_there, own, force_first, force_last)

    forced = tl.zeros([], tl.int32)
    if HAS_FORCED:
        for u0 in tl.range(0, num_there, UNITS):
            _, _, is_forced = _load_scores(u0, row, UNITS, HAS_FORCED)
            forced += tl.sum(is_forced.to(tl.int32), 0)
    left = wanted - forced
    if num_there <= UNITS:
        _, score, _ = _load_scores(0, row, UNITS, HAS_FORCED)
        lo, reaching, above = _bisect(score, left)
    else:
        lo, hi = _suggest(left, row, UNITS, HAS_FORCED)
        rest_ptr = top.rest + number * UNITS
        above, between = _gather_between(lo, hi, rest_ptr, row, UNITS, HAS_FORCED)
        if (above < left) & (above + between >= left) & (between <= UNITS):
            tl.debug_barrier()
            i = tl.arange(0, UNITS)
            score = tl.load(rest_ptr + i, mask=i < between, other=float("-inf"))
            lo, reaching, more = _bisect(score, left - above)
            reaching += above
            above += more
        else:
            lo, reaching, above = _cut(left, row, UNITS, HAS_FORCED)
    # all that reach lo are selected, or of those that are equal to it the first ones
    is_exact = reaching <= left
    last = _as_float(lo)
    before = tl.zeros([], tl.int32)
    equal_before = tl.zeros([], tl.int32)
    equal_left = left - above
    at = ((first_row + tl.program_id(0)) * tl.num_programs(1) + group).to(tl.int64)
    for u0 in tl.range(0, num_there, UNITS):
        unit, score, is_forced = _load_scores(u0, row, UNITS, HAS_FORCED)
        is_there = score > float("-inf")
        is_better = is_forced | is_there & ((score > last) | (is_exact & (score == last)))
        is_equal = is_there & (score == last) & (not is_exact)
        # both numbers in one sum
        both = is_better.to(tl.int32) + (is_equal.to(tl.int32) << 16)
        so_far = tl.cumsum(both, 0)
        better, equal = before + (so_far & 0xFFFF), equal_before + (so_far >> 16)
        is_taken = is_better | is_equal & (equal <= equal_left)
        place = better + tl.minimum(equal, equal_left) - 1
        tl.store(top.ids + at * width + place, unit, mask=is_taken)
        total = tl.sum(both, 0)
        before += total & 0xFFFF
        equal_before += total >> 16
    tl.store(top.counts + at, before + tl.minimum(equal_before, equal_left))
