"""Where the documents of a packed batch are cut, so that ranks have equal work.

A cut is one tensor, `bounds` (documents, chunks + 1): chunk `c` holds the positions `bounds[d, c]`
to `bounds[d, c + 1] - 1` of document `d`. There are as many chunks as ranks, `W`, or twice as many;
then rank `r` has the chunks `r` and `2 W - 1 - r`: cheap first queries with dear last ones, if
attention is causal. Whatever the cut is, keys of an earlier chunk come before those of a later one.
"""

import torch
from torch import Tensor

# of a document's keys and values that travel, in attention between one token and the others: what
# a row of them costs (464 / tokens of the time of 64/8 heads of 128 at 350 GB/s and 650 TFLOP/s)
ROW_COST = 464
# of the longest documents, how many may be cut over all ranks: more were never better
MOST_SPREAD = 64


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
    """Whole documents, and some that are cut: the longest ones into two pieces for each rank, one
    more where tokens have to fill a rank up. `rows` is what a rank has room for.

    Of all numbers of documents to be spread, that which makes the dearest rank cheapest: its
    work, and the rows that travel.
    """
    order = lengths.argsort(descending=True, stable=True).tolist()
    sizes = lengths.tolist()
    best = None
    for spread in range(min(len(order), MOST_SPREAD) + 1):
        if spread and sizes[order[spread - 1]] < 2 * size:
            break
        cost, cuts = _place(sizes, order, spread, size, rows)
        if best is None or cost < best[0]:
            best = cost, cuts
    bounds = torch.zeros(len(sizes), 2 * size + 1, dtype=torch.int64)
    for d, counts in enumerate(best[1] if best else ()):
        bounds[d, 1:] = torch.tensor(counts).cumsum(0)
    return bounds


def _place(
    sizes: list[int], order: list[int], spread: int, size: int, rows: int
) -> tuple[float, list[list[int]]]:
    """Tokens of each document in each chunk, where the longest `spread` are cut over all ranks,
    and what the dearest rank costs then.
    """
    chunks = owners(2 * size, size)
    cuts = [[0] * len(chunks) for _ in sizes]
    work, room, travels = [0.0] * size, [rows] * size, [0] * size

    def give(d: int, chunk: int, start: int, count: int) -> None:
        rank = chunks[chunk]
        cuts[d][chunk] = count
        room[rank] -= count
        work[rank] += count * (start + 0.5 * (count + 1))

    for d in order[:spread]:
        edges = [sizes[d] * c // len(chunks) for c in range(len(chunks) + 1)]
        for chunk, rank in enumerate(chunks):
            give(d, chunk, edges[chunk], edges[chunk + 1] - edges[chunk])
            travels[rank] += (edges[chunk + 1] - edges[chunk]) * (size - 1)
    for d in order[spread:]:
        fitting = [r for r in range(size) if room[r] >= sizes[d]]
        if fitting:
            give(d, min(fitting, key=lambda r: (work[r], r)), 0, sizes[d])
            continue
        start = 0
        for rank in range(size):
            last = rank == size - 1
            count = sizes[d] - start if last else max(0, min(room[rank], sizes[d] - start))
            if count:
                give(d, rank, start, count)
                travels[rank] += start
                start += count
    cost = max(w + ROW_COST * t for w, t in zip(work, travels, strict=True))
    return cost, cuts


SCHEMES = {"contiguous": contiguous, "head_tail": head_tail, "documents": documents}
