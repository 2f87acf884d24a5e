"""The ways to run a call with keys in pages on Hopper: the portable kernel or Hopper's, with which
schedule and which tiles. `ways.py` estimates how long each takes, and the shortest estimate wins;
no tensor is read.
"""

import math
from typing import NamedTuple

import torch

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import ways
from torch_paged_attn.backends.triton.hopper import choices, support
from torch_paged_attn.backends.triton.hopper.choices import Form
from torch_paged_attn.backends.triton.hopper.support import BLOCK_M, width_of
from torch_paged_attn.backends.triton.portable import tiles as portable
from torch_paged_attn.backends.triton.portable.splits import SplitPlan
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.tuning import Config

# rows of a tile of few queries up to which the portable kernel is one of the ways
MOST_PORTABLE = 16
# without the hint max_seqlen_k, the longest sequence is assumed to have as many keys as the
# geometric mean of this number and of the keys that the block table has room for
LEAST_UNSAID = 1024

# warps of tall tiles that run on a multiprocessor at the same time
MOST_WARPS = 16

# schedules of Hopper's kernel: the first word of a way's name
SCHEDULES = {
    "numbered": Form(is_numbered=True),
    "listed": Form(),
    "cut": Form(is_cut=True),
    "dealt": Form(is_cut=True, is_dealt=True),
}


class Way(NamedTuple):
    """How to run a call: by Hopper's kernel in a form, or by the portable one, with a config and
    splits of its own or those of its tables.
    """

    name: str
    form: Form | None
    config: Config | None = None
    splits: SplitPlan | None = None


def way_of(call: AttentionCall, longest: int, reason: str | None) -> Way | None:
    """The way to run a call; None if no costs are known of any.

    longest: the hint max_seqlen_q, or 0
    reason: why Hopper's kernel cannot run the call; None if it can
    """
    queries = _queries(call, longest)
    if (kind := _kind(call, queries)) is None:
        return None
    if any(type(x) is not int for x in (call.batch, call.total_q, support.key_bound(call))):
        # a graph calls Hopper's kernel as an opaque node, which is planned when sizes are known
        is_low = 0 < queries * call.group_size <= MOST_PORTABLE
        return None if is_low or reason is not None else Way("", Form(is_cut=True, tiles="low"))
    allowed = tuple(x for x, why in reasons(call, kind, queries, reason).items() if not why)
    return named(ways.choose_way(kind, shape_of(call, queries, allowed))) if allowed else None


def ranking(call: AttentionCall, longest: int, reason: str | None) -> dict[str, float | str]:
    """All ways to run a call: estimates in microseconds, the shortest first, then why others cannot
    run it."""
    queries = _queries(call, longest)
    if (kind := _kind(call, queries)) is None:
        return {}
    why = reasons(call, kind, queries, reason)
    shape, costs = shape_of(call, queries, tuple(x for x in why if not why[x])), ways.ways()[kind]
    found = {x: round(math.exp(ways.score(x, costs[x], shape)), 1) for x, _ in shape.tiles}
    return dict(sorted(found.items(), key=lambda x: x[1])) | {x: y for x, y in why.items() if y}


def _queries(call: AttentionCall, longest: int) -> int:
    """The most queries of a sequence if all of them fit into a tile of one consumer, else 0."""
    # if there are no more queries than sequences, all are decodes, whatever the hint says
    queries = 1 if call.total_q <= call.batch else longest
    return queries if queries * call.group_size <= BLOCK_M else 0


def _kind(call: AttentionCall, queries: int) -> str | None:
    """The kind of a call's ways, as in `ways.ways`; None if there are none."""
    if support.unsupported_device(call.q.device) is not None or call.is_batch_invariant:
        return None
    if call.block_table is None or call.layout is not None or call.q.itemsize > 2:
        return None
    # few queries are the portable kernel's where costs are not known of its operands; with scales by
    # token, drafts of 5 and 8 tokens took Hopper's kernel 1.2 and 1.5 times as long
    is_low = _rows(call) <= MOST_PORTABLE or portable.has_numbers_apart(call)
    if queries and is_low and not _has_portable_costs(call):
        return None
    width = width_of(max(call.head_dim, call.head_dim_v))
    kind = f"{'few' if queries else 'many'}/d{width}/b{call.k.itemsize}"
    return kind if kind in ways.ways() and call.batch > 0 else None


