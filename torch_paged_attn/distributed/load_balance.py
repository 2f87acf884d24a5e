"""Where the documents of a packed batch are cut, so that ranks have equal work.

A cut is one tensor, `bounds` (documents, chunks + 1): chunk `c` holds the positions `bounds[d, c]`
to `bounds[d, c + 1] - 1` of document `d`. There are as many chunks as ranks, `W`, or twice as many;
then rank `r` has the chunks `r` and `2 W - 1 - r`: cheap first queries with dear last ones, if
attention is causal. Whatever the cut is, keys of an earlier chunk come before those of a later one.
"""

import random
from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

# what a row of keys and values that travels costs, in pairs of a query and a key that are computed:
# 64/8 heads of 128 at 350 GB/s and 650 TFLOP/s
ROW_COST = 232
# orders of documents that are tried, and documents in all of them
MOST_ORDERS, MOST_TRIED = 256, 20_000


def owners(chunks: int, size: int) -> list[int]:
    """The rank that has each chunk."""
    return [c if c < size else 2 * size - 1 - c for c in range(chunks)]


def contiguous(lengths: Tensor, size: int, rows: int) -> Tensor:
    """One chunk of `rows` tokens of the packing for each rank, as context parallelism of text that
    is not causal wants it.
    """
    return _of_packing(lengths, rows * torch.arange(size + 1))


def head_tail(lengths: Tensor, size: int, rows: int) -> Tensor:
    """Two chunks of the packing for each rank, from both ends: balanced for one long document."""
    second = rows // 2
    first = rows - second
    steps = torch.tensor([0] + [first] * size + [second] * size)
    return _of_packing(lengths, steps.cumsum(0))


def _of_packing(lengths: Tensor, edges: Tensor) -> Tensor:
    """Chunks of the packing by its rows, as positions in documents."""
    stops = lengths.cumsum(0)
    within = edges[None, :] - (stops - lengths)[:, None]
    return within.clamp(min=0).minimum(lengths[:, None])


def documents(lengths: Tensor, size: int, rows: int) -> Tensor:
    """Whole documents, and one between each rank and the next that is cut so that both have as many
    tokens, and as much causal work, as the others.

    The documents are dealt out in some order, `rows` tokens to each rank. Of that which does not
    fit a rank takes what it has room for, some from the front and some from the back, in the
    proportion that gives it its share of work; the next rank goes on with what is between. Of many
    orders the one whose dearest rank is cheapest is taken: its work, and the rows it is sent.
    """
    sizes = lengths.tolist()
    present = [d for d, n in enumerate(sizes) if n]
    best: tuple[float, list[list[int]]] | None = None
    for order in _orders(present, sizes):
        for balanced in (True, False):
            found = _deal(sizes, order, size, rows, balanced)
            if best is None or found[0] < best[0]:
                best = found
    assert best is not None
    counts = torch.tensor(best[1], dtype=torch.int64).reshape(len(sizes), 2 * size)
    return torch.cat([torch.zeros(len(sizes), 1, dtype=torch.int64), counts.cumsum(1)], 1)


def _orders(present: list[int], sizes: list[int]) -> Iterator[list[int]]:
    """As they come; long and short ones in turn; and shuffled, always alike."""
    yield present
    by_size = sorted(present, key=lambda d: -sizes[d])
    half = (len(present) + 1) // 2
    yield [
        d
        for pair in zip_longest(by_size[:half], by_size[: half - 1 : -1])
        for d in pair
        if d is not None
    ]
    shuffled, source = list(present), random.Random(0)
    for _ in range(min(MOST_ORDERS, MOST_TRIED // max(len(present), 1))):
        source.shuffle(shuffled)
        yield shuffled


def _deal(
    sizes: list[int], order: list[int], size: int, rows: int, balanced: bool
) -> tuple[float, list[list[int]]]:
    """What the dearest rank costs, and tokens of each document in each chunk."""
    cuts = [[0] * (2 * size) for _ in sizes]
    left = float(sum(n * (n + 1) for n in sizes)) / 2  # work
    waiting = [(d, 0, sizes[d]) for d in reversed(order)]
    dearest = 0.0
    for rank in range(size):
        share, room, work, came = left / (size - rank), rows, 0.0, 0
        while waiting and room:
            d, low, high = waiting.pop()
            if high - low <= room:
                front, back = high - low, 0
            else:
                back = _from_the_back(low, high, room, share - work) if balanced else 0
                front = room - back
                waiting.append((d, low + front, high - back))
            cuts[d][rank], cuts[d][2 * size - 1 - rank] = front, back
            room -= front + back
            work += _pairs(low, low + front) + _pairs(high - back, high)
            # keys before its last query that are not its own
            came += high - front - back if back else low
        left -= work
        dearest = max(dearest, work + ROW_COST * came)
    return dearest, cuts


def _pairs(low: int, high: int) -> float:
    """Work of the queries at positions `low` to `high - 1`, causal."""
    return (high * (high + 1) - low * (low + 1)) / 2


def _from_the_back(low: int, high: int, tokens: int, share: float) -> int:
    """Of `tokens` queries, how many from the back of `low` to `high` make them `share` pairs of
    work.
    """
    first = _pairs(low, low + tokens)
    # each that is moved from the front to the back is this much more work
    more = high - low - tokens
    return min(tokens, max(0, round((share - first) / more)))


SCHEMES = {"contiguous": contiguous, "head_tail": head_tail, "documents": documents}
