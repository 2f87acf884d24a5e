"""What Hopper's kernels are compiled for, and the sizes of a launch: all that follows from a call's
description and sizes. No tensor is read.

- `choose_tiles` and `options_of` need the description of a call: its dtypes, strides, head dims and
  options, its mean length and its `Form`. They give what the kernels are compiled for, and the
  scalars.
- `sizes_of` and `grid_of` need total_q, batch, num_pages, the block table's stride and, with a
  layout, how many rows it has.
- `Boxes` make a tensor map of an address: it depends on that and on the description, not on sizes.
"""

import functools
import math
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.arguments import Options, Scalars, Sizes
from torch_paged_attn.backends.triton.hopper.block_lists import shape_of_lists
from torch_paged_attn.backends.triton.hopper.piece_plan import Chip
from torch_paged_attn.backends.triton.hopper.shared_memory import fit_stages
from torch_paged_attn.backends.triton.hopper.support import (
    BLOCK_M,
    DESCALES,
    LEAST_BOX,
    LEAST_TALL,
    OF_LISTS,
    UNBOUNDED,
    are_few_chunks,
    columns_of,
    converts,
    gathers,
    has_few_tiles,
    heads_per_layout,
    is_bound,
    is_divided_chunk,
    is_float8,
    is_sorted,
    key_bound,
    keys_stay,
    may_divide,
    mean_length,
    most_parts,
    reach_of,
    sharing_heads,
    width_of,
)
from torch_paged_attn.backends.triton.hopper.tile_scheduler import (
    TileOptions,
    list_shape,
    most_tiles,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import HAS_KNOWN_MAPS
from torch_paged_attn.backends.triton.runtime.target import (
    is_even,
    next_power_of_2,
    target_of,
)
from torch_paged_attn.backends.triton.seqlen_info import programs_in_turns
from torch_paged_attn.backends.triton.softmax import LOG2E
from torch_paged_attn.backends.triton.tuning import (
    HopperConfig,
    choose_8_bit_config,
    choose_guessed_8_bit_config,
    choose_guessed_config,
    choose_hopper_config,
    choose_narrow_config,
    choose_short_config,
    choose_split_config,
)
from torch_paged_attn.ops.lacking import lacking

if TYPE_CHECKING:
    from torch_paged_attn.backends.triton.hopper.tma import Boxes

# in tiles of keys, by width of a head: what another launch takes to begin and to end, what leaving
# a piece of a tile takes, and what merging it takes
NEXT_COST = {64: 9.0, 128: 6.0, 256: 6.0}
PIECE_COST = {64: 1.0, 128: 1.0, 256: 2.0}
MERGE_COST = {64: 0.75, 128: 0.75, 256: 2.25}
# of that, where parts are added up by several
SHARED_COST = 0.15

# keys of the shortest stretches, whose sums are added up one after the other where bits depend on a
# sequence alone
STRETCH = 2048

# windows of few tiles of keys; and beside decodes
NARROW, NARROW_BESIDE = range(1025), range(512)

# of the rows of tiles of one head, the share that may be empty
MOST_EMPTY = 0.05

# one consumer leaves parts of half the rows, of which few are there: with fixed stretches, which
# are many, there may be more
MORE_PARTS = 3
# of the queries of a batch, all heads counted: for so many rows to a multiprocessor, beginnings and
# ends take longer than products
MOST_ROWS = 256

# keys of the longest sequence up to which tiles of one consumer are better, if there are few:
# of head_dim 256, and of 128
MOST_LOW_WIDE, MOST_LOW = 8192, 4096

# of mixed batches whose tiles are numbered: keys of the longest sequence, rows to a multiprocessor
# unless a window is narrow, tiles of decodes to one, and where rows of keys are copied
MOST_REACH, MOST_ROWS_NUMBERED, MOST_DECODES, MOST_COPIED = 2048, 512, 9, 1
# the same limits of narrow heads
MOST_ROWS_NARROW, MOST_COPIED_NARROW = 704, 2
# rows of a mixed batch's chunks, all heads counted, for a tile of decodes, from which on they are
# most of the work
MOSTLY_ROWS = 350
# the same where few sequences have more keys
MOSTLY_ROWS_OF_LONG, LEAST_LONG = 60, 8192
# keys of the longest sequence up to which guessed tokens have one consumer
MOST_OF_ONE = 512

# keys that are dealt out to a program at least
LEAST_OF_PROGRAM = 128

# where another kernel takes short sequences, the queries of the shortest that are left
LEAST_LENGTH = 32


class Form(NamedTuple):
    """What is known of a batch's lengths before they are there."""

    short: int = 0  # another kernel may do sequences of up to so many queries, and does padding
    longest: int = 0  # no sequence has more queries: their tiles are taken in turns; 0: listed
    is_guessed: bool = False  # one consumer's rows hold all queries of a sequence
    is_dealt: bool = False  # of these, keys are dealt out in equal shares, without a list of tiles
    # sequences of any lengths have so few keys that tiles need no cutting, and no list
    is_numbered: bool = False
    is_mixed: bool = False  # most sequences are short, a few are long


FORM = Form()


def _pages_in_atoms(call: AttentionCall) -> bool:
    """Whether pages are so small that their boxes are better loaded whole: see `atoms_of_rows`."""
    is_small = LEAST_BOX <= call.page_size < 32 and call.layout is None and not converts(call)
    return is_small and all(
        x.shape[-1] % 64 == 0 and x.stride(0) // x.stride(2) % 8 == 0 for x in (call.k, call.v)
    )


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
        # rows that are some token's; over keys that come from memory more are lost by groups that
        # are no power of two
        filled = BLOCK_M // pack * pack / BLOCK_M
        if full < (filled if keys_stay(call) else pack / next_power_of_2(pack)):
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


def _has_few_rows(call: AttentionCall, most: int) -> bool:
    """Whether a multiprocessor has so many rows of queries at most."""
    return call.total_q * call.num_heads <= most * target_of(call.q.device).multiprocessors


def heads_beside(call: AttentionCall) -> int:
    """How many heads share a tile where another kernel takes short sequences: all of a group that
    is no power of two only if that makes all work one launch, as was measured when these left rows
    of a tile empty."""
    heads = whole_group(call) if _has_few_rows(call, MOST_ROWS) else even_heads(call)
    # what decodes cost this kernel is underestimated where heads are narrow
    return min(heads, 4) if width_of(call.head_dim) == 64 and heads == even_heads(call) else heads


def _heads_in_turns(call: AttentionCall) -> int:
    """The same where sequences are short: what makes fewer tiles, of which fewer rows are past the
    end of a sequence."""
    length = mean_length(call)

    def tiles(heads: int) -> int:
        return -(-length // (2 * (BLOCK_M // heads))) * (call.group_size // heads)

    return min(even_heads(call), whole_group(call), key=tiles)


def choose_tiles(call: AttentionCall, form: Form = FORM) -> tuple[HopperConfig, int]:
    """Tiles, and how many heads share one. Of a call's sizes, they depend on its mean length, which
    says nothing where another kernel takes the short sequences."""
    layout, is_causal = call.layout, call.window_right == 0
    width = width_of(call.head_dim)
    is_narrow = is_causal and call.window_size_left in NARROW and layout is None and width <= 128
    if call.is_batch_invariant:
        return _choose_invariant_tiles(call, form)
    is_mixed = form.is_numbered and not form.is_guessed and not are_few_chunks(call)
    if form.is_mixed and _are_mostly_chunks(call):
        config = choose_hopper_config(width, LEAST_LENGTH, is_causal, False, gathers(call))
        return config, whole_group(call)
    if form.is_mixed:
        return choose_split_config(width), whole_group(call)
    if is_mixed:
        packed = whole_group(call)
    elif form.short:
        packed = heads_beside(call)
    elif form.is_guessed:
        packed = whole_group(call)
    elif form.longest:
        packed = _heads_in_turns(call)
    elif is_narrow:
        # the fewer tokens a tile has, the fewer keys a window hides from most of them
        packed = even_heads(call) if is_even(call.group_size) else whole_group(call)
    else:
        packed = pack_heads(call)
    if converts(call) and form.is_guessed:
        return choose_guessed_8_bit_config(width, reach_of(call) >= LEAST_TALL), packed
    if converts(call):
        return choose_8_bit_config(width, is_float8(call)), packed
    if form.longest:
        return choose_short_config(width, mean_length(call) * packed), packed
    are_tokens = form.is_guessed and call.total_q >= 2 * call.batch
    if are_tokens and form.is_numbered and may_divide(call) and reach_of(call) > MOST_OF_ONE:
        return choose_split_config(width), packed
    if form.is_guessed:
        return choose_guessed_config(width), packed
    if is_mixed:
        return _choose_numbered_config(call), packed
    if form.short and is_narrow and call.window_size_left in NARROW_BESIDE:
        return choose_narrow_config(width), packed
    if form.short and width > 64 and _has_few_rows(call, MOST_ROWS):
        return choose_guessed_config(width), packed
    if form.short:
        return choose_hopper_config(width, LEAST_LENGTH, is_causal, False, gathers(call)), packed
    if is_divided_chunk(call):
        return choose_split_config(width), whole_group(call)
    if _has_low_tiles(call, packed):
        return choose_guessed_config(width), packed
    if is_narrow:
        return choose_narrow_config(width), packed
    length = mean_length(call)
    if call.block_table is not None and not has_few_tiles(call):
        # of long contexts, the diagonal is little; of what is said, they have more than half
        length = max(length, call.max_seqlen_k // 2)
    config = choose_hopper_config(width, length, is_causal, layout is not None, gathers(call))
    return config, packed


def _has_low_tiles(call: AttentionCall, packed_heads: int) -> bool:
    """Whether few queries in pages have tiles of one consumer: more, and sooner done, but the same
    keys are read for fewer rows."""
    width, reach = width_of(call.head_dim), reach_of(call)
    if call.block_table is None or call.layout is not None or width == 64:
        return False
    if _has_few_rows(call, BLOCK_M // 4):
        return True  # so few that each tile of one consumer is cut in fewer pieces
    if width == 256:
        return reach <= MOST_LOW_WIDE and _has_few_rows(call, 2 * BLOCK_M)
    # one wave of them, which nobody had better cut
    tokens = BLOCK_M // packed_heads
    tiles = (call.total_q // tokens + call.batch) * (call.num_heads // packed_heads)
    most = target_of(call.q.device).multiprocessors
    return reach <= MOST_LOW and tiles <= 2 * most


def decodes_of_program(call: AttentionCall) -> float:
    """Tiles of decodes, if all sequences are some, for each multiprocessor."""
    tiles = call.batch * call.num_heads / whole_group(call)
    return tiles / target_of(call.q.device).multiprocessors


def is_numbered(call: AttentionCall) -> bool:
    """Whether a batch of long and short sequences in pages is better off without a list of tiles
    and without another kernel: as far as anybody says, no sequence visits so many keys that its
    tiles should be cut, and short ones, each of which takes a tile, are not too many.
    """
    if lacking(call, OF_LISTS) is not None or reach_of(call) > MOST_REACH:
        return False
    # what was measured: notes/gpu.md
    is_narrow_head = width_of(call.head_dim) == 64
    if decodes_of_program(call) > MOST_DECODES or (converts(call) and not is_narrow_head):
        return False
    if converts(call) or call.window_size_left in NARROW_BESIDE:
        return call.window_size_left in NARROW_BESIDE
    most_copied = MOST_COPIED_NARROW if is_narrow_head else MOST_COPIED
    if gathers(call) and decodes_of_program(call) > most_copied:
        return False  # the portable kernel reads small pages faster
    most = MOST_ROWS_NARROW if is_narrow_head else MOST_ROWS_NUMBERED
    return _has_few_rows(call, MOST_ROWS if gathers(call) else most)


def is_one_launch(call: AttentionCall) -> bool:
    """Whether a batch of long and short sequences takes Hopper's kernel alone, by a list of tiles:
    where two consumers divide the keys of a tile, short sequences take no longer than with a kernel
    of their own."""
    return may_divide(call) and not is_bound(call.window_size_left)


def _are_mostly_chunks(call: AttentionCall) -> bool:
    """Whether chunks of prompts are most of the work of such a batch; sooner where few sequences
    have long contexts, as far as the caller says."""
    rows, tiles = (call.total_q - call.batch) * call.num_heads, call.batch * call.num_kv_heads
    # where nothing is said, it is what the table has room for
    is_long = LEAST_LONG < call.max_seqlen_k < key_bound(call)
    is_few = tiles <= target_of(call.q.device).multiprocessors
    return rows > (MOSTLY_ROWS_OF_LONG if is_few and is_long else MOSTLY_ROWS) * tiles


def _choose_numbered_config(call: AttentionCall) -> HopperConfig:
    """Tiles where sequences are long and short, and their tiles are numbered."""
    width = width_of(call.head_dim)
    if call.window_size_left in NARROW_BESIDE and width <= 128:
        return choose_guessed_config(width, is_narrow=True)
    # rows that are copied arrive too late for two
    if gathers(call) or not may_divide(call):
        return choose_guessed_config(width)
    return choose_split_config(width)


def _choose_invariant_tiles(call: AttentionCall, form: Form) -> tuple[HopperConfig, int]:
    """The same where bits depend on a sequence alone: as many keys at a time for all queries of all
    its calls, and products as high. How many consumers there are, and heads, is free."""
    width = width_of(call.head_dim)
    is_narrow = call.window_size_left in NARROW and width <= 128
    if form.is_guessed:
        return choose_guessed_config(width, is_narrow), whole_group(call)
    if is_narrow:
        return choose_narrow_config(width), even_heads(call)
    is_causal = call.window_right == 0
    config = choose_hopper_config(width, mean_length(call), is_causal, False, gathers(call))
    return config, pack_heads(call)


def options_of(
    call: AttentionCall,
    config: HopperConfig,
    packed_heads: int,
    form: Form = FORM,
) -> Options:
    """What the kernel is compiled for; no size and no address is part of it."""
    layout = call.layout
    # pieces are merged on the way to a result of 16 bits
    is_float32 = call.result_dtype == torch.float32
    is_cut = not (form.longest or form.is_numbered or is_float32)
    parts = most_parts(call, form.short > 0 or form.is_guessed) if is_cut else 0
    if call.is_batch_invariant and config.CONSUMERS == 1:
        parts *= MORE_PARTS
    is_dealt = form.is_dealt and parts > 0 and lacking(call, OF_LISTS) is None
    if is_dealt:
        # of each program
        parts = 2 * target_of(call.q.device).multiprocessors
    is_shared = parts > 0 and form.is_guessed and not call.is_batch_invariant
    row_groups = 1 if config.SPLITS_KEYS else config.CONSUMERS
    tokens = BLOCK_M // packed_heads
    queries_per_list, keys_per_entry = 0, config.BLOCK_N
    if layout is not None:
        queries_per_list, keys_per_entry = shape_of_lists(
            layout.q_block_size, layout.k_block_size, config.CONSUMERS * tokens, config.BLOCK_N
        )
    is_whole = _pages_in_atoms(call) or is_float8(call)
    boxes = config.BLOCK_N // _rows_of_box(call.page_size, keys_per_entry)
    options = Options(
        BLOCK_M=BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        WIDTH=width_of(call.head_dim),
        WIDTH_V=width_of(call.head_dim_v),
        COLUMNS=width_of(call.head_dim) if is_whole else columns_of(call.head_dim),
        PACKED_HEADS=packed_heads,
        TOKENS=tokens,
        GROUP_SIZE=call.group_size,
        PAGE_SIZE=call.page_size,
        IS_CAUSAL=call.window_right == 0,
        HAS_LEFT=is_bound(call.window_size_left),
        HAS_RIGHT=is_bound(call.window_right),
        HAS_SOFTCAP=call.softcap > 0.0,
        HAS_LAYOUT=layout is not None,
        Q_BLOCK_SIZE=layout.q_block_size if layout else 0,
        KEYS_PER_ENTRY=keys_per_entry,
        QUERIES_PER_LIST=queries_per_list,
        HEADS_PER_LAYOUT=heads_per_layout(call),
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
        LETS_FOLLOW=form.short > 0,
        IS_LISTED=not (form.longest or is_dealt or form.is_numbered),
        IS_DEALT=is_dealt,
        IS_NUMBERED=form.is_numbered,
        LEAST_SHARE=max(LEAST_OF_PROGRAM // config.BLOCK_N, 1) if is_dealt else 0,
        GATHERS=gathers(call),
        CONVERTS_K=converts(call) and not is_float8(call),
        CONVERTS_V=converts(call),
        FLOAT32_COLUMNS=call.head_dim_v if is_float32 else 0,
        MERGED_COLUMNS=call.head_dim_v if is_shared else 0,
        STRETCH=STRETCH if call.is_batch_invariant else 0,
    )
    return fit_stages(options, call.q.itemsize, call.k.itemsize)


def _rows_of_box(page_size: int, keys_per_entry: int) -> int:
    """Rows of keys that the accelerator loads at once: of one page and of one entry of a list. What
    is less is copied."""
    return max(math.gcd(page_size or keys_per_entry, keys_per_entry), LEAST_BOX)


def scalars_of(call: AttentionCall, packed_heads: int) -> Scalars:
    """Numbers that follow from the description and the tiles, which no kernel is compiled for."""
    k, v, slopes, layout = call.k, call.v, call.alibi_slopes, call.layout
    is_paged, strides = call.page_size > 0, {}
    if gathers(call):
        of_k, of_v = (("stride_k", k), ("stride_v", v))
        strides = {name: x.stride(2) for name, x in (of_k, of_v)}
        strides |= {f"{name}_head": x.stride(1) for name, x in (of_k, of_v)}
    batched = layout is not None and layout.crow_indices.dim() == 3 and len(layout.crow_indices) > 1
    alibi_strides = (0, 0) if slopes is None else (0, *slopes.stride())[-2:]
    # scores are q . k or, with a softcap, the tanh of it
    unit = call.softcap or call.scale
    return Scalars(
        num_heads=call.num_heads,
        heads_per_unit=(call.num_heads if is_sorted(call) else call.group_size) // packed_heads,
        stride_layout_batch=layout.crow_indices.shape[-2] if layout and batched else 0,
        k_page_rows=k.stride(0) // k.stride(2) if is_paged else 0,
        v_page_rows=v.stride(0) // v.stride(2) if is_paged else 0,
        stride_alibi_batch=alibi_strides[0],
        stride_alibi_head=alibi_strides[1],
        window_left=max(call.window_size_left, 0) if is_bound(call.window_size_left) else 0,
        window_right=call.window_right if is_bound(call.window_right) else 0,
        scale_log2=unit * LOG2E.value,
        softcap_scale_log2=2 * call.scale / call.softcap * LOG2E.value if call.softcap else 0.0,
        alibi_scale=1.0 / unit,
        **strides,
        **_strides_of_descales(call),
    )


def _strides_of_descales(call: AttentionCall) -> dict[str, int]:
    strides: dict[str, int] = {}
    for name in DESCALES:
        given = getattr(call, name)
        of_batch, of_head = (0, 0) if given is None else (0, 0, *given.stride())[-2:]
        strides |= {f"{name}_batch": of_batch, f"{name}_head": of_head}
    return strides


def sizes_of(call: AttentionCall, lists_per_head: int) -> Sizes:
    """Numbers that differ from call to call."""
    return Sizes(
        num_pages=call.k.shape[0],
        batch=call.batch,
        total_q=call.total_q,
        lists_per_head=lists_per_head,
        stride_table=0 if call.block_table is None else call.block_table.stride(0),
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
    if options.IS_DEALT:
        return options.MOST_PARTS // 2
    tiles = units_in_turns(call, options, form) * (call.batch + 1)
    if options.IS_LISTED or options.IS_NUMBERED:
        tiles = most_tiles(call.total_q, call.batch, tokens, options.HAS_LAYOUT)
    units = max(tiles * (call.num_heads // options.PACKED_HEADS), options.MOST_PARTS)
    return min(units, target_of(call.q.device).multiprocessors)


def boxes_of(call: AttentionCall, out: Tensor, options: Options) -> "tuple[Boxes, ...]":
    """How the accelerator finds rows of tensors like q, k, v and out."""
    from torch_paged_attn.backends.triton.hopper.tma import atoms_of_rows, ragged_rows

    # (rows, heads, dim), whether the rows are tokens or slots of pages
    k, v = (x if call.page_size == 0 else x[0].transpose(0, 1) for x in (call.k, call.v))
    of_keys = atoms_of_rows if _pages_in_atoms(call) else functools.partial(ragged_rows, heads=1)
    rows = _rows_of_box(call.page_size, options.KEYS_PER_ENTRY)
    heads, tokens = options.PACKED_HEADS, options.TOKENS
    stored = call.q if options.FLOAT32_COLUMNS else out  # float32 is not stored through boxes
    return (
        ragged_rows(call.q, rows=tokens, heads=heads, width=options.WIDTH),
        of_keys(k, rows=rows, width=options.WIDTH),
        of_keys(v, rows=rows, width=options.WIDTH_V),
        ragged_rows(stored, rows=tokens, heads=heads, width=options.WIDTH_V),
    )


def tile_options_of(options: Options, form: Form = FORM) -> TileOptions:
    """What the kernel that lists the tiles is compiled for."""
    return TileOptions(
        IS_PAGED=options.PAGE_SIZE > 0,
        IS_CAUSAL=options.IS_CAUSAL,
        IS_ALIGNED=options.HAS_LAYOUT,
        TOKENS=options.ROW_GROUPS * options.TOKENS,
        BLOCK_N=options.BLOCK_N,
        MOST_PARTS=options.MOST_PARTS,
        COUNTERS=options.COUNTERS,
        SHORT=form.short,
        STRETCH=options.STRETCH,
        **_form_of_list(options, form.short),
    )


def _form_of_list(options: Options, short: int) -> dict[str, Any]:
    """What is looked at at a time while tiles are listed, and by how many warps."""
    if short:
        return dict(PLACED=8, STARTS=128, WEIGHED=32, WARPS=8)
    if options.MOST_PARTS:
        return {}
    return dict(PLACED=8, LOOKED_AT=128, STARTS=256)


def chip_of(call: AttentionCall, options: Options) -> Chip:
    """What the estimate goes by of how long tiles take."""
    left, width = call.window_size_left, width_of(call.head_dim)
    shared = SHARED_COST if options.MERGED_COLUMNS else 1.0
    return Chip(
        programs=target_of(call.q.device).multiprocessors,
        units_per_tile=call.num_heads // options.PACKED_HEADS,
        num_kv_heads=call.num_kv_heads,
        window_left=left if is_bound(left) else UNBOUNDED,
        next_cost=NEXT_COST[width],
        piece_cost=PIECE_COST[width],
        merge_cost=MERGE_COST[width] * shared,
    )


def part_elements(options: Options, programs: int) -> int:
    """Elements that pieces of tiles leave, rows of values, then their references and sums; and rows
    of values that each consumer of so many programs leaves (`stretches.py`)."""
    rows = options.ROW_GROUPS * options.BLOCK_M
    of_stretches = programs * rows * options.WIDTH_V if options.STRETCH else 0
    return options.MOST_PARTS * rows * (options.WIDTH_V + 2) + of_stretches


def sizes_of_list(call: AttentionCall) -> tuple[int, int, int]:
    """Sequences, queries, and keys that a sequence may have."""
    return call.batch, call.total_q, min(key_bound(call), 2**31 - 1)


def shape_of_tiles(call: AttentionCall, tile_options: TileOptions) -> tuple[int, int]:
    """The shape of the list of a call's tiles, int32."""
    return list_shape(*sizes_of_list(call), tile_options)
