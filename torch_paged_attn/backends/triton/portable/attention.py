"""From a checked call to a launch: what `flash_varlen` and `blocksparse` share on the host.

Nothing here reads a tensor: grids, splits and workspaces follow from shapes.
"""

import math
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.dequant import PAIRED, as_stored, holds_pairs
from torch_paged_attn.backends.triton.portable.attention_kernel import _attention_fwd_kernel
from torch_paged_attn.backends.triton.portable.gather_scatter import chunks
from torch_paged_attn.backends.triton.portable.splits import (
    SplitPlan,
    plan_fixed_splits,
    plan_splits,
)
from torch_paged_attn.backends.triton.runtime.launch import allocate, following, launch, only_read
from torch_paged_attn.backends.triton.runtime.target import Target, next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import zeroed_counters
from torch_paged_attn.backends.triton.seqlen_info import num_tiles
from torch_paged_attn.backends.triton.softmax import LOG2E
from torch_paged_attn.backends.triton.tuning import Config, choose_config

# windows this wide hide nothing: no sequence is as long
UNBOUNDED = 2**30

# elements of partial results that a warp holds while it merges: 32 registers, on AMD chips, whose
# compiler keeps more beside them, 8 of 32 lanes
MERGED_BY_WARP = 1024
MERGED_BY_AMD_WARP = 256

# programs along the second dimension of a grid
MOST_IN_GRID = 65535

# terms of a score that are summed in float32 before they meet others: one chain over a head of 256
# would lose more bits than the formula does
FLOAT32_CHAIN = 32

# sequences that a program looks at at a time, to find its work: few kernels for all batches
SEARCH_WIDTHS = (4, 16, 64, 256, 1024)

# rows of a tile, and tiles, when results must not depend on the batch
INVARIANT_ROWS = 64
INVARIANT_TILES = 256


def _product_type(q: Tensor, is_paired: bool, target: Target) -> tl.dtype:
    """The type of the matrix products: q's, but float16 holds every 8-bit number exactly."""
    if is_paired:
        return tl.float16
    if q.dtype == torch.float32 or (q.dtype == torch.bfloat16 and not target.converts_bfloat16):
        return tl.float32
    return tl.bfloat16 if q.dtype == torch.bfloat16 else tl.float16


def _strides(x: Tensor | None, *shape: int) -> tuple[int | None, ...]:
    """Strides of a tensor broadcast to `shape`. Without one, None: what a kernel is not given costs
    a launch nothing.
    """
    return (None,) * len(shape) if x is None else x.expand(shape).stride()


