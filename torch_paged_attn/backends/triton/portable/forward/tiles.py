"""The tiles of queries and keys, and the grid, that a call gets.

`choose_tiles` chooses from numbers only: from `Traits`, which are the same for all calls of a
model, and from sizes. Its results are cached.
"""

import dataclasses
import functools
import math
from typing import Any

import torch

from torch_paged_attn.attention_call import AttentionCall, is_by_column, is_by_token
from torch_paged_attn.backends.triton.common.arrivals import MOST_PARTS
from torch_paged_attn.backends.triton.common.dequant import holds_pairs
from torch_paged_attn.backends.triton.common.page_sizes import has_rows
from torch_paged_attn.backends.triton.common.seqlen_info import (
    UNBOUNDED,
    is_bound,
    num_tiles,
    programs_in_turns,
)
from torch_paged_attn.backends.triton.portable.common.formats import product_type
from torch_paged_attn.backends.triton.portable.forward.splits import (
    SplitPlan,
    plan_fixed_splits,
    plan_splits,
)
from torch_paged_attn.backends.triton.runtime.target import Target, next_power_of_2
from torch_paged_attn.backends.triton.tuning import Config, choose_config, choose_config_in_turns

# the largest second dimension of a grid
MOST_IN_GRID = 65535

# the most heads of a group that share a tile
MOST_PACKED = 64

# 8-bit numbers are decoded by pairs for tiles of at most so many rows
MOST_PAIRED_ROWS = 32

# the page size that tables of tiles call wide
WIDE_PAGE = 64

# up to so many warps are slow to merge parts of more than so many rows
MOST_FEW_WARPS, MOST_LOW_ROWS = 2, 16

# how many sequences a program reads at a time to find its work; a few values, since a kernel is
# compiled for each. Fewer sequences than 32 take as long with a value of their own
SEARCH_WIDTHS = (32, 256, 1024)

# batch-invariant calls choose their config as if they had tiles of so many rows, and so many tiles
INVARIANT_ROWS = 64
INVARIANT_TILES = 256


def has_numbers_apart(call: AttentionCall) -> bool:
    """Whether a kernel needs registers for scales by token, or for the halves of int4's bytes."""
    scales = call.k_descale, call.v_descale
    is_int4 = torch.uint8 in (call.k.dtype, call.v.dtype)
    return is_int4 or any(is_by_token(x, call.batch) for x in scales)


@dataclasses.dataclass(frozen=True)
class Traits:
    """The properties of a call, besides sizes, on which its tiles depend."""

    target: Target
    num_kv_heads: int
    group_size: int
    head_dim: int  # the larger of head_dim and head_dim_v; with q_latent, their sum
    itemsize: int  # bytes of an element in matrix products
    kv_itemsize: int
    page_size: int
    may_pair: bool  # whether 8-bit keys and values can be decoded by pairs
    is_plain: bool  # no bias, ALiBi, softcap, dropout, layout, int4 or scales by token
    has_columns: bool  # scales by column
    is_full: bool  # neither causal nor a window
    q_block: int  # 0 without a layout
    k_block: int
    has_head_layouts: bool  # each query head has a layout of its own
    is_invariant: bool  # batch_invariant


