"""`flash_varlen_backward` on Hopper, with the tensor memory accelerator and warpgroup products.

The tile that a program works on *stays* in shared memory; tiles of the other side *pass by*, one
after the other. A deterministic call, the default, takes two kernels: in one, tiles of keys stay
and give dK and dV; in the other, tiles of queries stay and give dQ. No number is added up by two
programs. Other calls may take *one pass*: a kernel for all three, which needs five products instead
of seven for a pair of tiles, and adds parts of dQ to float32 sums in memory, in any order.

`unsupported` says what these kernels leave to the portable ones.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.backward_preprocess import (
    STATISTICS_ROWS,
    plan_statistics,
)
from torch_paged_attn.backends.triton.common.key_tiles import KeyTiles
from torch_paged_attn.backends.triton.common.seqlen_info import num_tiles
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.backward.arguments import (
    BackwardOptions,
    BackwardPointers,
    BackwardScalars,
)
from torch_paged_attn.backends.triton.hopper.schedule import tile_scheduler
from torch_paged_attn.backends.triton.runtime.contiguous import picker
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.backends.triton.tuning.hopper import (
    HopperBackwardConfig,
    choose_keys_config,
    choose_one_pass_config,
    choose_queries_config,
)
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops.lacking import lacking

if TYPE_CHECKING:
    from torch_paged_attn.backends.triton.hopper.common.tma import Boxes

# rows of the tile that stays, of one consumer: the height of a warpgroup's product
STAY = 64

# how one pass adds up dQ: the numbers of `sums.py`
NONE, BY_BOX, BY_LANE = 0, 1, 2

# the sums that a consumer adds lie in boxes with rows of 128 bytes, which are no rows of dQ
ROW_OF_SUMS = 32

# tensors that a plan takes of a call
TAKEN = (
    "dout", "dlse", "q", "k", "v", "out", "softmax_lse", "cu_seqlens_q", "cu_seqlens_k",
    "seqused_k", "alibi_slopes", "sinks",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Configs:
    """Tiles of the kernels of a call."""

    keys: HopperBackwardConfig
    queries: HopperBackwardConfig | None  # None in one pass


def unsupported(call: BackwardCall) -> str | None:
    """Why a call cannot take these kernels; None if it can."""
    forward = call.forward
    if (reason := support.unsupported(forward)) is not None:
        return reason
    if (lacked := lacking(forward, support.OF_LISTS)) is not None:
        return f"it has no {lacked}"
    if forward.block_table is not None or forward.layout is not None:
        return "it has no backward through pages or layouts"
    widths = support.width_of(forward.head_dim), support.width_of(forward.head_dim_v)
    if widths not in ((64, 64), (128, 128), (256, 256), (256, 128)):
        return f"head_dim is {forward.head_dim}, head_dim_v {forward.head_dim_v}"
    if forward.total_q == 0:
        return "there are no queries"
    return None


def choose_configs(call: BackwardCall) -> Configs:
    """Tiles of the kernels of a call. The only size that they depend on is the mean length."""
    from torch_paged_attn.backends.triton.hopper.common.tma import HAS_ADD

    forward = call.forward
    width, width_v = support.width_of(forward.head_dim), support.width_of(forward.head_dim_v)
    dq, dk, dv, *_ = call.wanted
    mean_length = forward.total_q // max(forward.batch, 1)
    one_pass = None
    if not call.deterministic and dq and (dk or dv):
        has_window = support.is_bound(forward.window_size_left)
        one_pass = choose_one_pass_config(width, mean_length, has_window)
    if one_pass is None:
        columns = support.columns_of(forward.head_dim)
        queries = choose_queries_config(width, width_v, columns, mean_length)
        return Configs(choose_keys_config(width, width_v, columns), queries)
    if one_pass.DQ_SUMS == BY_BOX and not HAS_ADD:
        one_pass = dataclasses.replace(one_pass, DQ_SUMS=BY_LANE)
    return Configs(one_pass, None)


def rows_of(config: HopperBackwardConfig) -> int:
    """Rows of the tile that stays."""
    return STAY if config.IS_SPLIT else config.CONSUMERS * STAY


def _is_apart(call: AttentionCall) -> bool:
    """Whether tiles all of whose keys exist get code of their own, without a mask. A call without
    windows needs it: there the compiler masks each tile, and branches around the mask only where
    there is a window. At head_dim 128 the mask costs nothing."""
    is_full = not support.is_bound(call.window_size_left) and not support.is_bound(
        call.window_right
    )
    return is_full and support.width_of(call.head_dim) == 64


def options_of(call: AttentionCall, config: HopperBackwardConfig) -> BackwardOptions:
    """The options that a kernel is compiled for; no size and no address is among them."""
    return BackwardOptions(
        TILE=rows_of(config),
        STAY=STAY,
        WIDTH=support.width_of(call.head_dim),
        WIDTH_V=support.width_of(call.head_dim_v),
        COLUMNS=support.columns_of(call.head_dim),
        GROUP_SIZE=call.group_size,
        HAS_LEFT=support.is_bound(call.window_size_left),
        HAS_RIGHT=support.is_bound(call.window_right),
        IS_CAUSAL=call.window_right == 0,
        HAS_SOFTCAP=call.softcap > 0.0,
        IS_APART=_is_apart(call),
        **dataclasses.asdict(config),
    )


def scalars_of(call: AttentionCall, heads: int) -> BackwardScalars:
    """Numbers that follow from a call's description. `heads`: of the tiles that stay, num_kv_heads
    or num_heads."""
    of_scores: dict[str, Any] = support.scalars_of_scores(call)
    return BackwardScalars(heads=heads, scale=call.scale, **of_scores)


def _like(x: Tensor) -> Tensor:
    """A contiguous tensor of x's shape, without memory."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _rows(x: Tensor, rows: int, width: int) -> "Boxes":
    """Boxes of `rows` rows of one head of x. `width`: of a head as it lies in shared memory."""
    from torch_paged_attn.backends.triton.hopper.common.tma import ragged_rows

    return ragged_rows(x, rows, 1, width)


