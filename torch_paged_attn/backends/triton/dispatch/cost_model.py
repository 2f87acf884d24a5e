"""The fastest way to run queries of sequences in pages on Hopper: decodes, draft tokens, chunks of
prompts, and batches of long and short sequences.

There are some ways to run a batch of them: the portable kernel, with one of a few tiles, whole or
with keys that programs share, or Hopper's kernel, by one of its schedules with one of its tiles.
How long each takes is estimated from sizes and a few costs, and the shortest estimate wins. The
costs are fitted to measurements of drawn serving steps (`benchmarks/gpu/fit_ways.py`) and are in
`tuning/tables/sm90_ways.json`.

The host does not know the lengths of sequences. It knows how many there are, and an upper bound of
their keys if the caller gives one; an estimate is the geometric mean over guesses of the lengths.
"""

import functools
import json
import math
from typing import NamedTuple

from torch_paged_attn.backends.triton.portable.forward.combine import SHARED_COLUMNS
from torch_paged_attn.backends.triton.portable.forward.splits import MIN_KEYS, evenly
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2
from torch_paged_attn.backends.triton.tuning import Config
from torch_paged_attn.backends.triton.tuning.portable import TABLES

TABLE = TABLES / "sm90_ways.json"

# bytes of memory that an H200 reads in a microsecond, and multiprocessors that costs are fitted for
BANDWIDTH, MULTIPROCESSORS = 4.3e6, 132
# keys per tile that the costs of Hopper's kernel refer to, whatever its tile really is
HOPPER_KEYS = 128
# how much less a further part costs where several programs add up parts, some columns each
SHARED_GAIN = 16
# keys of a tile that the cost of one refers to, where tiles have any number
TILE_KEYS = 128
# the way of `unpacked.py`, and bytes of a number of a copied key, which is written and read
UNPACKED, COPIED_BYTES = "unpacked", 4
# a factor on the time of a tile of keys that are converted, with scales by token: 31 decodes and a
# chunk of 512 took 945 us on an H200, and 500 with scales by head
APART = 1.7
# rows of queries of a KV head from which on keys are copied
LEAST_ROWS = 32
# the smallest piece of a tile, in tiles of keys
LEAST_PIECE = 1.5
# the fewest keys of a sequence in a guess of lengths
LEAST_KEYS = 64
# how much of a way's usual error is added to its estimates: of two ways with equal estimates, the
# one whose estimates have the smaller error is the safer choice
CAUTION = 0.2


class Tile(NamedTuple):
    """A tile of queries, and the keys that are multiplied with it at a time."""

    tokens: int
    rows: int
    heads: int  # tiles that all heads of these tokens take
    keys: int
    resident: int = 1  # programs of a multiprocessor


