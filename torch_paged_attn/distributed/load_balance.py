"""How the documents of a packed batch are divided over ranks so that all have equal work.

A division is a tensor `bounds` (documents, chunks + 1) int64: chunk `c` holds the positions
`bounds[d, c]` to `bounds[d, c + 1] - 1` of document `d`. With W ranks there are W chunks, one per
rank, or 2 W; then rank `r` has the chunks `r` and `2 W - 1 - r`. With a causal mask the early chunk
is cheap and the late one expensive, so that all ranks have about the same work. In every division,
positions of an earlier chunk come before those of a later one.
"""

import random
from collections.abc import Iterator
from itertools import zip_longest

import torch
from torch import Tensor

# the cost of sending a row of keys and values, in pairs of a query and a key that are computed in
# the same time: with 64 query heads, 8 KV heads, head_dim 128, 350 GB/s and 650 TFLOP/s
ROW_COST = 232
# how many orders of the documents are tried at most, and how many documents in all of them together
MOST_ORDERS, MOST_TRIED = 256, 20_000


def owners(chunks: int, size: int) -> list[int]:
    """The rank of each chunk, for a group of `size` ranks."""
    return [c if c < size else 2 * size - 1 - c for c in range(chunks)]


def contiguous(lengths: Tensor, size: int, rows: int) -> Tensor:
    """One chunk of `rows` consecutive tokens per rank: balanced without a causal mask."""
    return _of_packing(lengths, rows * torch.arange(size + 1))


def head_tail(lengths: Tensor, size: int, rows: int) -> Tensor:
    """Two chunks per rank, one from the front and one from the back of the batch: balanced for one
    long document with a causal mask.
    """
    second = rows // 2
    first = rows - second
    steps = torch.tensor([0] + [first] * size + [second] * size)
    return _of_packing(lengths, steps.cumsum(0))


def _of_packing(lengths: Tensor, edges: Tensor) -> Tensor:
    """`bounds` of chunks that are given as rows of the batch, `edges` (chunks + 1,)."""
    stops = lengths.cumsum(0)
    within = edges[None, :] - (stops - lengths)[:, None]
    return within.clamp(min=0).minimum(lengths[:, None])


def documents(lengths: Tensor, size: int, rows: int) -> Tensor:
    """Whole documents for each rank, and at most one document that it shares with the next rank, so
    that all ranks have the same number of tokens and about the same causal work.

    The ranks take documents in some order until they have `rows` tokens. Of a document that does
    not fit, a rank takes what it has room for, some tokens from the front and some from the back,
    in the proportion that gives it its share of work; the next rank continues with the middle. Many
    orders are tried. The best one has the cheapest most expensive rank, where a rank's cost is its
    work plus the rows that are sent to it.
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
    """Orders to try: as given; alternating long and short documents; and random ones, which are the
    same in every process.
    """
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
    """The cost of the most expensive rank, and the number of tokens of each document in each chunk,
    if documents are taken in this order. `balanced`: whether ranks take tokens from the back, too.
    """
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
    """How many keys queries at positions `low` to `high - 1` see, with a causal mask."""
    return (high * (high + 1) - low * (low + 1)) / 2


def _from_the_back(low: int, high: int, tokens: int, share: float) -> int:
    """How many of `tokens` queries have to come from the back of positions `low` to `high - 1`, the
    others from the front, so that together they see `share` keys.
    """
    first = _pairs(low, low + tokens)
    # each token that comes from the back instead of the front adds this many pairs
    more = high - low - tokens
    return min(tokens, max(0, round((share - first) / more)))


SCHEMES = {"contiguous": contiguous, "head_tail": head_tail, "documents": documents}