def _statistics_tiles(call: AttentionCall) -> int:
    return num_tiles(call.total_q, call.batch, STATISTICS_ROWS, 1)


def _launch(
    kernel: Any, call: AttentionCall, options: BackwardOptions, *, of_keys: bool, is_beside: bool
) -> Launch:
    """The launch of one of the kernels.

    of_keys: whether tiles of keys stay
    is_beside: whether the kernel may start before the last one ends, whose results it does not read
    """
    rows, heads = call.total_q, call.num_heads
    if of_keys:
        rows, heads = call.k.shape[0], call.num_kv_heads
    units = tile_scheduler.most_tiles(rows, call.batch, options.TILE, False) * heads
    return Launch(
        kernel,
        (min(units, target_of(call.q.device).multiprocessors),),
        batch=call.batch,
        statistics_tiles=_statistics_tiles(call),
        scalars=scalars_of(call, heads),
        OPTIONS=options,
        num_warps=4,
        **({"launch_pdl": True} if is_beside else {}),
    )


def _start(
    launch: Launch,
    boxes: "tuple[Boxes | None, ...]",
    tensors: tuple[Any, ...],
    pointers: BackwardPointers,
) -> None:
    """Launch a kernel that takes tensor maps of these tensors, but where there are no boxes."""
    pairs = zip(boxes, tensors, strict=True)
    launch(*(None if of is None else of.at(x.data_ptr()) for of, x in pairs), pointers)


def _plan_keys(
    call: BackwardCall, config: HopperBackwardConfig
) -> tuple[KeyTiles, Callable[..., None]]:
    """The tiles of keys, and the launch of dK, dV and in one pass the sums of dQ: it takes q, dout,
    k, v, the statistics, dk, dv and the sums, and pointers."""
    from torch_paged_attn.backends.triton.hopper.backward.kernel import _hopper_backward_keys_kernel
    from torch_paged_attn.backends.triton.hopper.common.tma import plain_rows

    forward, passing, options = call.forward, config.PASS, options_of(call.forward, config)
    kernel = _hopper_backward_keys_kernel
    launch = _launch(kernel, forward, options, of_keys=True, is_beside=False)
    tile, width, width_v = options.TILE, options.WIDTH, options.WIDTH_V
    of_sums = None
    if config.DQ_SUMS == BY_BOX:
        rows = passing * width // config.CONSUMERS // ROW_OF_SUMS
        of_sums = plain_rows(torch.float32, ROW_OF_SUMS, rows)
    boxes = (
        _rows(forward.q, passing, width),
        _rows(call.dout, passing, width_v),
        _rows(forward.k, tile, width),
        _rows(forward.v, tile, width_v),
        plain_rows(torch.float32, 2 * STATISTICS_ROWS),
        _rows(_like(forward.k), tile, width),
        _rows(_like(forward.v), tile, width_v),
        of_sums,
    )
    return KeyTiles(tile, passing, options.IS_CAUSAL), functools.partial(_start, launch, boxes)


