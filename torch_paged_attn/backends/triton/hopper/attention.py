"""`flash_varlen` and `blocksparse` on Hopper by tensor memory accelerator and warpgroup products.

`unsupported` says what this kernel leaves to the portable one. Heads whose size is no power of two
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
import importlib.util
import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.arguments import Options, Pointers, Scalars, Sizes
from torch_paged_attn.backends.triton.hopper.block_lists import (
    number_of_entries,
    number_of_lists,
    plan_block_lists,
    shape_of_lists,
)
from torch_paged_attn.backends.triton.hopper.tile_scheduler import (
    Lengths,
    TileOptions,
    most_tiles,
    plan_tile_list,
)
from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backends.triton.softmax import LOG2E
from torch_paged_attn.backends.triton.tuning import HopperConfig, choose_hopper_config

if TYPE_CHECKING:
    from torch_paged_attn.backends.triton.hopper.tma import Boxes

# tensors that the kernels read by address, and those of a layout
READ_BY_ADDRESS = (
    "cu_seqlens_q", "cu_seqlens_k", "seqused_k", "block_table", "alibi_slopes", "sinks",
)  # fmt: skip
LAYOUT = ("crow_indices", "col_indices")

# rows of a consumer: the height of a warpgroup's product
BLOCK_M = 64

# keys of the smallest tile
LEAST_KEYS = 64

HAS_GLUON = importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None

# its scale in base two, and one over it, are float32 and neither 0 nor infinite; a larger softcap
# multiplies the error of tanh
LEAST_SCALE, MOST_SOFTCAP = 2.0**-100, 1024.0

# windows this wide hide nothing: no sequence is as long
UNBOUNDED = 2**30


# what the portable kernel has and this one has not
NOT_CARRIED = ("attn_bias", "q_descale", "k_descale", "v_descale")


def unsupported_device(device: torch.device | None = None) -> str | None:
    """Why no call on a device can take this kernel; None if some can."""
    if device is None and not torch.cuda.is_available():
        return "there is no GPU"
    if target_of(device or torch.device("cuda")).arch != "sm90":
        return "this is no Hopper chip"
    return None if HAS_GLUON else "this Triton has no Gluon for Hopper"


def unsupported(call: AttentionCall) -> str | None:
    """Why a call cannot take this kernel; None if it can."""
    q, k, v = call.q, call.k, call.v
    if (reason := unsupported_device(q.device)) is not None:
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype:
        return f"q is {q.dtype} and k is {k.dtype}, not both bfloat16 or both float16"
    if call.result_dtype != q.dtype:
        return f"out_dtype is {call.out_dtype}"
    dims = call.head_dim, call.head_dim_v
    if max(dims) > 256 or any(d % 8 for d in dims) or width_of(dims[1]) > width_of(dims[0]):
        return f"head_dim is {dims[0]}, head_dim_v {dims[1]}: not multiples of 8, v's no wider"
    for name in NOT_CARRIED:
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.dropout_p > 0.0:
        return "it has no dropout_p"
    if not LEAST_SCALE <= call.scale <= 1.0 / LEAST_SCALE:
        return f"softmax_scale is {call.softmax_scale}"
    if call.softcap and not LEAST_SCALE <= call.softcap <= MOST_SOFTCAP:
        return f"softcap is {call.softcap}"
    if call.block_table is not None:
        page_size = call.page_size
        if page_size < 16 or page_size & (page_size - 1):
            return f"page_size is {page_size}, not a power of two from 16 on"
        if any(x.stride(2) <= 0 or x.stride(0) % x.stride(2) for x in (k, v)):
            return "pages do not lie a whole number of slots apart"
    if any(is_misaligned(x, x.dim() - 1) for x in (q, k, v)) or 0 in k.shape:
        return "q, k or v is not aligned to 16 bytes"
    if call.layout is not None:
        if is_bound(call.window_size_left) or (call.window_right and is_bound(call.window_right)):
            return "it has no windows beside a layout"
        if _key_bound(call) > 2**27 or number_of_entries(call.layout, LEAST_KEYS) >= 2**30:
            return "the blocks of the layout are too many to be numbered in 32 bits"
    return None


def unprofitable(call: AttentionCall) -> str | None:
    """Why a call is better off with tiles of few rows, or with keys that several programs share;
    None if it is not."""
    rows = _mean_length(call) * _sharing_heads(call)
    if rows <= BLOCK_M:
        return f"a sequence has {rows} rows for each head of keys"
    tiles = -(-call.total_q * call.num_heads // (2 * BLOCK_M))
    if 2 * tiles < target_of(call.q.device).multiprocessors:
        return f"{tiles} tiles do not fill the chip"
    return None


def is_misaligned(x: Tensor, axes: int) -> bool:
    """Whether the accelerator cannot address x: addresses and strides are multiples of 16 bytes."""
    strides = x.stride()[:axes]
    # what is traced has no address yet
    is_off = not is_traced() and x.data_ptr() % 16 != 0
    return is_off or any(s * x.itemsize % 16 or s <= 0 for s in strides)


def width_of(dim: int) -> int:
    """A head as it lies in shared memory."""
    return max(64, next_power_of_2(dim))


def is_bound(window: int) -> bool:
    """Whether a window hides keys."""
    return 0 <= window < UNBOUNDED


def _key_bound(call: AttentionCall) -> int:
    """How many keys a sequence may have."""
    if call.block_table is None:
        return call.k.shape[0]
    return call.block_table.shape[1] * call.page_size


def _mean_length(call: AttentionCall) -> int:
    return -(-call.total_q // max(call.batch, 1))


def _heads_per_layout(call: AttentionCall) -> int:
    """Query heads that share a layout."""
    if call.layout is None:
        return 1
    return call.num_heads // call.layout.crow_indices.shape[-2]


def _sharing_heads(call: AttentionCall) -> int:
    """Query heads that read the same keys."""
    return min(call.group_size, _heads_per_layout(call)) if call.layout else call.group_size


def _pages_in_atoms(call: AttentionCall) -> bool:
    """Whether pages are so small that their boxes are better loaded whole: see `atoms_of_rows`."""
    is_small = 0 < call.page_size < 32 and call.layout is None
    return is_small and all(
        x.shape[-1] % 64 == 0 and x.stride(0) // x.stride(2) % 8 == 0 for x in (call.k, call.v)
    )


def pack_heads(sharing_heads: int, length: int) -> int:
    """Of heads that read the same keys, how many share a tile: one, unless `length` queries would
    not fill it."""
    pack = 1
    while sharing_heads % (2 * pack) == 0 and pack * length < 2 * BLOCK_M and pack < BLOCK_M:
        pack *= 2
    return pack


def choose_tiles(call: AttentionCall) -> tuple[HopperConfig, int]:
    """Tiles, and how many heads share one. Of a call's sizes, they depend on its mean length."""
    mean_length, layout = _mean_length(call), call.layout
    is_causal = call.window_right == 0
    config = choose_hopper_config(
        width_of(call.head_dim), mean_length, is_causal, layout is not None
    )
    # a tile holds one row of a layout, where heads share it
    length = mean_length if layout is None else min(mean_length, layout.q_block_size)
    return config, pack_heads(_sharing_heads(call), length)