def _rows(call: AttentionCall) -> int:
    """Rows of a tile that holds all queries of a sequence, and heads that share keys."""
    return support.mean_length(call) * call.group_size


def _has_portable_costs(call: AttentionCall) -> bool:
    if portable.has_numbers_apart(call):
        # with the costs of 8 bits alone, a decode of 32 sequences of 8192 keys would take 4 warps,
        # and 192 us instead of 140
        return False
    return call.q.dtype in support.IN_16_BITS and call.q_latent is None


def reasons(
    call: AttentionCall, kind: str, queries: int, reason: str | None
) -> dict[str, str | None]:
    """For each way of a kind why it cannot run a call, or None."""
    of_portable = None if _has_portable_costs(call) else "its costs are not known"
    if queries and (rows := _rows(call)) > MOST_PORTABLE:
        of_portable = f"a sequence has {rows} rows"
    found: dict[str, str | None] = {}
    for name in ways.ways()[kind]:
        found[name] = of_portable if ways.is_portable(name) else reason
        if not ways.is_portable(name) and reason is None:
            found[name] = choices.unsupported_tiles(call, tiles_of(name))
            if name.startswith("cut") and call.result_dtype == torch.float32:
                found[name] = "parts are merged on the way to a result of 16 bits"
    return found


def tiles_of(name: str) -> str:
    """The name of a way's tiles on Hopper, as in `choices.choose_tiles`."""
    return name.partition(" ")[2] or "low"


def shape_of(call: AttentionCall, queries: int, allowed: tuple[str, ...]) -> ways.Shape:
    """What an estimate goes by, for the ways that are allowed."""
    return ways.Shape(
        batch=call.batch,
        total_q=call.total_q,
        num_kv_heads=call.num_kv_heads,
        group_size=call.group_size,
        queries=queries,
        longest=_longest_keys(call),
        window=call.window_size_left if support.is_bound(call.window_size_left) else -1,
        key_bytes=(call.k.shape[-1] + call.v.shape[-1]) * call.k.itemsize,
        is_copied=call.page_size in support.GATHERED,
        columns=call.head_dim_v,
        tiles=tuple((x, None if queries else _tile(call, x)) for x in allowed),
    )


def _tile(call: AttentionCall, name: str) -> ways.Tile:
    """The tiles of a way."""
    if ways.is_portable(name):
        sizes = call.total_q, call.batch, portable.key_bound(call)
        traits = portable.traits_of(call, target_of(call.q.device))
        tiles = portable.choose_tiles(traits, *sizes, splits=SplitPlan())
        # registers have room for so many warps
        resident = min(tiles.config.resident, max(MOST_WARPS // tiles.config.num_warps, 1))
        return ways.Tile(tiles.tokens, tiles.part_rows, tiles.grid[1], tiles.block_n, resident)
    config, heads = choices.choose_tiles(call, Form(tiles=tiles_of(name)))
    groups = 1 if config.SPLITS_KEYS else config.CONSUMERS
    tokens, rows = groups * (BLOCK_M // heads), groups * BLOCK_M
    return ways.Tile(tokens, rows, call.num_heads // heads, config.BLOCK_N)


def _longest_keys(call: AttentionCall) -> int:
    """The number of keys of the longest sequence: the hint max_seqlen_k if given, else a guess."""
    bound = support.key_bound(call)
    if 0 < call.max_seqlen_k < bound or bound <= LEAST_UNSAID:
        return max(min(call.max_seqlen_k or bound, bound), 1)
    return math.isqrt(LEAST_UNSAID * bound)


def named(name: str) -> Way:
    """The way of a name."""
    if name == "portable whole":
        return Way(name, None, splits=SplitPlan())
    if name == "portable split":
        return Way(name, None)
    if ways.is_portable(name):
        return Way(name, None, ways.parse(name))
    schedule = SCHEDULES[name.partition(" ")[0]]
    return Way(name, schedule._replace(tiles=tiles_of(name)))