class Shape(NamedTuple):
    """What is known of a batch."""

    kind: str  # of its ways, as in `ways`
    batch: int
    total_q: int
    num_kv_heads: int
    group_size: int
    queries: int  # of the longest sequence, if these are few: all fit into a tile; else 0
    longest: int  # the most keys of a sequence, an upper bound
    window: int  # keys before its own that a query sees; -1: all
    key_bytes: int  # of a key and its value, of one head
    is_copied: bool  # pages are so small that their rows are loaded one by one
    columns: int  # of a result's row
    # the ways that can run it, each with its tiles if queries are many
    tiles: tuple[tuple[str, Tile | None], ...]
    is_apart: bool = False  # scales are by token, or keys int4

    @property
    def is_few(self) -> bool:
        return self.queries > 0

    @property
    def rows(self) -> int:
        """Rows of a tile that holds all queries and heads that share keys."""
        return -(-self.total_q // self.batch) * self.group_size


class Lengths(NamedTuple):
    """A guess of how many keys sequences have, the mean and the largest number; of so many of
    them, with so many queries each.
    """

    mean: float
    longest: float
    sequences: float = 1.0
    queries: float = 1.0


class Costs(NamedTuple):
    """Microseconds, unless it says otherwise."""

    start: float  # of a launch
    per_doubling: float  # of the batch: to find or list the work
    unit: float  # a tile of keys
    load: float  # a factor on `unit`, less one, where programs are as many as run at a time
    odd: float  # the same, where rows of a tile are no power of two
    tall: float  # the same, where they are more than eight; of many queries, for each 64 rows
    # the same, where pages are so small that rows are loaded one by one; if UNPACKED, a factor on
    # the time in which keys are copied
    copied: float
    memory: float  # a factor on the time in which memory is read
    first_part: float  # a tile of queries whose keys several programs share
    part: float  # each further one of them, for 8 rows (portable) or 32 (Hopper's)
    tile: float  # each tile of queries of a program
    window: float  # a call with a window; of many queries, a factor on `unit`, less one
    spread: float  # a number: how far estimates are off, of the logarithm


class Division(NamedTuple):
    """How a batch is divided among programs."""

    # tiles of keys of a program, of each kind of sequences of a guess
    shares: tuple[float, ...]
    uneven: float  # how many more the program has that has the most
    parts: float  # programs that share the longest tile of queries, but the first
    rows: float  # of a part, in units of `Costs.part`
    tiles: float  # tiles of queries of a program
    load: float = 0.0  # programs, of those that run at a time


@functools.cache
def parse(way: str) -> Config:
    """The tiles of a way of the portable kernel, such as "portable 128/4/3/2": keys of a tile,
    warps, stages, programs of a multiprocessor. With " all", all programs merge many parts."""
    numbers, _, merging = way.removeprefix("portable ").partition(" ")
    keys, warps, stages, resident = map(int, numbers.split("/"))
    return Config(16, keys, warps, stages, resident=resident, is_merged_by_all=merging == "all")


def least_queries(group_size: int) -> int:
    """Queries of a sequence from which on `unpacked.py` copies its keys."""
    return max(LEAST_ROWS // group_size, 2)


def is_portable(way: str) -> bool:
    """Whether a way is one of the portable kernel; the others are forms of Hopper's."""
    return way.startswith("portable")


@functools.cache
def ways() -> dict[str, dict[str, Costs]]:
    """Kind -> the ways and their costs. A kind says whether queries of all sequences are few or
    many, the width of a head, and the bytes of a key's number, such as "few/d128/b2".
    """
    table = json.loads(TABLE.read_text())
    return {kind: {way: Costs(*x) for way, x in of.items()} for kind, of in table["costs"].items()}


def guesses(shape: Shape) -> list[tuple[Lengths, ...]]:
    """The guesses, each of which divides the sequences: all lengths are alike, or their logarithms
    are uniform up to the longest. Where queries are many, as few sequences as can have all but one
    of each other's; and where lengths differ, these may have few keys, and another the most.
    """
    longest, batch = shape.longest, shape.batch
    means = [0.95 * longest, (longest - LEAST_KEYS) / math.log(max(longest / LEAST_KEYS, 1.02))]
    means = [longest] if batch == 1 else [max(mean, LEAST_KEYS) for mean in means]
    if shape.is_few:
        most = shape.window + shape.queries if shape.window >= 0 else math.inf
        each = shape.total_q / batch
        return [(Lengths(min(x, most), min(longest, most), batch, each),) for x in means]
    # one of them has the longest
    means = [(longest + (batch - 1) * mean) / batch for mean in means]
    # no sequence has more queries than keys
    long = max(math.ceil((shape.total_q - batch) / longest), 1)
    if long >= batch:
        each = shape.total_q / batch
        return [(Lengths(max(x, each), max(longest, each), batch, each),) for x in means]
    each = (shape.total_q - batch) / long + 1
    rest = [Lengths(mean, longest, batch - long, 1) for mean in means]
    usual = max(math.sqrt(LEAST_KEYS * longest), each)
    return [
        *((x, Lengths(max(x.mean, each), max(longest, each), long, each)) for x in rest),
        (rest[-1], Lengths(usual, usual, long, each)),
    ]


def choose_way(shape: Shape) -> str:
    """The way with the shortest estimate, of those of the shape."""
    found = scores(shape)
    return min(found, key=found.__getitem__)


def scores(shape: Shape, table: dict[str, dict[str, Costs]] | None = None) -> dict[str, float]:
    """The logarithms of estimates, the higher the less sure they are. `table`: of other costs."""
    costs, of_shape = (table or ways()).get(shape.kind, {}), guesses(shape)
    found = {}
    for way, _ in shape.tiles:
        logs = [math.log(estimate(way, costs[way], shape, guess)) for guess in of_shape]
        found[way] = sum(logs) / len(logs) + CAUTION * costs[way].spread
    return found


def estimate(
    way: str,
    costs: Costs,
    shape: Shape,
    guess: tuple[Lengths, ...],
    bandwidth: float = BANDWIDTH,
) -> float:
    """Microseconds of a launch. `bandwidth`: bytes in a microsecond."""
    tile = dict(shape.tiles)[way]
    if way == UNPACKED:
        assert tile is not None
        return _estimate_unpacked(costs, tile, shape, guess, bandwidth)
    unit = costs.unit * (1.0 + costs.copied * shape.is_copied)
    if tile is not None:
        unit *= tile.keys / TILE_KEYS * (1.0 + costs.tall * tile.rows / 64)
        unit *= 1.0 + costs.window * (shape.window >= 0)
        unit *= APART if shape.is_apart else 1.0
        division = _divide_tiles(way, tile, shape, guess)
    else:
        rows = next_power_of_2(shape.rows)
        unit *= 1.0 + costs.odd * (rows != shape.rows) + costs.tall * (rows > 8)
        division = _divide_few(way, shape, guess[0])
    unit *= 1.0 + costs.load * division.load
    # decodes wait for memory and chunks for products, one after the other
    work = division.uneven * unit
    for x, share in zip(guess, division.shares, strict=True):
        keys = x.sequences * _seen(x.mean, x.queries, shape) * shape.num_kv_heads
        work += max(share * unit, keys * costs.memory * shape.key_bytes / bandwidth)
    merging = costs.first_part * min(division.parts, 1.0)
    merging += costs.part * division.parts * division.rows
    beginning = costs.start + costs.per_doubling * math.log2(1 + shape.batch)
    beginning += costs.tile * division.tiles
    beginning += costs.window * (shape.window >= 0 and shape.is_few)
    return beginning + work + merging


def _estimate_unpacked(
    costs: Costs, tile: Tile, shape: Shape, guess: tuple[Lengths, ...], bandwidth: float
) -> float:
    """Keys of sequences of many queries are copied, and Hopper's kernel runs over the copies; the
    others' queries each read their keys."""
    least = least_queries(shape.group_size)
    many = tuple(x for x in guess if x.queries >= least)
    copied = sum(x.sequences * x.mean for x in many)
    read = sum(x.sequences * x.mean * x.queries for x in guess if x.queries < least)
    per_key = shape.num_kv_heads / bandwidth
    size = shape.key_bytes + 2 * shape.columns * COPIED_BYTES
    time = costs.start + costs.per_doubling * math.log2(1 + shape.batch)
    time += per_key * (costs.copied * copied * size + costs.memory * read * shape.key_bytes)
    if not many:
        return time
    division = _divide_tiles("cut", tile, shape, many)
    time += costs.tile * division.tiles
    time += costs.unit * (sum(division.shares) + division.uneven)
    merging = costs.first_part * min(division.parts, 1.0)
    return time + merging + costs.part * division.parts * division.rows


def _seen(keys: float, queries: float, shape: Shape) -> float:
    """How many of its keys so many neighbouring queries of a sequence see."""
    return min(keys, shape.window + queries) if shape.window >= 0 else keys


def _divide_tiles(way: str, tile: Tile, shape: Shape, guess: tuple[Lengths, ...]) -> Division:
    """Sequences of many queries: tiles of queries, of which later ones see more keys. Where
    keys are divided in equal shares, each tile counts with the keys of its sequence's last one."""
    count = longest = 0.0
    units = []
    slots = MULTIPROCESSORS * tile.resident
    for x in guess:
        tokens = min(tile.tokens, x.queries)
        tiles = math.ceil(x.queries / tile.tokens)
        # the last tile of a sequence sees all keys, the first one those before its own queries
        before = 0.0 if way.startswith("dealt") else (x.queries - tokens) / 2
        seen = _seen(max(x.mean - before, 1.0), tokens, shape)
        most = math.ceil(_seen(x.longest, tokens, shape) / tile.keys)
        each = most if tiles == 1 and x.sequences == 1 else max(seen / tile.keys + 0.5, 1.0)
        count += x.sequences * tiles * tile.heads
        units.append(x.sequences * tiles * tile.heads * each)
        longest = max(longest, most)
    rounds, load = max(count / slots, 1.0), min(count / slots, 1.0)
    share = sum(units) / slots
    parts, piece = 0.0, max(longest, share)
    if way.startswith(("numbered", "listed")):
        # whole tiles are claimed: who has a long one has fewer
        rounds = math.ceil(rounds)
        piece = max(longest, rounds * sum(units) / count)
    elif way.startswith(("cut", "dealt")):
        piece = max(share, min(LEAST_PIECE, longest))
        parts = min(max(longest / piece - 1, 0.0), MULTIPROCESSORS)
    shares = tuple(x / slots for x in units)
    return Division(shares, piece - share, parts, tile.rows / 32, rounds, load)


def _divide_few(way: str, shape: Shape, lengths: Lengths) -> Division:
    """Sequences whose queries fit into one tile."""
    tiles = shape.batch * shape.num_kv_heads
    if is_portable(way):
        return _divide(parse(way), shape, lengths)
    if way.startswith("numbered"):
        return _number(tiles, lengths)
    return _share(tiles, shape, lengths)


def _tiles_of_keys(keys: int, shape: Shape, lengths: Lengths) -> tuple[float, int]:
    """How many tiles of `keys` keys a sequence has: the mean and the largest number."""
    most = max(math.ceil(lengths.longest / keys), 1)
    if shape.batch == 1:
        return most, most
    if lengths.mean < 0.8 * lengths.longest:
        return max(lengths.mean / keys + 0.5, 1.0), most
    # lengths between 0.9 of the longest and all of it
    least = math.ceil(0.9 * lengths.longest / keys)
    return max((least + most) / 2, 1.0), most


def _divide(config: Config, shape: Shape, lengths: Lengths) -> Division:
    """The portable kernel: all tiles of keys are divided evenly among programs (`splits.py`)."""
    mean, most = _tiles_of_keys(config.BLOCK_N, shape, lengths)
    slots = config.resident * MULTIPROCESSORS
    programs = evenly(max(slots // shape.num_kv_heads, 1), max(min(shape.batch, shape.total_q), 1))
    total = shape.batch * mean
    piece = max(math.ceil(total / programs - 1e-9), -(-MIN_KEYS // config.BLOCK_N))
    is_alike = mean == round(mean)
    if is_alike and (piece % mean == 0 or mean % piece == 0):
        tiles = max(piece / mean, 1.0)
    else:
        # a program begins inside a tile; where lengths differ, it meets several short ones
        each = mean if lengths.mean >= 0.8 * lengths.longest else max(mean / 2, 1.0)
        tiles = min((piece - 1) / each + 1, shape.batch)
    parts = 0.0
    if is_alike and most % piece == 0:
        parts = max(most / piece - 1, 0.0)
    elif most > 1 and piece < total:
        parts = (most - 1) / piece
    # queries of sequences that are not alike fill all rows of a tile
    is_even = shape.total_q % shape.batch == 0
    rows: float = min(next_power_of_2(shape.rows), 64) if is_even else 16
    if config.is_merged_by_all and parts >= next_power_of_2(shape.columns) // SHARED_COLUMNS.value:
        rows /= SHARED_GAIN
    busy = math.ceil(total / piece) * shape.num_kv_heads
    return Division((min(piece, total),), 0.0, parts, rows / 8, tiles - 1, busy / slots)


def _number(tiles: int, lengths: Lengths) -> Division:
    """Hopper's kernel: with n programs, the one that has the most tiles computes as many as an n-th
    of all, with all of their keys; who has a long one has fewer, but it may begin at any time."""
    of_program = tiles / MULTIPROCESSORS
    longest, mean = (max(x / HOPPER_KEYS, 0.5) for x in (lengths.longest, lengths.mean))
    longest += max(of_program - 1, 0.0) / 2 * mean
    rounds = math.ceil(of_program)
    return Division((max(longest, rounds * mean),), 0.0, 0.0, 0.0, rounds)


def _share(tiles: int, shape: Shape, lengths: Lengths) -> Division:
    """Hopper's kernel: keys are cut, by a list of tiles or in equal shares, if that ends sooner."""
    longest, mean = (max(x / HOPPER_KEYS, 0.5) for x in (lengths.longest, lengths.mean))
    share = max(tiles * mean / MULTIPROCESSORS, min(LEAST_PIECE, longest))
    parts = min(max(longest / share - 1, 0.0), MULTIPROCESSORS)
    rows = min(shape.queries * shape.group_size, 64) / 32
    return Division((share,), 0.0, parts, rows, max(tiles / MULTIPROCESSORS, 1.0))
