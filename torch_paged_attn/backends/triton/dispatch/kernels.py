"""The ways to run a call with keys in pages on Hopper: the portable kernel or Hopper's, with which
schedule and which tiles. `cost_model.py` estimates how long each takes, and the shortest estimate
wins; no tensor is read.
"""

import math
from typing import NamedTuple

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.dispatch import cost_model as ways
from torch_paged_attn.backends.triton.dispatch import unpacked
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.forward import choices
from torch_paged_attn.backends.triton.hopper.forward.choices import Form
from torch_paged_attn.backends.triton.hopper.support import BLOCK_M, width_of
from torch_paged_attn.backends.triton.portable.forward import tiles as portable
from torch_paged_attn.backends.triton.portable.forward.splits import SplitPlan
from torch_paged_attn.backends.triton.runtime.launch_cache import kind_of
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.tuning import Config
from torch_paged_attn.lru import LRU

# rows of a tile of few queries up to which the portable kernel is one of the ways
MOST_PORTABLE = 16
# the same with scales by token: Hopper's kernel took 1.2 times as long for 20 rows, 1.5 for 32
MOST_APART = 32
# without the hint max_seqlen_k, the longest sequence is assumed to have as many keys as the
# geometric mean of this number and of the keys that the block table has room for
LEAST_UNSAID = 1024

# warps of tall tiles that run on a multiprocessor at the same time
MOST_WARPS = 16

# classes of sizes: numbers of sequences and of queries are rounded up to one of so many up to twice
# a power of two, which costs less than 0.1 % of kernel time; of so many classes the choice is kept
STEPS, MOST_CLASSES = 4, 4096

# schedules of Hopper's kernel: the first word of a way's name
SCHEDULES = {
    "numbered": Form(is_numbered=True),
    "listed": Form(),
    "cut": Form(is_cut=True),
    "dealt": Form(is_cut=True, is_dealt=True),
}


class Way(NamedTuple):
    """How to run a call: by Hopper's kernel in a form; by the portable one, with a config and
    splits of its own or those of its tables; or by both, if it is named UNPACKED.
    """

    name: str
    form: Form | None
    config: Config | None = None
    splits: SplitPlan | None = None