def options_of(call: AttentionCall, config: HopperConfig, packed_heads: int) -> Options:
    """What the kernel is compiled for; no size and no address is part of it."""
    layout = call.layout
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
        HEADS_PER_LAYOUT=_heads_per_layout(call),
        KV_STEP=config.BLOCK_N // keys_per_entry if layout else config.BLOCK_N,
        # many boxes to a tile are loaded by two producers
        KV_PARTS=2 if call.page_size > 0 and boxes >= 4 else 1,
        CONSUMERS=config.CONSUMERS,
        KV_STAGES=config.KV_STAGES,
        Q_STAGES=config.Q_STAGES,
        REGISTERS=config.REGISTERS,
        PINGPONG=config.PINGPONG,
    )


def _rows_of_box(page_size: int, keys_per_entry: int) -> int:
    """Rows of keys that the accelerator loads at once: of one page and of one entry of a list."""
    return min(page_size or keys_per_entry, keys_per_entry)


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


def grid_of(call: AttentionCall, options: Options) -> int:
    """Programs: one for each multiprocessor, if there are as many tiles."""
    tokens = options.CONSUMERS * options.TOKENS
    tiles = most_tiles(call.total_q, call.batch, tokens, options.HAS_LAYOUT)
    units = tiles * (call.num_heads // options.PACKED_HEADS)
    return min(units, target_of(call.q.device).multiprocessors)


def boxes_of(call: AttentionCall, out: Tensor, options: Options) -> "tuple[Boxes, ...]":
    """How the accelerator finds rows of tensors like q, k, v and out."""
    from torch_paged_attn.backends.triton.hopper.tma import atoms_of_rows, ragged_rows

    # (rows, heads, dim), whether the rows are tokens or slots of pages
    k, v = (x if call.page_size == 0 else x[0].transpose(0, 1) for x in (call.k, call.v))
    of_keys = atoms_of_rows if _pages_in_atoms(call) else functools.partial(ragged_rows, heads=1)
    rows = _rows_of_box(call.page_size, options.KEYS_PER_ENTRY)
    heads, tokens = options.PACKED_HEADS, options.TOKENS
    return (
        ragged_rows(call.q, rows=tokens, heads=heads, width=options.WIDTH),
        of_keys(k, rows=rows, width=options.WIDTH),
        of_keys(v, rows=rows, width=options.WIDTH_V),
        ragged_rows(out, rows=tokens, heads=heads, width=options.WIDTH_V),
    )


def tile_options_of(options: Options) -> TileOptions:
    """What the kernel that lists the tiles is compiled for."""
    return TileOptions(
        IS_PAGED=options.PAGE_SIZE > 0,
        IS_CAUSAL=options.IS_CAUSAL,
        IS_ALIGNED=options.HAS_LAYOUT,
        TOKENS=options.CONSUMERS * options.TOKENS,
        BLOCK_N=options.BLOCK_N,
    )


def attend(call: AttentionCall, config: HopperConfig | None = None) -> tuple[Tensor, Tensor]:
    """Plan a call for which `unsupported` has no reason, and launch the kernels."""
    plan = plan_attention(call, config)
    return plan(tuple(call.given_tensors().values()), None)


def plan_attention(call: AttentionCall, config: HopperConfig | None = None) -> Plan:
    """A plan for the given tensors of calls like this one, in the order of the op's list."""
    from torch_paged_attn.backends.triton.hopper.attention_kernel import (
        _hopper_attention_fwd_kernel,
    )

    results = call.new_results()
    new_out, new_lse = map(Allocation.like, results)
    if call.total_q == 0:
        return lambda tensors, addresses: (new_out(), new_lse())
    chosen, packed_heads = choose_tiles(call)
    options = options_of(call, config or chosen, packed_heads)
    max_keys = min(_key_bound(call), 2**31 - 1)
    list_tiles = plan_tile_list(
        call.batch, call.total_q, max_keys, tile_options_of(options), call.q.device
    )
    build_lists, lists_per_head = None, 0
    if (layout := call.layout) is not None:
        shape = options.QUERIES_PER_LIST, options.KEYS_PER_ENTRY
        build_lists = plan_block_lists(layout, *shape, _key_bound(call), options.IS_CAUSAL)
        lists_per_head = number_of_lists(layout, shape[0], _key_bound(call))
    q_boxes, k_boxes, v_boxes, out_boxes = boxes_of(call, results[0], options)
    # what is not given is the None behind the tensors
    names = list(call.given_tensors())
    places = {name: i for i, name in enumerate(names)}
    pick = operator.itemgetter(*(places.get(name, len(names)) for name in READ_BY_ADDRESS))
    pick_layout = operator.itemgetter(*(places[name] for name in LAYOUT)) if layout else None
    launch = Launch(
        _hopper_attention_fwd_kernel,
        (grid_of(call, options),),
        scalars=scalars_of(call, packed_heads),
        **sizes_of(call, lists_per_head)._asdict(),
        OPTIONS=options,
        num_warps=4,
    )

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        out, lse = new_out(), new_lse()
        *lengths, block_table, alibi_slopes, sinks = pick((*tensors, None))
        entries = spans = None
        if build_lists is not None and pick_layout is not None:
            entries, spans = build_lists(*pick_layout(tensors))
        if not launch.is_ready or addresses is None:
            q, k, v = tensors[:3]
            tile_list = list_tiles(Lengths(*lengths))
            launch(
                q_boxes.at(q.data_ptr()),
                k_boxes.at(k.data_ptr()),
                v_boxes.at(v.data_ptr()),
                out_boxes.at(out.data_ptr()),
                Pointers(lse, tile_list, block_table, entries, spans, alibi_slopes, sinks),
            )
            return out, lse
        *starts, table, slopes, sink = pick((*addresses, None))
        tile_list, boxes_at = list_tiles(Lengths(*lengths), tuple(starts)), launch.map_arguments
        lists = tuple(None if x is None else x.data_ptr() for x in (entries, spans))
        launch.start(
            *boxes_at(0, q_boxes, addresses[0]),
            *boxes_at(1, k_boxes, addresses[1]),
            *boxes_at(2, v_boxes, addresses[2]),
            *boxes_at(3, out_boxes, out.data_ptr()),
            (lse.data_ptr(), tile_list.data_ptr(), table, *lists, slopes, sink),
        )
        return out, lse

    return run