def _row_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of page, head and slot; packed keys are one long page."""
    return x.stride()[:3] if x.dim() == 4 else (0, x.stride(1), x.stride(0))


def _window(size: int) -> tuple[bool, int]:
    bounded = 0 <= size < UNBOUNDED
    return bounded, size if bounded else 0


def attend(
    call: AttentionCall,
    *,
    config: Config | None = None,
    splits: SplitPlan | None = None,
) -> tuple[Tensor, Tensor]:
    """Launch the kernel. `config` and `splits` override what shapes and tables say."""
    q, k, v, block_table, layout = call.q, call.k, call.v, call.block_table, call.layout
    total_q, num_heads, head_dim = q.shape
    num_kv_heads, group_size, head_dim_v = call.num_kv_heads, call.group_size, call.head_dim_v
    batch, page_size = call.batch, call.page_size
    attn_bias, alibi_slopes, softcap = call.attn_bias, call.alibi_slopes, call.softcap
    out, lse = call.new_results()
    if total_q == 0:
        return out, lse

    target = target_of(q.device)
    key_bound = k.shape[0] if block_table is None else block_table.shape[1] * page_size
    pack = min(group_size, 64)
    if layout is not None and layout.crow_indices.shape[-2] == num_heads:
        pack = 1  # query heads of a group visit different blocks
    may_pair = q.dtype != torch.float32 and not target.is_hip and holds_pairs(k) and holds_pairs(v)
    dtype = _product_type(q, may_pair, target)
    if config is None:
        rows = -(-total_q // max(batch, 1)) * pack
        tiles = min(batch, total_q) * num_kv_heads * -(-group_size // pack)
        if environment.BATCH_INVARIANT:
            rows, tiles = INVARIANT_ROWS, INVARIANT_TILES
        itemsize = dtype.primitive_bitwidth // 8
        widest = max(head_dim, head_dim_v)
        has_scores = softcap > 0.0 or attn_bias is not None or alibi_slopes is not None
        is_plain = not has_scores and call.dropout_p == 0.0 and layout is None
        sizes = (max(rows, pack), widest, itemsize, k.itemsize, page_size, tiles, key_bound)
        is_full = not (_window(call.window_size_left)[0] or _window(call.window_right)[0])
        config = choose_config(target.arch, *sizes, is_plain, is_full)
    # a tile of few rows takes the heads of a group in turns
    block_m = config.BLOCK_M
    pack = min(pack, block_m)
    grid_heads = num_kv_heads * -(-group_size // pack)
    block_n = config.BLOCK_N
    is_paired = may_pair and block_m <= 32
    dtype = _product_type(q, is_paired, target)
    tokens = block_m // pack
    if layout is None and total_q % max(batch, 1) == 0 and not environment.BATCH_INVARIANT:
        # probably all sequences have so many queries: rows without one are work to merge
        tokens = min(tokens, next_power_of_2(total_q // max(batch, 1)))
    if layout is not None:
        tokens = min(1 << (tokens.bit_length() - 1), layout.q_block_size)
        block_n = min(block_n, layout.k_block_size)
    slack = 1 if layout is None else 2
    grid_tiles = num_tiles(total_q, batch, tokens, slack)

    units = -(-key_bound // block_n)
    if splits is None and environment.BATCH_INVARIANT:
        splits = plan_fixed_splits(grid_tiles, key_bound)
    elif splits is None:
        busy = max(min(batch, total_q), total_q // tokens)
        slots = config.resident * target.multiprocessors
        splits = plan_splits(grid_tiles, grid_heads, busy, key_bound, slots, block_m <= 64)
    # the device counts units in 32 bits
    is_split = splits.is_split and grid_tiles * units < 2**31
    has_left, left = _window(call.window_size_left)
    has_right, right = _window(call.window_right)
    scale = call.scale
    bias, stored_bias = "" if attn_bias is None else "float", attn_bias
    if attn_bias is not None and attn_bias.dtype == torch.bool:
        bias, stored_bias = "bool", attn_bias.view(torch.uint8)
    # nothing happens to the scores but the scale and masks: it joins the exponential's argument
    raw = scale > 0 and dtype != tl.float32
    raw = raw and not (softcap or alibi_slopes is not None or bias == "float")
    is_q_normed = dtype == tl.float16 and q.dtype == torch.bfloat16
    is_raised = is_paired and k.dtype == torch.int8
    raw = raw and not (is_q_normed or is_raised)
    raw = raw and call.q_descale is None and call.k_descale is None
    has_middle = layout is None and (block_m > 64 or attn_bias is not None)

    q_stored, q_format = as_stored(q, target)
    if is_paired:
        k_stored, v_stored, k_format = k.view(torch.int16), v.view(torch.int16), PAIRED[k.dtype]
    else:
        (k_stored, k_format), (v_stored, _) = as_stored(k, target), as_stored(v, target)
    out_stored, out_format = as_stored(out, target)
    parts = counters = None
    rows = next_power_of_2(tokens * pack)
    grid: tuple[int, ...] = (grid_tiles, grid_heads)
    if is_split:
        height = -(-splits.programs // MOST_IN_GRID)
        grid = (grid_heads, -(-splits.programs // height), height)
        programs = math.prod(grid)
        part_rows = 2 * programs * rows
        parts = allocate((part_rows * (head_dim_v + 1),), torch.float32, q.device)
        counters = zeroed_counters(programs, q.device)
    crow, col = (None, None) if layout is None else (layout.crow_indices, layout.col_indices)
    crow_strides = (None,) * 3 if crow is None else (0, *crow.stride())[-3:]
    col_strides = (None,) * 3 if col is None else (0, *col.stride())[-3:]
    smallest = target.smallest_chunk(block_m)
    if is_paired:
        k_low, v_low = k_high, v_high = head_dim // 2, head_dim_v // 2
    else:
        (k_low, k_high), (v_low, v_high) = chunks(head_dim, smallest), chunks(head_dim_v, smallest)
    options: dict[str, Any] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if target.is_hip and config.waves_per_eu:
        options["waves_per_eu"] = config.waves_per_eu
    if config.maxnreg and target.arch.startswith("sm"):
        options["maxnreg"] = config.maxnreg

    fixed_args = (
        *q.stride()[:2],
        *_row_strides(k_stored),
        *_row_strides(v_stored),
        None if block_table is None else block_table.stride(0),
        *crow_strides,
        *col_strides,
        *_strides(stored_bias, num_heads, -1, -1),
        None if attn_bias is None else attn_bias.shape[2],
        *_strides(alibi_slopes, batch, num_heads),
        *_strides(call.q_descale, batch, num_kv_heads),
        *_strides(call.k_descale, batch, num_kv_heads),
        *_strides(call.v_descale, batch, num_kv_heads),
        total_q,
        min(key_bound, 2**31 - 1),
        k.shape[0],
        batch,
        num_heads,
        crow.shape[-1] - 1 if crow is not None else None,
        col.shape[-1] if col is not None else None,
        left if has_left else None,
        right if has_right else None,
        scale,
        (scale if raw else 1.0) * LOG2E.value,
        softcap or None,
        int(call.dropout_p * 2.0**32) or None,
        1.0 / (1.0 - call.dropout_p) if call.dropout_p else None,
        -(-splits.min_keys // block_n),
    )
    looked_at = batch if is_split else 0
    search_width = next((w for w in SEARCH_WIDTHS if looked_at <= w), SEARCH_WIDTHS[-1])
    options |= dict(
        HEAD_DIM=head_dim,
        K_LOW=k_low,
        K_HIGH=k_high,
        HEAD_DIM_V=head_dim_v,
        V_LOW=v_low,
        V_HIGH=v_high,
        GROUP_SIZE=group_size,
        PACK=pack,
        TOKENS=tokens,
        SLACK=slack,
        PAGE_SIZE=page_size,
        Q_BLOCK=0 if layout is None else layout.q_block_size,
        K_BLOCK=0 if layout is None else layout.k_block_size,
        LAYOUT_GROUP=num_heads // crow.shape[-2] if crow is not None else 1,
        HAS_LEFT=has_left,
        HAS_RIGHT=has_right,
        HAS_SOFTCAP=softcap > 0.0,
        BIAS=bias,
        RAW_SCORES=raw,
        CHAIN=FLOAT32_CHAIN if dtype == tl.float32 else config.chain,
        FIRST_PHASE=(0 if has_left else 1) if has_middle else 2,
        IS_SPLIT=is_split,
        ROWS=rows,
        BLOCK_MERGED=(MERGED_BY_AMD_WARP if target.is_hip else MERGED_BY_WARP) * config.num_warps,
        FIXED_UNITS=splits.fixed_keys // block_n,
        SEARCH_WIDTH=search_width,
        IS_ONE_LOOK=looked_at <= search_width,
        Q_FORMAT=q_format,
        K_FORMAT=k_format,
        IS_V_LIKE_K=_row_strides(k_stored) == _row_strides(v_stored),
        IS_PAIRED=is_paired,
        HAS_PTX=target.converts_float8,
        IS_Q_NORMED=is_q_normed,
        OUT_FORMAT=out_format,
        DTYPE=dtype,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
    )
    options |= following(target.overlaps_launches)
    args = (
        q_stored,
        k_stored,
        v_stored,
        out_stored,
        lse,
        parts,
        counters,
        *only_read(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k),
        block_table,
        crow,
        col,
        stored_bias,
        alibi_slopes,
        call.sinks,
        call.q_descale,
        call.k_descale,
        call.v_descale,
        call.out_scale,
        call.rng_state if call.dropout_p > 0.0 else None,
        *fixed_args,
    )
    launch(_attention_fwd_kernel, grid, *args, **options)
    return out, lse