def _plan_queries(
    call: BackwardCall, config: HopperBackwardConfig, *, is_beside: bool
) -> tuple[Callable[..., Tensor], Callable[..., None]]:
    """What lists the tiles of queries, and the launch of dQ: it takes q, dout, k, v and dq, and
    pointers."""
    from torch_paged_attn.backends.triton.hopper.backward.kernel import (
        _hopper_backward_queries_kernel,
    )

    forward, passing, options = call.forward, config.PASS, options_of(call.forward, config)
    kernel = _hopper_backward_queries_kernel
    launch = _launch(kernel, forward, options, of_keys=False, is_beside=is_beside)
    tile_options = tile_scheduler.TileOptions(
        IS_PAGED=False,
        IS_CAUSAL=forward.window_right == 0,
        IS_ALIGNED=False,
        TOKENS=options.TILE,
        BLOCK_N=passing,
        **tile_scheduler.UNCUT,
    )
    list_tiles = tile_scheduler.plan_tile_list(
        forward.batch, forward.total_q, forward.k.shape[0], tile_options, forward.q.device
    )
    boxes = (
        _rows(forward.q, STAY, options.WIDTH),
        _rows(call.dout, STAY, options.WIDTH_V),
        _rows(forward.k, passing, options.WIDTH),
        _rows(forward.v, passing, options.WIDTH_V),
        _rows(_like(forward.q), STAY, options.WIDTH),
    )
    return list_tiles, functools.partial(_start, launch, boxes)


def _plan_sums(call: AttentionCall) -> tuple[Allocation, Any]:
    """Memory for the sums of dQ, and a launch that computes dq from them. It is called with sums,
    dq and cu_seqlens_q."""
    from torch_paged_attn.backends.triton.hopper.backward.sums import _finish_sums_kernel

    device, width = call.q.device, support.width_of(call.head_dim)
    tiles = _statistics_tiles(call)
    finish = Launch(
        _finish_sums_kernel,
        (2 * tiles, call.num_heads),
        batch=call.batch,
        total_q=call.total_q,
        scale=call.scale,
        HEAD_DIM=call.head_dim,
        ROWS=STATISTICS_ROWS,
        COLUMNS=width // 2,
        num_warps=4,
    )
    new_sums = Allocation((call.num_heads, tiles, STATISTICS_ROWS * width), torch.float32, device)
    return new_sums, finish


def _must_copy(dout: Tensor) -> bool:
    """Whether the accelerator cannot address dout: it may be expanded, or have any strides."""
    return dout.stride(-1) != 1 or support.is_misaligned(dout, dout.dim() - 1)


def _copy(dout: Tensor) -> Tensor:
    return dout.clone(memory_format=torch.contiguous_format)


def differentiate(call: BackwardCall, configs: Configs | None = None) -> tuple[Tensor, ...]:
    """Plan a call for which `unsupported` has no reason, and launch the kernels."""
    given = tuple(x for x in call.tensors().values() if x is not None)
    return plan_backward(call, configs)(given, None)


def plan_backward(call: BackwardCall, configs: Configs | None = None) -> Plan:
    """A plan for the given tensors of calls like this one, in the order of the op's list."""
    if must_copy := _must_copy(call.dout):
        call = dataclasses.replace(call, dout=_copy(call.dout))
    forward = call.forward
    configs = configs or choose_configs(call)
    wants_dq, wants_dk, wants_dv, _, wants_dsinks = call.wanted
    is_one_pass = configs.keys.DQ_SUMS != NONE
    new_results = [Allocation.like(x) for x in call.new_results()]
    # a kernel writes all of its results, those that are not wanted to memory that nobody reads
    spare = [Allocation(x.shape, x.dtype, x.device) for x in (forward.q, forward.k, forward.v)]
    key_tiles = start_keys = list_queries = start_queries = None
    if wants_dk or wants_dv or is_one_pass:
        key_tiles, start_keys = _plan_keys(call, configs.keys)
    statistics_of = plan_statistics(call, key_tiles=key_tiles)
    if wants_dq and configs.queries is not None:
        is_beside = start_keys is not None
        list_queries, start_queries = _plan_queries(call, configs.queries, is_beside=is_beside)
    new_sums, finish = _plan_sums(forward) if is_one_pass else (None, None)
    pick = picker([name for name, x in call.tensors().items() if x is not None], TAKEN)

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, ...]:
        dout, dlse, q, k, v, out, lse, *lengths, slopes, sinks = pick((*tensors, None))
        if must_copy:
            dout = _copy(dout)
        cu_seqlens_q = lengths[0]
        statistics, sink_parts, key_list = statistics_of(dout, dlse, out, lse, sinks, *lengths)
        made = [new() for new in new_results]
        if wants_dsinks and sink_parts is not None:
            made[4] = sink_parts.sum(1).neg_()
        dq = made[0] if wants_dq else spare[0]()
        query_list = list_queries and list_queries(tile_scheduler.Lengths(*lengths))
        sums = None
        if new_sums is not None:
            sums = new_sums()
            sums.zero_()
        pointers = BackwardPointers(cu_seqlens_q, key_list, statistics, sums, slopes)
        if start_keys is not None:
            dk = made[1] if wants_dk else spare[1]()
            dv = made[2] if wants_dv else spare[2]()
            start_keys((q, dout, k, v, statistics, dk, dv, sums), pointers)
        if start_queries is not None:
            start_queries((q, dout, k, v, dq), pointers._replace(tile_list=query_list))
        if finish is not None:
            finish(sums, dq, cu_seqlens_q)
        return tuple(made)

    return run
