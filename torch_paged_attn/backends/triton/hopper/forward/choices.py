"""Which form a launch of Hopper's kernel takes, which tiles it has, and how many heads share one.

All of it follows from a call's description, its sizes, and what the caller says of the longest
sequence; no tensor is read. Of calls with keys in pages, `kernels.py` chooses the form.
"""

from typing import NamedTuple

import torch

from torch_paged_attn.attention_call import AttentionCall, is_by_token
from torch_paged_attn.backends.triton.hopper.support import (
    BLOCK_M,
    SMALL,
    converts,
    gathers,
    is_float8,
    mean_length,
    sharing_heads,
    width_of,
)
from torch_paged_attn.backends.triton.runtime.launcher import HAS_KNOWN_MAPS
from torch_paged_attn.backends.triton.runtime.target import is_even
from torch_paged_attn.backends.triton.tuning import FORWARD, HopperConfig

# of the rows of tiles of one head, the share that may be empty
MOST_EMPTY = 0.05
# mean queries of causal sequences from which three consumers are worth their larger tiles
LEAST_OF_THREE = 4096


class Form(NamedTuple):
    """How the work of a launch is divided. Without an option, tiles are listed, the longest first,
    and cut into pieces where they are few; whole if they are named.
    """

    longest: int = 0  # no sequence has more queries: their tiles are taken in turns, without a list
    # tiles are found by their numbers, without a list, and not cut; where bits depend on a sequence
    # alone, tiles of few queries are cut in a number of stretches that the host says
    is_numbered: bool = False
    is_cut: bool = False  # tiles of any number are cut into pieces that end at the same time
    is_dealt: bool = False  # of these, keys are dealt out in equal shares, without a list
    tiles: str = ""  # a name in `tuning/hopper.py`; if empty, by the call


FORM = Form()


def pack_heads(call: AttentionCall) -> int:
    """How many heads share a tile: all of a group, or one where tiles of one head are as good as
    full of queries, or hold a row of a layout's blocks."""
    length, layout = mean_length(call), call.layout
    most = even_heads(call)
    if layout is not None:
        length, pack = min(length, layout.q_block_size), 1
        while pack < most and pack * length < 2 * BLOCK_M:
            pack *= 2
        return pack
    # lengths of chunks of prompts differ
    is_alike = call.total_q == length * call.batch and (call.batch == 1 or call.block_table is None)
    empty = -length % (2 * BLOCK_M) if is_alike else BLOCK_M
    full = length / (length + empty) * (1 + MOST_EMPTY)
    for pack in (whole_group(call), most):
        # rows that are some token's
        if full < BLOCK_M // pack * pack / BLOCK_M:
            return pack
    return 1


def even_heads(call: AttentionCall) -> int:
    """The most heads of a group that fill as many rows of a tile: a power of two."""
    sharing = sharing_heads(call)
    return min(sharing & -sharing, BLOCK_M)


def whole_group(call: AttentionCall) -> int:
    """All heads of a group, where they may share a tile, whatever their number."""
    group = sharing_heads(call)
    if call.layout is not None or group > BLOCK_M or not (is_even(group) or HAS_KNOWN_MAPS):
        return even_heads(call)
    return group


def _heads_in_turns(call: AttentionCall) -> int:
    """The same where sequences are short: what makes fewer tiles, of which fewer rows are past the
    end of a sequence."""
    length = mean_length(call)

    def tiles(heads: int) -> int:
        return -(-length // (2 * (BLOCK_M // heads))) * (call.group_size // heads)

    return min(even_heads(call), whole_group(call), key=tiles)


def choose_tiles(call: AttentionCall, form: Form = FORM) -> tuple[HopperConfig, int]:
    """Tiles, and how many heads share one."""
    if call.is_batch_invariant:
        return _choose_invariant_tiles(call, form)
    width, is_causal = width_of(call.head_dim), call.window_right == 0
    has_layout = call.layout is not None
    name, heads = form.tiles, whole_group(call)
    is_narrow = is_causal and call.window_size_left in SMALL and not has_layout and width <= 128
    if form.longest:
        name, heads = "turns", _heads_in_turns(call)
        rows = mean_length(call) * heads
        if width == 64 and -(-rows // 192) * 192 < -(-rows // 128) * 128:
            name = "three"  # fewer rows are unused
    elif is_narrow and not name:
        name = "small"
    elif not name:
        # a third consumer's tiles extend further past the diagonal, and fit no layout
        is_three = width == 64 and (not is_causal or mean_length(call) >= LEAST_OF_THREE)
        name = "layout" if has_layout else "three" if is_three else "tall"
        heads = pack_heads(call)
    if converts(call) and name != form.tiles:
        name = "tall"
    return FORWARD[_for_operands(call, name)][width], heads


def _for_operands(call: AttentionCall, name: str) -> str:
    """The tiles of this name for the types of a call's keys, and the way that they are loaded."""
    if converts(call):
        of_float8 = f"{name}, float8"
        return of_float8 if is_float8(call) and of_float8 in FORWARD else f"{name}, 8 bits"
    return f"{name}, copied" if gathers(call) and f"{name}, copied" in FORWARD else name


def unsupported_tiles(call: AttentionCall, form: Form) -> str | None:
    """Why a call with keys in pages cannot have a form's tiles; None if it can."""
    name, width = form.tiles, width_of(call.head_dim)
    if width not in FORWARD.get(_for_operands(call, name), {}):
        return f"there are none for heads of {width} of these types"
    if name == "divided" and is_by_token(call.k_descale, call.batch):
        return "consumers that share rows apply no scales by token"
    if name == "low small" and call.window_size_left not in SMALL:
        return "no window hides keys"
    if name == "small" and gathers(call):
        return "rows of keys are copied into tiles of its own"
    if form.is_cut and call.result_dtype == torch.float32:
        return "parts are merged on the way to a result of 16 bits"
    return None


def _choose_invariant_tiles(call: AttentionCall, form: Form) -> tuple[HopperConfig, int]:
    """The same where bits depend on a sequence alone: as many keys at a time for all queries of all
    its calls, and products as high. How many consumers there are, and heads, is free."""
    width = width_of(call.head_dim)
    is_narrow = call.window_size_left in SMALL and width <= 128
    if form.tiles:
        return FORWARD["low small" if is_narrow else "low"][width], whole_group(call)
    if is_narrow:
        return FORWARD["small"][width], even_heads(call)
    is_full = call.window_right != 0
    name = "three" if width == 64 and (is_full or mean_length(call) >= LEAST_OF_THREE) else "tall"
    return FORWARD["invariant, copied" if gathers(call) else name][width], pack_heads(call)