class Sizes(NamedTuple):
    """A class of sizes: all calls that differ in sizes within a class run in the same way."""

    batch: int
    total_q: int
    queries: int  # of the longest sequence if all of them fit into a tile of one consumer, else 0
    longest: int  # the number of keys of the longest sequence: the hint max_seqlen_k, or a guess
    bound: int  # how many keys the block table has room for

    @property
    def is_few(self) -> bool:
        return self.queries > 0

    @property
    def mean_length(self) -> int:
        return -(-self.total_q // self.batch)


def sizes_of(call: AttentionCall, longest: int, is_exact: bool = False) -> Sizes:
    """The class of a call's sizes; with `is_exact`, its sizes. `longest`: the hint max_seqlen_q."""
    # if there are no more queries than sequences, all are decodes, whatever the hint says
    queries = 1 if call.total_q <= call.batch else longest
    queries = queries if queries * call.group_size <= BLOCK_M else 0
    batch, total = call.batch, call.total_q
    if not is_exact:
        batch, total = _rounded(batch), _rounded(total)
    if queries and not is_exact:
        # as many queries of a sequence, and whether all have as many, are not rounded
        is_uneven = call.total_q % call.batch > 0
        total = support.mean_length(call) * batch - is_uneven
    return Sizes(batch, total, queries, _longest_keys(call), support.key_bound(call))


def _rounded(n: int) -> int:
    """Rounded up to one of so many numbers up to twice a power of two."""
    step = max(next_power_of_2(n) // (2 * STEPS), 1)
    return -(-n // step) * step


def _longest_keys(call: AttentionCall) -> int:
    bound = support.key_bound(call)
    if 0 < call.max_seqlen_k < bound or bound <= LEAST_UNSAID:
        return max(min(call.max_seqlen_k or bound, bound), 1)
    return math.isqrt(LEAST_UNSAID * bound)


def way_of(call: AttentionCall, longest: int, reason: str | None) -> Way | None:
    """The way to run a call; None if no costs are known of any.

    longest: the hint max_seqlen_q, or 0
    reason: why Hopper's kernel cannot run the call; None if it can
    """
    if not has_ways(call):
        return None
    if any(type(x) is not int for x in (call.batch, call.total_q, support.key_bound(call))):
        # a graph calls Hopper's kernel as an opaque node, which is planned when sizes are known
        is_low = 0 < longest * call.group_size <= MOST_PORTABLE
        return None if is_low or reason is not None else Way("", Form(is_cut=True, tiles="low"))
    sizes = sizes_of(call, longest)
    known, key = kind_of(call, _no_choices), (sizes, reason)
    if (found := known.get(key)) is None:
        shape = shape_of(call, sizes, reasons(call, sizes, reason))
        found = (named(ways.choose_way(shape)) if shape.tiles else None,)
        known.put(key, found)
    return found[0]


def _no_choices(call: AttentionCall) -> LRU:
    """Classes of sizes -> the ways that calls take which differ in sizes alone."""
    return LRU(MOST_CLASSES)


def ranking(call: AttentionCall, longest: int, reason: str | None) -> dict[str, float | str]:
    """All ways to run a call: estimates in microseconds, the shortest first, then why others cannot
    run it."""
    if not has_ways(call):
        return {}
    sizes = sizes_of(call, longest)
    why = reasons(call, sizes, reason)
    scores = ways.scores(shape_of(call, sizes, why))
    found = {x: round(math.exp(score), 1) for x, score in scores.items()}
    return dict(sorted(found.items(), key=lambda x: x[1])) | {x: y for x, y in why.items() if y}


def has_ways(call: AttentionCall) -> bool:
    """Whether a call is of a kind whose ways may have costs."""
    if support.unsupported_device(call.q.device) is not None or call.is_batch_invariant:
        return False
    is_paged = call.block_table is not None and call.layout is None
    return is_paged and call.q.itemsize <= 2 and call.batch > 0


def kind_of_ways(call: AttentionCall, sizes: Sizes) -> str:
    """The kind of a call's ways, as in `ways.ways`."""
    width = width_of(max(call.head_dim, call.head_dim_v))
    return f"{'few' if sizes.is_few else 'many'}/d{width}/b{call.k.itemsize}"


def reasons(call: AttentionCall, sizes: Sizes, reason: str | None) -> dict[str, str | None]:
    """For each way of a call's kind why it cannot run it, or None. `reason`: why no way of Hopper's
    kernel can."""
    rows, of_portable = sizes.mean_length * call.group_size, None
    # with the costs of 8 bits alone, scales by token would take 4 warps: a decode of 32 sequences
    # of 8192 keys 192 us instead of 140
    is_known = call.q.dtype in support.IN_16_BITS and call.q_latent is None
    has_apart = portable.has_numbers_apart(call)
    if has_apart or not is_known:
        of_portable = "its costs are not known"
    if sizes.is_few and of_portable and rows <= (MOST_APART if has_apart else MOST_PORTABLE):
        return {}  # the portable kernel's, by its tables
    if sizes.is_few and rows > MOST_PORTABLE:
        of_portable = f"a sequence has {rows} rows"
    on_hopper = kind_of(call, _tiles_on_hopper)
    found: dict[str, str | None] = {}
    for name in ways.ways().get(kind_of_ways(call, sizes), {}):
        if ways.is_portable(name):
            found[name] = of_portable
            continue
        tile = on_hopper[name]
        found[name] = reason or (tile if isinstance(tile, str) else None)
        if name == ways.UNPACKED:
            found[name] = found[name] or unpacked.unsupported(call)
    return found


def _tiles_on_hopper(call: AttentionCall) -> dict[str, ways.Tile | str]:
    """The tiles of each way of Hopper's kernel, or why a call with keys in pages cannot have
    them."""
    found: dict[str, ways.Tile | str] = {}
    names = {x for of in ways.ways().values() for x in of if not ways.is_portable(x)}
    for name in names - {ways.UNPACKED}:
        why = choices.unsupported_tiles(call, form := _form(name))
        if why is not None:
            found[name] = why
            continue
        config, heads = choices.choose_tiles(call, form)
        groups = 1 if config.SPLITS_KEYS else config.CONSUMERS
        tokens, rows = groups * (BLOCK_M // heads), groups * BLOCK_M
        found[name] = ways.Tile(tokens, rows, call.num_heads // heads, config.BLOCK_N)
    # over 16-bit keys, tiles are as large
    found[ways.UNPACKED] = found[f"listed {unpacked.OVER_COPIES.tiles}"]
    return found


def _portable_tiles(call: AttentionCall, sizes: Sizes) -> ways.Tile:
    traits = portable.traits_of(call, target_of(call.q.device))
    of_call = sizes.total_q, sizes.batch, sizes.bound
    tiles = portable.choose_tiles(traits, *of_call, splits=SplitPlan())
    # registers have room for so many warps
    resident = min(tiles.config.resident, max(MOST_WARPS // tiles.config.num_warps, 1))
    return ways.Tile(tiles.tokens, tiles.part_rows, tiles.grid[1], tiles.block_n, resident)


def shape_of(call: AttentionCall, sizes: Sizes, why: dict[str, str | None]) -> ways.Shape:
    """What an estimate goes by, for the ways that `why` has no reason against."""
    on_hopper, tiles = kind_of(call, _tiles_on_hopper), []
    for name in (x for x in why if why[x] is None):
        if sizes.is_few:
            tile = None
        else:
            tile = _portable_tiles(call, sizes) if ways.is_portable(name) else on_hopper[name]
        tiles.append((name, tile))
    return ways.Shape(
        kind=kind_of_ways(call, sizes),
        batch=sizes.batch,
        total_q=sizes.total_q,
        num_kv_heads=call.num_kv_heads,
        group_size=call.group_size,
        queries=sizes.queries,
        longest=sizes.longest,
        window=call.window_size_left if support.is_bound(call.window_size_left) else -1,
        key_bytes=(call.k.shape[-1] + call.v.shape[-1]) * call.k.itemsize,
        is_copied=call.page_size in support.GATHERED,
        columns=call.head_dim_v,
        tiles=tuple(tiles),
        is_apart=portable.has_numbers_apart(call),
    )


def named(name: str) -> Way:
    if name == ways.UNPACKED:
        return Way(name, None)
    if name == "portable whole":
        return Way(name, None, splits=SplitPlan())
    if name == "portable split":
        return Way(name, None)
    if ways.is_portable(name):
        return Way(name, None, ways.parse(name))
    return Way(name, _form(name))


def _form(name: str) -> Form:
    schedule, _, tiles = name.partition(" ")
    return SCHEDULES[schedule]._replace(tiles=tiles)
