"""`flash_varlen` and `blocksparse` on Hopper by tensor memory accelerator and warpgroup products.

`support.py` says what this kernel leaves to the portable one. Heads whose size is no power of two
lie in shared memory beside zeros that the accelerator fills in: the tensors stay as they are.

A launch is put together from three things, which change at different rates (`arguments.py`):

- `choose_tiles` and `options_of` need the description of a call: its dtypes, strides, head dims and
  options, and its mean length. They give what the kernels are compiled for, and the scalars.
- `sizes_of` and `grid_of` need total_q, batch, num_pages, the block table's stride and, with a
  layout, how many rows it has.
- `Boxes` make a tensor map of an address: it depends on that and on the description, not on sizes.

`plan_attention` does the first two, and what it returns the third.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.arguments import Options, Pointers, Scalars, Sizes
from torch_paged_attn.backends.triton.hopper.block_lists import (
    number_of_lists,
    plan_block_lists,
    shape_of_lists,
)
from torch_paged_attn.backends.triton.hopper.piece_plan import Chip
from torch_paged_attn.backends.triton.hopper.support import (
    BLOCK_M,
    UNBOUNDED,
    columns_of,
    heads_per_layout,
    is_bound,
    key_bound,
    mean_length,
    most_parts,
    sharing_heads,
    width_of,
)
from torch_paged_attn.backends.triton.hopper.tile_scheduler import (
    Lengths,
    TileOptions,
    list_shape,
    most_tiles,
    plan_tile_list,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backends.triton.seqlen_info import programs_in_turns
from torch_paged_attn.backends.triton.softmax import LOG2E
from torch_paged_attn.backends.triton.tuning import (
    HopperConfig,
    choose_hopper_config,
    choose_narrow_config,
    choose_short_config,
)

if TYPE_CHECKING:
    from torch_paged_attn.backends.triton.hopper.tma import Boxes

# tensors that the kernels read by address, and those of a layout
READ_BY_ADDRESS = (*Lengths._fields, "block_table", "alibi_slopes", "sinks")
LAYOUT = ("crow_indices", "col_indices")

# what another launch takes to begin and to end, in tiles of keys, by width of a head
NEXT_COST = {64: 9.0, 128: 6.0, 256: 6.0}

# windows of few tiles of keys
NARROW = range(1025)

# where another kernel takes short sequences, the queries of the shortest that are left
LEAST_LENGTH = 32


def _pages_in_atoms(call: AttentionCall) -> bool:
    """Whether pages are so small that their boxes are better loaded whole: see `atoms_of_rows`."""
    is_small = 0 < call.page_size < 32 and call.layout is None
    return is_small and all(
        x.shape[-1] % 64 == 0 and x.stride(0) // x.stride(2) % 8 == 0 for x in (call.k, call.v)
    )


def pack_heads(sharing: int, length: int) -> int:
    """Of heads that read the same keys, how many share a tile: one, unless `length` queries would
    not fill it."""
    pack = 1
    while sharing % (2 * pack) == 0 and pack * length < 2 * BLOCK_M and pack < BLOCK_M:
        pack *= 2
    return pack


def choose_tiles(
    call: AttentionCall, is_beside: bool = False, is_short: bool = False
) -> tuple[HopperConfig, int]:
    """Tiles, and how many heads share one. Of a call's sizes, they depend on its mean length, which
    says nothing where another kernel takes the short sequences. With `is_short`, no sequence is
    long."""
    typical, layout = LEAST_LENGTH if is_beside else mean_length(call), call.layout
    is_causal = call.window_right == 0
    width = width_of(call.head_dim)
    # the fewer tokens a tile has, the fewer rows are past the end of a short sequence, and the
    # fewer keys a window hides from most of them
    sharing = sharing_heads(call)
    most_packed = min(sharing & -sharing, BLOCK_M)
    if is_short:
        return choose_short_config(width), most_packed
    is_narrow = is_causal and call.window_size_left in NARROW and layout is None
    if is_narrow and width <= 128 and not is_beside:
        return choose_narrow_config(width), most_packed
    config = choose_hopper_config(width, typical, is_causal, layout is not None)
    # a tile holds one row of a layout, where heads share it
    length = typical if layout is None else min(typical, layout.q_block_size)
    return config, pack_heads(sharing, length)


def options_of(
    call: AttentionCall,
    config: HopperConfig,
    packed_heads: int,
    is_beside: bool = False,
    is_listed: bool = True,
) -> Options:
    """What the kernel is compiled for; no size and no address is part of it. With `is_beside`,
    another kernel does the rest of the call.
    """
    layout = call.layout
    parts = most_parts(call, is_beside) if is_listed else 0
    tokens = BLOCK_M // packed_heads
    queries_per_list, keys_per_entry = 0, config.BLOCK_N
    if layout is not None:
        queries_per_list, keys_per_entry = shape_of_lists(
            layout.q_block_size, layout.k_block_size, config.CONSUMERS * tokens, config.BLOCK_N
        )
    boxes = config.BLOCK_N // _rows_of_box(call.page_size, keys_per_entry)
    return Options(
        BLOCK_M=BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        WIDTH=width_of(call.head_dim),
        WIDTH_V=width_of(call.head_dim_v),
        COLUMNS=width_of(call.head_dim) if _pages_in_atoms(call) else columns_of(call.head_dim),
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
        KV_STAGES=config.KV_STAGES,
        Q_STAGES=config.Q_STAGES,
        REGISTERS=config.REGISTERS,
        PINGPONG=config.PINGPONG,
        MOST_PARTS=parts,
        COUNTERS=config.CONSUMERS * parts,
        LETS_FOLLOW=is_beside,
        IS_LISTED=is_listed,
        FLOAT32_COLUMNS=0 if call.result_dtype == call.q.dtype else call.head_dim_v,
    )


def _rows_of_box(page_size: int, keys_per_entry: int) -> int:
    """Rows of keys that the accelerator loads at once: of one page and of one entry of a list."""
    return math.gcd(page_size or keys_per_entry, keys_per_entry)


def scalars_of(call: AttentionCall, packed_heads: int) -> Scalars:
    """Numbers that follow from the description and the tiles, which no kernel is compiled for."""
    k, v, slopes, layout = call.k, call.v, call.alibi_slopes, call.layout
    is_paged = call.page_size > 0
    batched = layout is not None and layout.crow_indices.dim() == 3 and len(layout.crow_indices) > 1
    alibi_strides = (0, 0) if slopes is None else (0, *slopes.stride())[-2:]
    # scores are q . k or, with a softcap, the tanh of it
    unit = call.softcap or call.scale
    return Scalars(
        num_heads=call.num_heads,
        heads_per_unit=call.group_size // packed_heads,
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
    )


def sizes_of(call: AttentionCall, lists_per_head: int) -> Sizes:
    """Numbers that differ from call to call."""
    return Sizes(
        num_pages=call.k.shape[0],
        batch=call.batch,
        total_q=call.total_q,
        lists_per_head=lists_per_head,
        stride_table=0 if call.block_table is None else call.block_table.stride(0),
    )


def units_in_turns(call: AttentionCall, options: Options, longest: int) -> int:
    """Units of work of a sequence, for each head, that take its tiles in turns; 0 where tiles are
    listed.
    """
    if options.IS_LISTED:
        return 0
    tokens = options.CONSUMERS * options.TOKENS
    return programs_in_turns(call.total_q, call.batch, longest, tokens)


def grid_of(call: AttentionCall, options: Options, longest: int = 0) -> int:
    """Programs: one for each multiprocessor, if there are as many tiles."""
    tokens = options.CONSUMERS * options.TOKENS
    tiles = units_in_turns(call, options, longest) * (call.batch + 1)
    if options.IS_LISTED:
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


def tile_options_of(options: Options, short: int = 0) -> TileOptions:
    """What the kernel that lists the tiles is compiled for. Sequences of up to `short` queries may
    be left to another kernel, padding is."""
    return TileOptions(
        IS_PAGED=options.PAGE_SIZE > 0,
        IS_CAUSAL=options.IS_CAUSAL,
        IS_ALIGNED=options.HAS_LAYOUT,
        TOKENS=options.CONSUMERS * options.TOKENS,
        BLOCK_N=options.BLOCK_N,
        MOST_PARTS=options.MOST_PARTS,
        COUNTERS=options.COUNTERS,
        SHORT=short,
        **_form_of_list(options, short),
    )


def _form_of_list(options: Options, short: int) -> dict[str, Any]:
    """What is looked at at a time while tiles are listed, and by how many warps."""
    if short:
        return dict(LOOKED_AT=64, STARTS=128, WEIGHED=64, WARPS=8)
    if options.MOST_PARTS:
        return {}
    return dict(PLACED=8, LOOKED_AT=128, STARTS=256)


def _chip_of(call: AttentionCall, packed_heads: int) -> Chip:
    """What the estimate goes by of how long tiles take."""
    left = call.window_size_left
    return Chip(
        programs=target_of(call.q.device).multiprocessors,
        units_per_tile=call.num_heads // packed_heads,
        num_kv_heads=call.num_kv_heads,
        window_left=left if is_bound(left) else UNBOUNDED,
        next_cost=NEXT_COST[width_of(call.head_dim)],
    )


def attend(
    call: AttentionCall, config: HopperConfig | None = None, longest: int = 0
) -> tuple[Tensor, Tensor]:
    """Plan a call for which `unsupported` has no reason, and launch the kernels."""
    plan = plan_attention(call, config, longest)
    return plan(tuple(call.given_tensors().values()), None)


def plan_attention(
    call: AttentionCall, config: HopperConfig | None = None, longest: int = 0
) -> Plan:
    """A plan for the given tensors of calls like this one, in the order of the op's list. If
    `longest`, what is said of the longest sequence's queries, is not 0, tiles are taken in turns.
    """
    results = call.new_results()
    new_out, new_lse = map(Allocation.like, results)
    if call.total_q == 0:
        return lambda tensors, addresses: (new_out(), new_lse())
    start = plan_launches(call, results[0], config, longest=longest)

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        start(tensors, addresses, out, lse)
        return out, lse

    return run


def part_elements(options: Options) -> int:
    """Elements that pieces of tiles leave: rows of values, then their references and sums."""
    rows = options.MOST_PARTS * options.CONSUMERS * options.BLOCK_M
    return rows * (options.WIDTH_V + 2)


def _sizes_of_list(call: AttentionCall) -> tuple[int, int, int]:
    return call.batch, call.total_q, min(key_bound(call), 2**31 - 1)


def shape_of_tiles(call: AttentionCall, tile_options: TileOptions) -> tuple[int, int]:
    """The shape of the list of a call's tiles, int32."""
    return list_shape(*_sizes_of_list(call), tile_options)


