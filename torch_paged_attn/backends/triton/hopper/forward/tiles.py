"""What Hopper's kernels are compiled for, and the sizes of a launch: all that follows from a call's
description and sizes. No tensor is read.

- `options_of` and `scalars_of` need the description of a call: its dtypes, strides, head dims and
  options, its `Form` and the tiles that were chosen (`choices.py`).
- `sizes_of` and `grid_of` need total_q, batch, num_pages, the block table's stride and, with a
  layout, how many rows it has.
- `Boxes` make a tensor map of an address: it depends on that and on the description, not on sizes.
"""

import functools
import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, is_by_token, is_int4
from torch_paged_attn.backends.triton.common.page_sizes import (
    compiled_size,
    has_rows,
    size_at_run_time,
)
from torch_paged_attn.backends.triton.common.seqlen_info import programs_in_turns
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.forward.arguments import Options, Scalars, Sizes
from torch_paged_attn.backends.triton.hopper.forward.choices import FORM, Form, whole_group
from torch_paged_attn.backends.triton.hopper.forward.shared_memory import fit_stages
from torch_paged_attn.backends.triton.hopper.schedule import tile_scheduler
from torch_paged_attn.backends.triton.hopper.schedule.block_lists import shape_of_lists
from torch_paged_attn.backends.triton.hopper.schedule.piece_plan import Chip
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.tuning import HopperConfig
from torch_paged_attn.ops.lacking import lacking

if TYPE_CHECKING:
    from torch_paged_attn.backends.triton.hopper.common.tma import Boxes

# by width of a head, in tiles of keys: the time that leaving a piece of a tile takes, and by which
# it ends later, and what part of the longest piece the last programs work on while others have
# nothing to do; of few queries and of keys that are converted, and of other chunks
PIECE_COSTS = {64: (1.0, 1.0, 0.3), 128: (1.0, 1.0, 0.3), 256: (2.0, 2.0, 0.3)}
PIECE_COSTS_OF_CHUNKS = {64: (1.0, 2.0, 0.3), 128: (4.0, 6.0, 0.7), 256: (4.0, 4.0, 0.5)}
# the same, of merging a piece
MERGE_COST = {64: 0.75, 128: 0.75, 256: 2.25}
# of that, where parts are added up by several
SHARED_COST = 0.15
# of chunks of prompts, parts are added up by several where the chip has at least so many
# multiprocessors for each tile
SHARING_TILES = 4

# keys of the shortest stretches, whose sums are added up one after the other where bits depend on a
# sequence alone
STRETCH = 2048


# of decodes without a list: stretches to a program
ROUNDS = 12

# one consumer leaves parts of half the rows, of which few are there: with fixed stretches, which
# are many, there may be more
MORE_PARTS = 3


# keys that are dealt out to a program at least
LEAST_OF_PROGRAM = 128


def _pages_in_atoms(call: AttentionCall) -> bool:
    """Whether pages are so small that their boxes are better loaded whole: see `atoms_of_rows`."""
    is_small = support.LEAST_BOX <= compiled_size(call) < 32 and call.layout is None
    is_small = is_small and not support.converts(call)
    return is_small and all(
        x.shape[-1] % 64 == 0 and x.stride(0) // x.stride(2) % 8 == 0 for x in (call.k, call.v)
    )


def parts_of(call: AttentionCall, config: HopperConfig, form: Form) -> int:
    """How many pieces of tiles there may be, unless keys are dealt out: no more than `room_of` has
    room for."""
    # pieces are merged on the way to a result of 16 bits
    if call.result_dtype == torch.float32:
        return 0
    if form.is_numbered and call.is_batch_invariant:
        return _most_units(call)
    if form.longest or form.is_numbered or (form.tiles and not form.is_cut):
        return 0
    parts = support.most_parts(call, form.is_cut)
    return parts * MORE_PARTS if call.is_batch_invariant and config.CONSUMERS == 1 else parts


def room_of(call: AttentionCall, config: HopperConfig, form: Form) -> int:
    """For how many pieces of tiles a kernel has room: the same for few tiles as for many, since a
    kernel is compiled for the number."""
    parts = parts_of(call, config, form)
    if parts == 0 or (form.is_numbered and call.is_batch_invariant):
        return parts
    room = support.most_room(call)
    return room * MORE_PARTS if call.is_batch_invariant and config.CONSUMERS == 1 else room


def _most_units(call: AttentionCall) -> int:
    """Stretches of keys that numbered tiles may have, of all heads."""
    return ROUNDS * target_of(call.q.device).multiprocessors


