"""Sequences of few queries in pages on Hopper, decodes and guessed tokens: which kernel runs them,
and with which tiles. `ways.py` estimates how long each way takes; no tensor is read.
"""

import math
from typing import NamedTuple

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import ways
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.choices import Form
from torch_paged_attn.backends.triton.hopper.support import BLOCK_M, width_of
from torch_paged_attn.backends.triton.portable.tiles import has_numbers_apart
from torch_paged_attn.backends.triton.tuning import Config

# rows of a tile of queries up to which the portable kernel is one of the ways
MOST_PORTABLE = 16
# without the hint max_seqlen_k, the longest sequence is assumed to have as many keys as the
# geometric mean of this number and of the keys that the block table has room for
LEAST_UNSAID = 1024


class Way(NamedTuple):
    """How to run a call: by Hopper's kernel in a form, or by the portable one with a config."""

    form: Form | None
    config: Config | None


def way_of(call: AttentionCall, longest: int, hopper_runs: bool) -> Way | None:
    """The way to run a call of few queries. None for other calls, and if the table of tiles has to
    be used: because sizes are symbols of a traced graph, or because no costs are known.

    longest: the hint max_seqlen_q, or 0
    hopper_runs: whether Hopper's kernel can run the call
    """
    if support.unsupported_device(call.q.device) is not None or call.is_batch_invariant:
        return None
    # if there are no more queries than sequences, all are decodes, whatever the hint says
    queries = 1 if call.total_q <= call.batch else longest
    if call.block_table is None or call.layout is not None or queries <= 0 or call.batch == 0:
        return None
    if queries * call.group_size > BLOCK_M or call.q.itemsize > 2:
        return None
    is_low = queries * call.group_size <= MOST_PORTABLE
    if has_numbers_apart(call) and (is_low or not hopper_runs):
        # the portable kernel's costs are not known; with those of 8 bits alone, a decode of 32
        # sequences of 8192 keys would take 4 warps, and 192 us instead of 140
        return None
    kind = f"d{width_of(max(call.head_dim, call.head_dim_v))}/b{call.k.itemsize}"
    if kind not in ways.ways():
        return None
    sizes = call.batch, call.total_q, support.key_bound(call), call.max_seqlen_k
    if any(type(x) is not int for x in sizes):
        # a graph calls Hopper's kernel as an opaque node, which is planned when sizes are known
        return None if is_low or not hopper_runs else Way(Form(is_guessed=True), None)
    shape = ways.Shape(
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
    )
    # for other operands the portable kernel could be a way, but its costs are not known
    has_costs = call.q.dtype in support.IN_16_BITS and call.q_latent is None
    if shape.rows <= MOST_PORTABLE and not has_costs:
        return None
    allowed = _allowed(call, kind, shape, hopper_runs)
    return _way(ways.choose_way(kind, shape, allowed)) if allowed else None


def _allowed(
    call: AttentionCall, kind: str, shape: ways.Shape, hopper_runs: bool
) -> frozenset[str]:
    """The ways that can run a call."""
    found = set(ways.ways()[kind])
    if shape.rows > MOST_PORTABLE:
        found = {x for x in found if not ways.is_portable(x)}
    if not hopper_runs:
        found = {x for x in found if ways.is_portable(x)}
    if not support.may_divide(call):
        found = {x for x in found if not x.endswith("divided")}
    return frozenset(found)


def _longest_keys(call: AttentionCall) -> int:
    """The number of keys of the longest sequence: the hint max_seqlen_k if given, else a guess."""
    bound = support.key_bound(call)
    if 0 < call.max_seqlen_k < bound or bound <= LEAST_UNSAID:
        return max(min(call.max_seqlen_k or bound, bound), 1)
    return math.isqrt(LEAST_UNSAID * bound)


def _way(name: str) -> Way:
    if ways.is_portable(name):
        return Way(None, ways.parse(name))
    form, _, tiles = name.partition(" ")
    return Way(
        Form(
            is_guessed=True,
            is_dealt=form == "dealt",
            is_numbered=form == "numbered",
            is_divided=tiles == "divided",
            is_tall=tiles == "tall",
        ),
        None,
    )