def plan_launches(
    call: AttentionCall,
    out: Tensor,
    config: HopperConfig | None = None,
    short: int = 0,
    longest: int = 0,
) -> Callable[..., tuple[Tensor | None, Tensor | None]]:
    """A plan that is given where the results go, tensors like `out` and its lse.

    With `short`, sequences of up to so many queries may be left to the next kernel, and padding is;
    it may start before this one ends. What the plan returns, the list of tiles and other memory of
    this kernel's, is to be kept until that is launched.
    """
    from torch_paged_attn.backends.triton.hopper.attention_kernel import (
        _hopper_attention_fwd_kernel,
    )

    is_beside = short > 0
    chosen, packed_heads = choose_tiles(call, is_beside, longest > 0)
    options = options_of(call, config or chosen, packed_heads, is_beside, longest == 0)
    in_turns = units_in_turns(call, options, longest)
    list_tiles = None
    if options.IS_LISTED:
        list_tiles = plan_tile_list(
            *_sizes_of_list(call),
            tile_options_of(options, short),
            call.q.device,
            _chip_of(call, packed_heads) if options.MOST_PARTS or short else None,
        )
    new_parts = None
    if options.MOST_PARTS:
        new_parts = Allocation((part_elements(options),), torch.float32, call.q.device)
    build_lists, lists_per_head = None, 0
    if (layout := call.layout) is not None:
        shape = options.QUERIES_PER_LIST, options.KEYS_PER_ENTRY
        build_lists = plan_block_lists(layout, *shape, key_bound(call), options.IS_CAUSAL)
        lists_per_head = number_of_lists(layout, shape[0], key_bound(call))
    q_boxes, k_boxes, v_boxes, out_boxes = boxes_of(call, out, options)
    # what is not given is the None behind the tensors
    names = list(call.given_tensors())
    places = {name: i for i, name in enumerate(names)}
    pick = operator.itemgetter(*(places.get(name, len(names)) for name in READ_BY_ADDRESS))
    pick_layout = operator.itemgetter(*(places[name] for name in LAYOUT)) if layout else None
    launch = Launch(
        _hopper_attention_fwd_kernel,
        (grid_of(call, options, longest),),
        scalars=scalars_of(call, packed_heads),
        **sizes_of(call, in_turns or lists_per_head)._asdict(),
        OPTIONS=options,
        num_warps=4,
        launch_pdl=True,
    )

    is_float32 = options.FLOAT32_COLUMNS > 0
    # the lengths that the kernel reads itself where tiles are not listed
    none = (None,) * 3

    def start(
        tensors: tuple[Any, ...], addresses: Any, out: Tensor, lse: Tensor
    ) -> tuple[Tensor | None, Tensor | None]:
        *lengths, block_table, alibi_slopes, sinks = pick((*tensors, None))
        entries = spans = None
        if build_lists is not None and pick_layout is not None:
            entries, spans = build_lists(*pick_layout(tensors))
        parts = None if new_parts is None else new_parts()
        if not launch.is_ready or addresses is None:
            q, k, v = tensors[:3]
            tile_list, unlisted = None, lengths[: len(none)]
            if list_tiles is not None:
                tile_list, unlisted = list_tiles(Lengths(*lengths)), none
            launch(
                q_boxes.at(q.data_ptr()),
                k_boxes.at(k.data_ptr()),
                v_boxes.at(v.data_ptr()),
                out_boxes.at((q if is_float32 else out).data_ptr()),
                Pointers(
                    lse, tile_list, block_table, entries, spans, alibi_slopes, sinks, parts,
                    *unlisted,
                )._replace(out=out if is_float32 else None),
            )  # fmt: skip
            return tile_list, parts
        *starts, table, slopes, sink = pick((*addresses, None))
        tile_list, at_list, unlisted = None, None, starts[: len(none)]
        at_out = out.data_ptr()
        if list_tiles is not None:
            tile_list, unlisted = list_tiles(Lengths(*lengths), tuple(starts)), none
            at_list = tile_list.data_ptr()
        boxes_at = launch.map_arguments
        lists = tuple(None if x is None else x.data_ptr() for x in (entries, spans))
        at_parts = None if parts is None else parts.data_ptr()
        launch.start(
            *boxes_at(0, q_boxes, addresses[0]),
            *boxes_at(1, k_boxes, addresses[1]),
            *boxes_at(2, v_boxes, addresses[2]),
            *boxes_at(3, out_boxes, addresses[0] if is_float32 else at_out),
            (
                *(lse.data_ptr(), at_list, table, *lists, slopes, sink, at_parts, *unlisted),
                at_out if is_float32 else None,
            ),
        )
        return tile_list, parts

    return start