def most_stretches(call: AttentionCall) -> int:
    """In how many stretches the keys of a sequence of few queries may be, by shapes and hints."""
    reach = min(support.reach_of(call), support.key_bound(call))
    unit = max(reach - 1, 0) // STRETCH
    doublings = max(unit.bit_length() - 4, 0)
    # a window may begin anywhere in a stretch
    more = 2 if support.is_bound(call.window_size_left) else 1
    return 8 * doublings + (unit >> doublings) + more


def are_few_stretches(call: AttentionCall) -> bool:
    """Whether a batch of decodes, whose bits depend on a sequence alone, needs no list of tiles:
    the stretches of its keys are so few that a program finds out quickly which of them exist."""
    if call.block_table is None or call.layout is not None or has_rows(call):
        return False
    if lacking(call, support.OF_LISTS) is not None or call.result_dtype == torch.float32:
        return False
    packed = whole_group(call)
    tiles = call.total_q // (support.BLOCK_M // packed) + call.batch + 1
    return tiles * (call.num_heads // packed) * most_stretches(call) <= _most_units(call)


def shares_parts(call: AttentionCall, parts: int, form: Form) -> bool:
    """Whether pieces of a tile are added up by all who left them, each some rows, and not by the
    last one to arrive (`shared_pieces.py`). Not for chunks whose tiles are many: these are in few
    pieces, and the code that shares costs the loop over keys some instructions."""
    if parts == 0:
        return False
    if call.is_batch_invariant:
        return form.is_cut
    if form.is_cut or support.width_of(call.head_dim_v) == 256:
        return True
    tiles = call.total_q * call.num_heads // (2 * support.BLOCK_M)
    return SHARING_TILES * tiles <= target_of(call.q.device).multiprocessors


def options_of(
    call: AttentionCall,
    config: HopperConfig,
    packed_heads: int,
    form: Form = FORM,
) -> Options:
    """What the kernel is compiled for; no address is part of it, and of the sizes what follows from
    them for `room_of`."""
    layout = call.layout
    is_float32 = call.result_dtype == torch.float32
    parts = room_of(call, config, form)
    is_dealt = form.is_dealt and parts > 0 and lacking(call, support.OF_LISTS) is None
    if is_dealt:
        # of each program
        parts = 2 * target_of(call.q.device).multiprocessors
    row_groups = 1 if config.SPLITS_KEYS else config.CONSUMERS
    tokens = support.BLOCK_M // packed_heads
    queries_per_list, keys_per_entry = 0, config.BLOCK_N
    if layout is not None:
        queries_per_list, keys_per_entry = shape_of_lists(
            layout.q_block_size, layout.k_block_size, config.CONSUMERS * tokens, config.BLOCK_N
        )
    is_whole = _pages_in_atoms(call) or support.is_float8(call)
    boxes = config.BLOCK_N // _rows_of_box(call, keys_per_entry)
    options = Options(
        BLOCK_M=support.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        WIDTH=support.width_of(call.head_dim),
        WIDTH_V=support.width_of(call.head_dim_v),
        COLUMNS=support.width_of(call.head_dim) if is_whole else support.columns_of(call.head_dim),
        PACKED_HEADS=packed_heads,
        TOKENS=tokens,
        GROUP_SIZE=call.group_size,
        PAGE_SIZE=compiled_size(call) if size_at_run_time(call) is None else -1,
        IS_ROWS=has_rows(call),
        IS_CAUSAL=call.window_right == 0,
        HAS_LEFT=support.is_bound(call.window_size_left),
        HAS_RIGHT=support.is_bound(call.window_right),
        HAS_SOFTCAP=call.softcap > 0.0,
        HAS_LAYOUT=layout is not None,
        Q_BLOCK_SIZE=layout.q_block_size if layout else 0,
        KEYS_PER_ENTRY=keys_per_entry,
        QUERIES_PER_LIST=queries_per_list,
        HEADS_PER_LAYOUT=support.heads_per_layout(call),
        KV_STEP=config.BLOCK_N // keys_per_entry if layout else config.BLOCK_N,
        # many boxes to a tile are loaded by two producers
        KV_PARTS=2 if call.page_size > 0 and boxes >= 4 else 1,
        CONSUMERS=config.CONSUMERS,
        ROW_GROUPS=row_groups,
        KV_STAGES=config.KV_STAGES,
        Q_STAGES=config.Q_STAGES,
        REGISTERS=config.REGISTERS,
        PINGPONG=config.PINGPONG,
        MOST_PARTS=parts,
        COUNTERS=row_groups * parts,
        IS_LISTED=not (form.longest or is_dealt or form.is_numbered),
        IS_DEALT=is_dealt,
        IS_NUMBERED=form.is_numbered,
        LEAST_SHARE=max(LEAST_OF_PROGRAM // config.BLOCK_N, 1) if is_dealt else 0,
        GATHERS=support.gathers(call),
        CONVERTS_K=support.converts(call) and not support.is_float8(call),
        CONVERTS_V=support.converts(call),
        FLOAT32_COLUMNS=call.head_dim_v if is_float32 else 0,
        MERGED_COLUMNS=call.head_dim_v if shares_parts(call, parts, form) else 0,
        BY_TOKEN=is_by_token(call.k_descale, call.batch),
        STRETCH=STRETCH if call.is_batch_invariant else 0,
    )
    return fit_stages(options, call.q.itemsize, support.bytes_of_number(call))


def _rows_of_box(call: AttentionCall, keys_per_entry: int) -> int:
    """Rows of keys that the accelerator loads at once: of one page and of one entry of a list. What
    is less is copied."""
    page_size = 0 if has_rows(call) else call.page_size
    return max(math.gcd(page_size or keys_per_entry, keys_per_entry), support.LEAST_BOX)


def scalars_of(call: AttentionCall) -> Scalars:
    """Numbers that follow from the description and the tiles, which no kernel is compiled for."""
    k, v, layout = call.k, call.v, call.layout
    has_pages, strides = call.page_size > 0 and not has_rows(call), {}
    if support.gathers(call):
        of_k, of_v = (("stride_k", k), ("stride_v", v))
        strides = {name: x.stride(2) for name, x in (of_k, of_v)}
        strides |= {f"{name}_head": x.stride(1) for name, x in (of_k, of_v)}
    batched = layout is not None and layout.crow_indices.dim() == 3 and len(layout.crow_indices) > 1
    of_scores: dict[str, Any] = support.scalars_of_scores(call)
    return Scalars(
        num_heads=call.num_heads,
        stride_layout_batch=layout.crow_indices.shape[-2] if layout and batched else 0,
        k_page_rows=k.stride(0) // k.stride(2) if has_pages else 0,
        v_page_rows=v.stride(0) // v.stride(2) if has_pages else 0,
        page_size=size_at_run_time(call),
        **of_scores,
        **strides,
        **_strides_of_descales(call),
    )


def _strides_of_descales(call: AttentionCall) -> dict[str, int]:
    strides: dict[str, int] = {}
    for name in support.DESCALES:
        given = getattr(call, name)
        of_batch, of_head = (0, 0) if given is None else (0, 0, *given.stride())[-2:]
        if name != "q_descale" and is_by_token(given, call.batch):
            # (pages, heads, slots), or (tokens, heads)
            of_batch, of_head, of_slot = (
                given.stride() if given.dim() == 3 else (0, of_head, of_batch)
            )
            strides[f"{name}_slot"] = of_slot
        strides |= {f"{name}_batch": of_batch, f"{name}_head": of_head}
    return strides


def sizes_of(
    call: AttentionCall, options: Options, lists_per_head: int, packed_heads: int
) -> Sizes:
    heads_per_unit = (
        call.num_heads if support.is_sorted(call) else call.group_size
    ) // packed_heads
    if options.IS_NUMBERED and options.MOST_PARTS > 0:
        heads_per_unit = most_stretches(call)
    page_rows = [x.stride(0) // x.stride(2) if has_rows(call) else None for x in (call.k, call.v)]
    return Sizes(
        num_pages=call.k.shape[0],
        batch=call.batch,
        total_q=call.total_q,
        lists_per_head=lists_per_head,
        stride_table=0 if call.block_table is None else call.block_table.stride(0),
        heads_per_unit=heads_per_unit,
        k_page_rows=page_rows[0],
        v_page_rows=page_rows[1],
    )


def units_in_turns(call: AttentionCall, options: Options, form: Form) -> int:
    """Units of work of a sequence, for each head, that take its tiles in turns; 0 where tiles are
    listed.
    """
    if not form.longest:
        return 0
    tokens = options.ROW_GROUPS * options.TOKENS
    return programs_in_turns(call.total_q, call.batch, form.longest, tokens)


def grid_of(call: AttentionCall, options: Options, form: Form = FORM) -> int:
    """Programs: one for each multiprocessor, if there are as many tiles."""
    tokens = options.ROW_GROUPS * options.TOKENS
    if options.MOST_PARTS > 0 and not options.IS_LISTED:
        return target_of(call.q.device).multiprocessors
    tiles = units_in_turns(call, options, form) * (call.batch + 1)
    if options.IS_LISTED or options.IS_NUMBERED:
        tiles = tile_scheduler.most_tiles(call.total_q, call.batch, tokens, options.HAS_LAYOUT)
    units = max(tiles * (call.num_heads // options.PACKED_HEADS), options.MOST_PARTS)
    return min(units, target_of(call.q.device).multiprocessors)


def boxes_of(call: AttentionCall, out: Tensor, options: Options) -> "tuple[Boxes, ...]":
    """How the accelerator finds rows of tensors like q, k, v and out."""
    from torch_paged_attn.backends.triton.hopper.common.tma import atoms_of_rows, ragged_rows

    # (rows, heads, dim), whether the rows are tokens or slots of pages
    k, v = (x if call.page_size == 0 else x[0].transpose(0, 1) for x in (call.k, call.v))
    of_keys = atoms_of_rows if _pages_in_atoms(call) else functools.partial(ragged_rows, heads=1)
    rows = _rows_of_box(call, options.KEYS_PER_ENTRY)
    heads, tokens = options.PACKED_HEADS, options.TOKENS
    per_byte = 2 if is_int4(call.k) else 1
    stored = call.q if options.FLOAT32_COLUMNS else out  # float32 is not stored through boxes
    return (
        ragged_rows(call.q, rows=tokens, heads=heads, width=options.WIDTH),
        of_keys(k, rows=rows, width=options.WIDTH // per_byte),
        of_keys(v, rows=rows, width=options.WIDTH_V // per_byte),
        ragged_rows(stored, rows=tokens, heads=heads, width=options.WIDTH_V),
    )


def tile_options_of(options: Options, skips: bool = False) -> tile_scheduler.TileOptions:
    """What the kernel that lists the tiles is compiled for. `skips`: see `plan.plan_launches`."""
    return tile_scheduler.TileOptions(
        IS_PAGED=options.PAGE_SIZE != 0 or options.IS_ROWS,
        IS_CAUSAL=options.IS_CAUSAL,
        IS_ALIGNED=options.HAS_LAYOUT,
        TOKENS=options.ROW_GROUPS * options.TOKENS,
        BLOCK_N=options.BLOCK_N,
        MOST_PARTS=options.MOST_PARTS,
        COUNTERS=options.COUNTERS,
        STRETCH=options.STRETCH,
        SKIPS=skips,
        **({} if options.MOST_PARTS else tile_scheduler.UNCUT),
    )


def chip_of(call: AttentionCall, options: Options) -> Chip:
    """What the estimate goes by of how long tiles take."""
    left, width = call.window_size_left, support.width_of(call.head_dim)
    shared = SHARED_COST if options.MERGED_COLUMNS else 1.0
    # tiles of fewer keys are sooner done, so that the same time is more of them
    units = 128 / options.BLOCK_N if width <= 128 else 1.0
    is_chunk = not (support.is_few_rows(call) or support.converts(call))
    costs = PIECE_COSTS_OF_CHUNKS if is_chunk else PIECE_COSTS
    piece_cost, wait_cost, tail = costs[width]
    return Chip(
        programs=target_of(call.q.device).multiprocessors,
        units_per_tile=call.num_heads // options.PACKED_HEADS,
        num_kv_heads=call.num_kv_heads,
        window_left=left if support.is_bound(left) else support.UNBOUNDED,
        piece_cost=piece_cost * units,
        wait_cost=wait_cost * units,
        tail=tail,
        merge_cost=MERGE_COST[width] * units,
        shared_cost=MERGE_COST[width] * shared * units,
    )


def part_elements(options: Options, programs: int) -> int:
    """Elements that pieces of tiles leave, rows of values, then their references and sums; and rows
    of values that each consumer of so many programs leaves (`stretches.py`)."""
    rows = options.ROW_GROUPS * options.BLOCK_M
    of_stretches = programs * rows * options.WIDTH_V if options.STRETCH else 0
    return options.MOST_PARTS * rows * (options.WIDTH_V + 2) + of_stretches


def sizes_of_list(call: AttentionCall) -> tuple[int, int, int]:
    """Sequences, queries, and keys that a sequence may have."""
    return call.batch, call.total_q, min(support.key_bound(call), 2**31 - 1)


def shape_of_tiles(
    call: AttentionCall, tile_options: tile_scheduler.TileOptions
) -> tuple[int, int]:
    """The shape of the list of a call's tiles, int32."""
    return tile_scheduler.list_shape(*sizes_of_list(call), tile_options)
