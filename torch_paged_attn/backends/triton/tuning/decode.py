"""Tiles of decode by a model of how long they take, on chips where that was measured.

A launch takes the time of its longest program: a beginning, its trips through tiles of keys or the
time in which memory gives all of them, whichever is longer, and the merging of tiles that several
programs share. The numbers are fitted to a sweep (`benchmarks/gpu/fit_decode.py`, which has the
data beside it). How many keys there are the host does not know, only how many a table has room for:
tiles are chosen that are best on average over all lengths up to that, of even and of ragged
batches, by the logarithm of the time.
"""

import functools
import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from torch_paged_attn.backends.triton.portable.splits import plan_splits
from torch_paged_attn.backends.triton.tuning.portable import TABLES, Config

# rows of a tile: of one query and the heads that share its keys
ROWS = 16

# lengths that a table may stand for, and of a ragged batch the longest sequence over the mean
LENGTHS = tuple(256 * 2**i for i in range(9))
MOST_KEYS = 2 * LENGTHS[-1]
RAGGED = 4

# the sharper, the closer a sum of two times is to the longer one
SHARPNESS = 4


class Tile(NamedTuple):
    """What a kernel is compiled for, and how many programs a multiprocessor is to hold."""

    block_n: int
    warps: int
    stages: int
    resident: int


class Costs(NamedTuple):
    """Of a tile, in microseconds."""

    first: float  # to begin and to end
    trip: float  # a tile of keys that one program reads
    read: float  # a kilobyte that one multiprocessor reads
    merge: float  # to share a tile of queries at all
    part: float  # and for each program that does


class Work(NamedTuple):
    """Of a launch."""

    trips: float  # tiles of keys of a program
    kilobytes: float  # of a multiprocessor
    parts: float  # programs that share a tile of queries


class Shape(NamedTuple):
    """Of a call; keys and values of one head take `bytes_per_key`."""

    batch: int
    heads: int  # programs that have all sequences
    bytes_per_key: int


def work_of(shape: Shape, keys: int, tile: Tile, least: int, multiprocessors: int) -> Work:
    """The work where all sequences have `keys`, and a piece of them at least `least`."""
    slots = tile.resident * multiprocessors
    many = LENGTHS[-1]
    programs = plan_splits(shape.batch + 1, shape.heads, shape.batch, many, slots, True).programs
    units = -(-keys // tile.block_n)
    piece = max(-(-shape.batch * units // programs), -(-least // tile.block_n))
    parts = units / piece
    if units % piece and piece % units:
        parts += 1
    kilobytes = shape.batch * shape.heads * keys * shape.bytes_per_key / multiprocessors / 1e3
    return Work(min(piece, shape.batch * units), kilobytes, max(parts, 1.0))


def microseconds(work: Any, costs: Any) -> Any:
    """The model: of numbers, or of tensors of them."""
    longer = (costs.trip * work.trips) ** SHARPNESS + (costs.read * work.kilobytes) ** SHARPNESS
    shared = (work.parts > 1) * (costs.merge + costs.part * work.parts)
    return costs.first + longer ** (1 / SHARPNESS) + shared


@functools.cache
def _model(arch: str) -> dict[tuple[Tile, int], Costs]:
    """Tiles and the least keys of a piece, with their costs; none for a chip without a model."""
    path: Path = TABLES / f"{arch}_decode.json"
    if not path.exists():
        return {}
    listed = json.loads(path.read_text())
    return {
        (Tile(*entry["tile"]), least): Costs(**entry["costs"])
        for entry in listed
        for least in entry["least"]
    }


def choose(
    model: dict[tuple[Tile, int], Costs], shape: Shape, key_bound: int, multiprocessors: int
) -> tuple[Tile, int]:
    """Tiles, and the fewest keys of a piece, for sequences of at most `key_bound` keys."""
    lengths = [n for n in LENGTHS if n < key_bound] or [LENGTHS[0]]

    def time(choice: tuple[Tile, int]) -> float:
        works = [work_of(shape, n, *choice, multiprocessors) for n in lengths]
        works += [work._replace(parts=RAGGED * work.parts) for work in works]
        return sum(math.log(microseconds(work, model[choice])) for work in works)

    return min(model, key=time)


@functools.lru_cache(maxsize=4096)
def choose_decode(
    arch: str, shape: Shape, key_bound: int, multiprocessors: int
) -> tuple[Config, int] | None:
    """The same as a config; None for a chip without a model."""
    if not (model := _model(arch)):
        return None
    tile, least = choose(model, shape, key_bound, multiprocessors)
    config = Config(ROWS, tile.block_n, tile.warps, tile.stages, resident=tile.resident)
    return config, least