def traits_of(call: AttentionCall, target: Target) -> Traits:
    q, k, layout = call.q, call.k, call.layout
    may_pair = q.dtype != torch.float32 and not target.is_hip and holds_pairs(k)
    may_pair = may_pair and holds_pairs(call.v) and call.q_latent is None
    has_scores = call.softcap > 0.0 or call.attn_bias is not None or call.alibi_slopes is not None
    dims = call.head_dim, call.head_dim_v
    return Traits(
        target=target,
        num_kv_heads=call.num_kv_heads,
        group_size=call.group_size,
        head_dim=max(dims) if call.q_latent is None else sum(dims),
        itemsize=product_type(q.dtype, may_pair, target).primitive_bitwidth // 8,
        kv_itemsize=k.itemsize,
        page_size=WIDE_PAGE if has_rows(call) else call.page_size,
        may_pair=may_pair,
        is_plain=not (
            has_scores or call.dropout_p or layout is not None or has_numbers_apart(call)
        ),
        has_columns=is_by_column(call.v_descale, call.v),
        is_full=not (is_bound(call.window_size_left) or is_bound(call.window_right)),
        q_block=0 if layout is None else layout.q_block_size,
        k_block=0 if layout is None else layout.k_block_size,
        has_head_layouts=layout is not None and layout.crow_indices.shape[-2] == call.num_heads,
        is_invariant=call.is_batch_invariant,
    )


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The chosen tiles and grid. A tile has `tokens` queries times `pack` heads in the BLOCK_M rows
    of `config`, and `block_n` keys at a time.
    """

    config: Config
    pack: int
    tokens: int
    block_n: int
    # tile numbers that are reserved per sequence, see `seqlen_info.py`; 0: tiles are taken in turns
    gap: int
    is_paired: bool
    grid: tuple[int, ...]
    is_split: bool
    min_units: int  # the smallest piece in units, see `work_info.py`
    fixed_units: int  # if not 0, every piece has so many units
    search_width: int  # sequences that a program reads at a time to find its work
    is_one_look: bool  # whether that is the whole batch

    def of_kernel(self) -> tuple[Any, ...]:
        """Everything but the grid, as a key: a kernel does not depend on the grid."""
        return (
            self.config, self.pack, self.tokens, self.block_n, self.gap, self.is_paired,
            self.is_split, self.min_units, self.fixed_units, self.search_width, self.is_one_look,
            self.is_merged_by_all,
        )  # fmt: skip

    @property
    def part_rows(self) -> int:
        return next_power_of_2(self.tokens * self.pack)

    @property
    def is_merged_by_all(self) -> bool:
        """Whether programs that share a tile may wait for each other, to merge it together."""
        is_possible = self.fixed_units == 0 and self.num_programs <= MOST_PARTS
        return self.is_split and self.config.is_merged_by_all and is_possible

    @property
    def num_programs(self) -> int:
        return math.prod(self.grid)

    def part_elements(self, head_dim_v: int) -> int:
        """Size of the workspace for partial results, in float32 elements: two parts per program,
        whose rows have head_dim_v values and two more numbers.
        """
        return 2 * self.num_programs * self.part_rows * (head_dim_v + 2) if self.is_split else 0


@functools.lru_cache(maxsize=4096)
def choose_tiles(
    traits: Traits,
    total_q: int,
    batch: int,
    key_bound: int,
    config: Config | None = None,
    splits: SplitPlan | None = None,
    longest: int = 0,
) -> Tiles:
    """The tiles of a call of these sizes.

    key_bound: see the function of this name
    config, splits: instead of those that tables and rules give
    longest: if not 0, max_seqlen_q: the programs of a sequence take its tiles in turns
    """
    target, has_layout = traits.target, traits.k_block > 0
    # query heads that visit different blocks cannot share a tile
    pack = 1 if traits.has_head_layouts else min(traits.group_size, MOST_PACKED)
    mean = -(-total_q // max(batch, 1))
    if config is None and longest:
        config = choose_config_in_turns(traits.head_dim)
    elif config is None:
        rows = mean * pack
        tiles = min(batch, total_q) * traits.num_kv_heads * -(-traits.group_size // pack)
        page_size, is_full, most_keys = traits.page_size, traits.is_full, key_bound
        if traits.is_invariant:
            # the same config for packed prompts and paged decodes, whatever the batch
            rows, tiles, page_size, is_full = INVARIANT_ROWS, INVARIANT_TILES, 0, False
            most_keys = UNBOUNDED
        config = choose_config(
            target.arch,
            max(rows, pack),
            traits.head_dim,
            traits.itemsize,
            traits.kv_itemsize,
            page_size,
            tiles,
            most_keys,
            traits.is_plain,
            is_full,
            traits.has_columns,
        )
    # a tile may have fewer rows than the group has heads
    pack = min(pack, config.BLOCK_M)
    tokens, block_n = config.BLOCK_M // pack, config.BLOCK_N
    is_even = total_q % max(batch, 1) == 0 and not traits.is_invariant
    if not has_layout and is_even and not longest:
        # probably all sequences have this number of queries; more rows would only make merging slow
        tokens = min(tokens, next_power_of_2(total_q // max(batch, 1)))
    if has_layout:
        tokens = min(1 << (tokens.bit_length() - 1), traits.q_block)
        block_n = min(block_n, traits.k_block)
    gap = 2 if has_layout else 1
    grid_tiles = num_tiles(total_q, batch, tokens, gap)
    grid_heads = traits.num_kv_heads * -(-traits.group_size // pack)

    if splits is None and traits.is_invariant:
        splits = plan_fixed_splits(grid_tiles, key_bound)
    elif splits is None:
        busy = max(min(batch, total_q), total_q // tokens)
        slots = config.resident * target.multiprocessors
        rows = next_power_of_2(tokens * pack)
        is_decode = config.BLOCK_M <= 64
        is_slow = config.num_warps <= MOST_FEW_WARPS or not is_decode
        tall = rows if is_slow and rows > MOST_LOW_ROWS else 0
        splits = plan_splits(grid_tiles, grid_heads, busy, key_bound, slots, is_decode, tall)
    # units are counted in 32 bits on the device
    is_split = splits.is_split and grid_tiles * -(-key_bound // block_n) < 2**31
    grid: tuple[int, ...] = (grid_tiles, grid_heads)
    if longest:
        gap, is_split = 0, False
        grid = (grid_heads, programs_in_turns(total_q, batch, longest, tokens), batch + 1)
    if is_split:
        height = -(-splits.programs // MOST_IN_GRID)
        grid = (grid_heads, -(-splits.programs // height), height)
    looked_at = batch if is_split else 0
    search_width = next((w for w in SEARCH_WIDTHS if looked_at <= w), SEARCH_WIDTHS[-1])
    return Tiles(
        config=config,
        pack=pack,
        tokens=tokens,
        block_n=block_n,
        gap=gap,
        is_paired=traits.may_pair and config.BLOCK_M <= MOST_PAIRED_ROWS,
        grid=grid,
        is_split=is_split,
        min_units=-(-splits.min_keys // block_n),
        fixed_units=splits.fixed_keys // block_n,
        search_width=search_width,
        is_one_look=looked_at <= search_width,
    )
