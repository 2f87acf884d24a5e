"""`flash_varlen` and `blocksparse` on Hopper by tensor memory accelerator and warpgroup products.

What this kernel does not carry goes to the portable one; `unsupported` says why. Heads whose size
is no power of two lie in shared memory beside zeros that the accelerator fills in: the tensors stay
as they are.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper.block_lists import build_block_lists, number_of_entries
from torch_paged_attn.backends.triton.hopper.tile_scheduler import most_tiles, order_tiles
from torch_paged_attn.backends.triton.runtime.launch import is_traced, launch
from torch_paged_attn.backends.triton.runtime.target import next_power_of_2, target_of
from torch_paged_attn.backends.triton.softmax import LOG2E
from torch_paged_attn.backends.triton.tuning import HopperConfig, choose_hopper_config

# rows of a consumer: the height of a warpgroup's product
BLOCK_M = 64

# keys of the smallest tile
LEAST_KEYS = 64

HAS_GLUON = importlib.util.find_spec("triton.experimental.gluon.nvidia.hopper") is not None

# windows this wide hide nothing: no sequence is as long
UNBOUNDED = 2**30


# what the portable kernel has and this one has not
NOT_CARRIED = ("attn_bias", "q_descale", "k_descale", "v_descale")


def _misaligned(x: Tensor, axes: int) -> bool:
    """Whether the accelerator cannot address x: addresses and strides are multiples of 16 bytes."""
    strides = x.stride()[:axes]
    # what is traced has no address yet
    is_off = not is_traced() and x.data_ptr() % 16 != 0
    return is_off or any(s * x.itemsize % 16 or s <= 0 for s in strides)


def unavailable(device: torch.device | None = None) -> str | None:
    """Why no call on a device can take this kernel; None if some can."""
    if device is None and not torch.cuda.is_available():
        return "there is no GPU"
    if target_of(device or torch.device("cuda")).arch != "sm90":
        return "this is no Hopper chip"
    return None if HAS_GLUON else "this Triton has no Gluon for Hopper"


def unsupported(call: AttentionCall) -> str | None:
    """Why a call cannot take this kernel; None if it can."""
    q, k, v = call.q, call.k, call.v
    if (reason := unavailable(q.device)) is not None:
        return reason
    if q.dtype not in (torch.bfloat16, torch.float16) or k.dtype != q.dtype:
        return f"q is {q.dtype} and k is {k.dtype}, not both bfloat16 or both float16"
    if call.result_dtype != q.dtype:
        return f"out_dtype is {call.out_dtype}"
    dims = call.head_dim, call.head_dim_v
    if max(dims) > 256 or any(d % 8 for d in dims) or _width(dims[1]) > _width(dims[0]):
        return f"head_dim is {dims[0]}, head_dim_v {dims[1]}: not multiples of 8, v's no wider"
    for name in NOT_CARRIED:
        if getattr(call, name) is not None:
            return f"it has no {name}"
    if call.dropout_p > 0.0:
        return "it has no dropout_p"
    if call.scale <= 0.0:
        return f"softmax_scale is {call.softmax_scale}"
    if call.block_table is not None:
        page_size = call.page_size
        if page_size < 16 or page_size & (page_size - 1):
            return f"page_size is {page_size}, not a power of two from 16 on"
        if any(x.stride(2) <= 0 or x.stride(0) % x.stride(2) for x in (k, v)):
            return "pages do not lie a whole number of slots apart"
    if any(_misaligned(x, x.dim() - 1) for x in (q, k, v)) or 0 in k.shape:
        return "q, k or v is not aligned to 16 bytes"
    if call.layout is not None:
        if _is_bound(call.window_size_left) or (call.window_right and _is_bound(call.window_right)):
            return "it has no windows beside a layout"
        if _key_bound(call) > 2**27 or number_of_entries(call.layout, LEAST_KEYS) >= 2**30:
            return "the blocks of the layout are too many to be numbered in 32 bits"
    return None


def _width(dim: int) -> int:
    """A head as it lies in shared memory."""
    return max(64, next_power_of_2(dim))


def _is_bound(window: int) -> bool:
    """Whether a window hides keys."""
    return 0 <= window < UNBOUNDED


def _key_bound(call: AttentionCall) -> int:
    """How many keys a sequence may have."""
    if call.block_table is None:
        return call.k.shape[0]
    return call.block_table.shape[1] * call.page_size


def _has_atoms(call: AttentionCall) -> bool:
    """Whether pages are so small that their boxes are better loaded whole: see `rows_in_atoms`."""
    is_small = 0 < call.page_size < 32 and call.layout is None
    return is_small and all(
        x.shape[-1] % 64 == 0 and x.stride(0) // x.stride(2) % 8 == 0 for x in (call.k, call.v)
    )


def _sharing_heads(call: AttentionCall) -> int:
    """Query heads that read the same keys."""
    if call.layout is None:
        return call.group_size
    return min(call.group_size, call.num_heads // call.layout.crow_indices.shape[-2])


def _pack(heads: int, length: int) -> int:
    """Of heads that read the same keys, how many share a tile: one, unless `length` queries would
    not fill it."""
    pack = 1
    while heads % (2 * pack) == 0 and pack * length < 2 * BLOCK_M and pack < BLOCK_M:
        pack *= 2
    return pack


def _mean_length(call: AttentionCall) -> int:
    return -(-call.total_q // max(call.batch, 1))


def too_small(call: AttentionCall) -> str | None:
    """Why a call is better off with tiles of few rows, or with keys that several programs share."""
    rows = _mean_length(call) * _sharing_heads(call)
    if rows <= BLOCK_M:
        return f"a sequence has {rows} rows for each head of keys"
    units = -(-call.total_q * call.num_heads // (2 * BLOCK_M))
    if 2 * units < target_of(call.q.device).multiprocessors:
        return f"{units} tiles do not fill the chip"
    return None


def flash_varlen(call: AttentionCall, config: HopperConfig | None = None) -> tuple[Tensor, Tensor]:
    """Launch the kernel on a call for which `unsupported` has no reason."""
    from torch_paged_attn.backends.triton.hopper.attention_kernel import (
        _hopper_attention_fwd_kernel,
    )
    from torch_paged_attn.backends.triton.hopper.tma import ragged_rows, rows_in_atoms

    q, k, v, block_table, slopes = call.q, call.k, call.v, call.block_table, call.alibi_slopes
    total_q, num_heads, group_size = call.total_q, call.num_heads, call.group_size
    out, lse = call.new_results()
    if total_q == 0:
        return out, lse
    width, width_v = _width(call.head_dim), _width(call.head_dim_v)
    mean_length, layout = _mean_length(call), call.layout
    # a tile holds one row of a layout, where heads share it
    length = mean_length if layout is None else min(mean_length, layout.q_block_size)
    pack = _pack(_sharing_heads(call), length)
    left, right = call.window_size_left, call.window_right
    if config is None:
        config = choose_hopper_config(width, mean_length, right == 0, layout is not None)
    tokens = config.CONSUMERS * BLOCK_M // pack

    page_size = call.page_size
    key_bound = _key_bound(call)
    lists = None
    if layout is not None:
        lists = build_block_lists(
            layout, key_bound, is_causal=right == 0, tokens=tokens, block_n=config.BLOCK_N
        )
    run = config.BLOCK_N if lists is None else lists.keys
    key_rows = min(page_size or run, run)
    has_left, has_right = _is_bound(left), _is_bound(right)
    order = order_tiles(
        call.cu_seqlens_q,
        call.cu_seqlens_k,
        call.seqused_k,
        total_q,
        min(key_bound, 2**31 - 1),
        is_paged=page_size > 0,
        is_causal=right == 0,
        is_aligned=layout is not None,
        tokens=tokens,
        block_n=config.BLOCK_N,
    )
    # (rows, heads, dim), whether the rows are tokens or slots of pages
    k_rows, v_rows = (x if page_size == 0 else x[0].transpose(0, 1) for x in (k, v))
    key_boxes = rows_in_atoms if _has_atoms(call) else functools.partial(ragged_rows, heads=1)
    grid = min(
        most_tiles(total_q, call.batch, tokens, layout is not None) * (num_heads // pack),
        target_of(q.device).multiprocessors,
    )
    launch(
        _hopper_attention_fwd_kernel,
        (grid,),
        lse,
        order,
        ragged_rows(q, BLOCK_M // pack, pack, width),
        key_boxes(k_rows, rows=key_rows, width=width),
        key_boxes(v_rows, rows=key_rows, width=width_v),
        ragged_rows(out, BLOCK_M // pack, pack, width_v),
        block_table,
        lists and lists.entries,
        lists and lists.spans,
        call.alibi_slopes,
        call.sinks,
        0 if block_table is None else block_table.stride(0),
        k.stride(0) // k.stride(2) if page_size else 0,
        v.stride(0) // v.stride(2) if page_size else 0,
        k.shape[0],
        *((0, 0) if slopes is None else (0, *slopes.stride())[-2:]),
        num_heads,
        call.batch,
        total_q,
        left if has_left else 0,
        right if has_right else 0,
        (call.softcap or call.scale) * LOG2E.value,
        2 * call.scale / call.softcap * LOG2E.value if call.softcap > 0.0 else 0.0,
        1.0 / (call.softcap or call.scale),
        group_size // pack,
        lists.spans.shape[1] if lists and lists.spans.shape[0] > 1 else 0,
        lists.spans.shape[2] if lists else 0,
        BLOCK_M=BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        WIDTH=width,
        WIDTH_V=width_v,
        PACK=pack,
        GROUP_SIZE=group_size,
        PAGE_SIZE=page_size,
        IS_CAUSAL=right == 0,
        HAS_LEFT=has_left,
        HAS_RIGHT=has_right,
        KEYS=run,
        Q_BLOCK=layout.q_block_size if layout else 0,
        POSITIONS=lists.positions if lists else 0,
        LAYOUT_GROUP=num_heads // layout.crow_indices.shape[-2] if layout else 1,
        HAS_SOFTCAP=call.softcap > 0.0,
        CONSUMERS=config.CONSUMERS,
        STAGES=config.STAGES,
        Q_STAGES=config.Q_STAGES,
        REGISTERS=config.REGISTERS,
        TAKE_TURNS=config.TAKE_TURNS,
        num_warps=4,
    )
    return out, lse
