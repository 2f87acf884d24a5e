"""Programs that have each computed a part of a result wait for each other, to add up the parts.

Each program increments the result's counter when its part is in memory. The first `waiting`
programs wait until all have done so, and each then adds up its share of the result. One program
alone would take longer to read 66 parts than it took to compute its own.

GPUs do not promise that all programs run at the same time, so no program waits for ever: a
program that has waited too long gives up, and then the last program to arrive adds up everything.
"""

import triton
import triton.language as tl

from torch_paged_attn.backends.triton.runtime.target import INTERPRETED

# a counter's fields: how many programs have arrived, have given up waiting, and are done
ARRIVED, GAVE_UP, DONE = tl.constexpr(2**12 - 1), tl.constexpr(2**12), tl.constexpr(2**22)
MOST_PARTS = 2**12 - 1
# how often a program looks whether all have arrived, each time for half a microsecond. Interpreted
# programs run one after the other, so that it is of no use to wait
MOST_LOOKS = tl.constexpr(2 if INTERPRETED else 256)


@triton.jit
def _give_up(counter, seen, parts):
    """Record in the counter that this program no longer waits, unless all have arrived. Returns the
    counter.
    """
    expected = seen
    seen = tl.atomic_cas(counter, expected, expected + GAVE_UP, sem="acq_rel")
    while (seen != expected) & ((seen & ARRIVED) < parts):
        expected = seen
        seen = tl.atomic_cas(counter, expected, expected + GAVE_UP, sem="acq_rel")
    return seen


@triton.jit
def arrive(counter, number, parts, waiting, RESETS: tl.constexpr):
    """Count part `number` of `parts`, which all threads have written before. The first `waiting`
    programs wait; they must have no other work.

    Returns whether this program adds up parts (all of them are in memory then), and whether it
    shares this with the other waiting programs (if not, it adds up everything). RESETS: the last
    program that reads the counter sets it to 0 for the next launch.
    """
    seen = tl.atomic_add(counter, 1, sem="acq_rel") + 1
    is_last = (seen & ARRIVED) == parts
    waits = number < waiting
    if waits:
        looks = 0
        while ((seen & ARRIVED) < parts) & (looks < MOST_LOOKS):
            seen = tl.atomic_add(counter, 0, sem="acquire")
            looks += 1
        if (seen & ARRIVED) < parts:
            seen = _give_up(counter, seen, parts)
    # once all have arrived, nothing changes but how many are done
    are_there = (seen & ARRIVED) == parts
    left = waiting - seen // GAVE_UP % (DONE // GAVE_UP)
    are_shared = are_there & (left == waiting) & (waiting > 0)
    if RESETS and are_there:
        others = left
        if waits:
            others -= tl.atomic_add(counter, DONE, sem="relaxed") // DONE + 1
        if others == 0:
            tl.store(counter, 0)
    return tl.where(are_shared, waits, is_last), are_shared
