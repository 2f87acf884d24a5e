"""The arguments of the attention kernel, in the groups of `groups.py`, made of a checked call.

A later call that differs in sizes only needs new `pointers` and `sizes`; with a bias, whose strides
depend on its size, also new `strides`.
"""

import math

import torch
import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import (
    LATENT_COLUMNS,
    AttentionCall,
    is_by_column,
    is_by_token,
)
from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.common.page_sizes import compiled_size, size_at_run_time
from torch_paged_attn.backends.triton.common.seqlen_info import is_bound, key_bound
from torch_paged_attn.backends.triton.common.softmax import LOG2E
from torch_paged_attn.backends.triton.portable.common import gather_scatter, groups
from torch_paged_attn.backends.triton.portable.common.formats import Formats
from torch_paged_attn.backends.triton.portable.forward.tiles import Tiles
from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.backends.triton.runtime.target import Target, next_power_of_2
from torch_paged_attn.backends.triton.tuning import Config

# elements of partial results that a warp holds while it merges them: 32 registers per thread; on
# AMD GPUs, whose compiler needs more registers for other values, 8
MERGED_BY_WARP = 1024
MERGED_BY_AMD_WARP = 256

# a float32 score is the sum of sums of so many products each: one sum over a head_dim of 256 would
# be less accurate than the reference
FLOAT32_CHAIN = 32

# up to so many positions from one run of a rank's keys to its next (key_interleave * key_ranks),
# key positions are computed in 32 bits
MOST_IN_ROUND = 1 << 16


def row_strides(x: Tensor) -> tuple[int, ...]:
    """Strides of page, head and slot of keys or values, or of scales of their columns; packed ones
    are one long page."""
    return x.stride()[:3] if x.dim() == 4 else (0, x.stride(1), x.stride(0))


def _broadcast_strides(x: Tensor | None, *shape: int) -> tuple[int | None, ...]:
    """Strides of a tensor broadcast to `shape`; None for each dimension if there is no tensor."""
    return (None,) * len(shape) if x is None else x.expand(shape).stride()


def _scale_strides(
    x: Tensor | None, stored: Tensor, batch: int, heads: int
) -> tuple[int | None, ...]:
    """Strides of sequence, head, page, slot and column of a descale; None for those that it has
    not.

    stored: the keys or values
    """
    if not is_by_token(x, batch):
        return *_broadcast_strides(x, batch, heads), None, None, None
    assert x is not None
    is_of_columns = is_by_column(x, stored)
    page, head, slot = row_strides(x if is_of_columns else x[..., None])
    return None, head, page, slot, x.stride(-1) if is_of_columns else None


def _has_raw_scores(call: AttentionCall, formats: Formats) -> bool:
    """Whether scores are only multiplied by scales of keys by token and by one scale, which is not
    negative, and masked.
    """
    is_changed = call.softcap or call.alibi_slopes is not None
    is_changed = is_changed or (call.attn_bias is not None and call.attn_bias.dtype != torch.bool)
    is_raised = formats.is_paired and call.k.dtype in (torch.int8, torch.uint8)
    is_scaled = call.q_descale is not None or formats.is_q_normed or is_raised
    scales = [call.k_descale] if call.q_latent is None else [call.k_descale, call.v_descale]
    is_scaled = is_scaled or any(x is not None and not is_by_token(x, call.batch) for x in scales)
    return call.scale > 0 and not formats.is_precise and not (is_changed or is_scaled)


def pointers(
    call: AttentionCall,
    formats: Formats,
    target: Target,
    results: tuple[Tensor, Tensor],
    workspace: tuple[Tensor | None, Tensor | None],
    seen_tiles: Tensor | None,
) -> groups.Pointers:
    """The pointers of a call.

    results: out and softmax_lse
    workspace: partial results and counters, if tiles are shared by programs
    seen_tiles: the map of a mask, if there is one
    """
    k, v, bias, layout = call.k, call.v, call.attn_bias, call.layout
    if formats.is_paired:
        k, v = k.view(torch.int16), v.view(torch.int16)
    else:
        k, v = as_stored(k, target)[0], as_stored(v, target)[0]
    if bias is not None and bias.dtype == torch.bool:
        bias = bias.view(torch.uint8)
    tail_mask, latent = call.tail_mask, call.q_latent
    return groups.Pointers(
        q=as_stored(call.q, target)[0],
        k=k,
        v=v,
        out=as_stored(results[0], target)[0],
        lse=results[1],
        parts=workspace[0],
        counters=workspace[1],
        cu_seqlens_q=call.cu_seqlens_q,
        cu_seqlens_k=call.cu_seqlens_k,
        seqused_k=call.seqused_k,
        block_table=call.block_table,
        crow=None if layout is None else layout.crow_indices,
        col=None if layout is None else layout.col_indices,
        bias=bias,
        alibi=call.alibi_slopes,
        sinks=call.sinks,
        q_descale=call.q_descale,
        k_descale=call.k_descale,
        v_descale=call.v_descale,
        out_scale=call.out_scale,
        rng=call.rng_state if call.dropout_p > 0.0 else None,
        q_latent=None if latent is None else as_stored(latent, target)[0],
        tail_mask=None if tail_mask is None else tail_mask.view(torch.uint8),
        k_start=call.k_start,
        q_position=call.q_position,
        seen_tiles=seen_tiles,
    )


def strides(
    call: AttentionCall, kernel_pointers: groups.Pointers | AttentionCall
) -> groups.Strides:
    """The strides of a call's tensors. `kernel_pointers` has k and v as the kernel reads them."""
    batch, num_heads, num_kv_heads = call.batch, call.num_heads, call.num_kv_heads
    k_page, k_head, k_slot = row_strides(kernel_pointers.k)
    v_page, v_head, v_slot = row_strides(kernel_pointers.v)
    bias_head, bias_token, bias_key = _broadcast_strides(call.attn_bias, num_heads, -1, -1)
    alibi_batch, alibi_head = _broadcast_strides(call.alibi_slopes, batch, num_heads)
    q_batch, q_head = _broadcast_strides(call.q_descale, batch, num_kv_heads)
    kd_batch, kd_head, kd_page, kd_slot, _ = _scale_strides(
        call.k_descale, call.k, batch, num_kv_heads
    )
    vd_batch, vd_head, vd_page, vd_slot, vd_column = _scale_strides(
        call.v_descale, call.v, batch, num_kv_heads
    )
    tail = call.tail_mask
    latent = call.q_latent
    latent_token, latent_head = (None, None) if latent is None else latent.stride()[:2]
    tail_token, tail_key = (None, None) if tail is None else tail.stride()
    return groups.Strides(
        q_token=call.q.stride(0),
        q_head=call.q.stride(1),
        k_page=k_page,
        k_head=k_head,
        k_slot=k_slot,
        v_page=v_page,
        v_head=v_head,
        v_slot=v_slot,
        crow=None if call.layout is None else call.layout.crow_indices.stride(-1),
        col=None if call.layout is None else call.layout.col_indices.stride(-1),
        bias_head=bias_head,
        bias_token=bias_token,
        bias_key=bias_key,
        bias_width=None if call.attn_bias is None else call.attn_bias.shape[2],
        alibi_batch=alibi_batch,
        alibi_head=alibi_head,
        q_descale_batch=q_batch,
        q_descale_head=q_head,
        k_descale_batch=kd_batch,
        k_descale_head=kd_head,
        v_descale_batch=vd_batch,
        v_descale_head=vd_head,
        k_descale_page=kd_page,
        k_descale_slot=kd_slot,
        v_descale_page=vd_page,
        v_descale_slot=vd_slot,
        v_descale_column=vd_column,
        latent_token=latent_token,
        latent_head=latent_head,
        tail_token=tail_token,
        tail_key=tail_key,
        tail_width=None if tail is None else tail.shape[1],
    )


def scalars(call: AttentionCall, formats: Formats, tiles: Tiles) -> groups.Scalars:
    """The scalars of a call."""
    left, right, dropout_p = call.window_size_left, call.window_right, call.dropout_p
    return groups.Scalars(
        scale=call.scale,
        factor=(call.scale if _has_raw_scores(call, formats) else 1.0) * LOG2E.value,
        softcap=call.softcap or None,
        left=left if is_bound(left) else None,
        right=right if is_bound(right) else None,
        dropout_threshold=int(dropout_p * 2.0**32) or None,
        dropout_scale=1.0 / (1.0 - dropout_p) if dropout_p else None,
        num_heads=call.num_heads,
        key_rank=call.key_rank if call.key_ranks > 1 else None,
        min_units=tiles.min_units,
        page_size=size_at_run_time(call),
    )


def sizes(call: AttentionCall) -> groups.Sizes:
    """The sizes of a call."""
    crow_batch = crow_head = col_batch = col_head = layout_rows = nnz = None
    if call.layout is not None:
        crow, col = call.layout.crow_indices, call.layout.col_indices
        crow_batch, crow_head, _ = (0, *crow.stride())[-3:]
        col_batch, col_head, _ = (0, *col.stride())[-3:]
        layout_rows, nnz = crow.shape[-1] - 1, col.shape[-1]
    return groups.Sizes(
        total_q=call.total_q,
        batch=call.batch,
        max_keys=min(key_bound(call), 2**31 - 1),
        num_pages=call.k.shape[0],
        stride_table=None if call.block_table is None else call.block_table.stride(0),
        stride_crow_batch=crow_batch,
        stride_crow_head=crow_head,
        stride_col_batch=col_batch,
        stride_col_head=col_head,
        layout_rows=layout_rows,
        nnz=nnz,
    )


def _page_size(call: AttentionCall, block_n: int) -> int:
    """The page size that is compiled in, or what stands for it."""
    if (size := size_at_run_time(call)) is None:
        return compiled_size(call)
    return (gather_scatter.LONG_PAGES if size >= block_n else gather_scatter.SHORT_PAGES).value


def _is_loaded_first(call: AttentionCall, formats: Formats, config: Config, target: Target) -> bool:
    """Where it was measured to pay: small tiles of decodes whose loop over keys has one stage."""
    is_small = config.BLOCK_M <= 16 and max(call.head_dim, call.head_dim_v) <= 256
    is_plain = not (formats.is_paired or formats.is_precise or target.is_hip)
    return config.num_stages == 1 and is_small and is_plain


def _aligned(x: Tensor) -> int:
    """Bytes of which addresses of rows are multiples, if Triton would load numbers one by one:
    it looks for multiples of 16 alone, and rows that have their scales beside them are none.
    """
    strides = row_strides(x)
    if is_traced() or math.gcd(16, x.data_ptr() & 15, *strides) == 16:
        return 0
    found = math.gcd(16, x.data_ptr() & 15, *(s * x.itemsize for s in strides))
    return found if found >= 4 else 0


def _chunks(dim: int, stored: str, is_paired: bool, smallest: int) -> tuple[int, int, int]:
    """The step from an element of a chunk to its next one, and the sizes of the first two chunks of
    a row: see `load_kv.py`.
    """
    if is_paired:
        step = 4 if stored == "INT4" else 2
        return step, dim // step, dim // step
    if stored == "INT4":
        width = max(smallest, next_power_of_2(dim // 2))
        return 2, width, width
    return 1, *gather_scatter.chunks(dim, smallest)


def options(call: AttentionCall, formats: Formats, tiles: Tiles, target: Target) -> groups.Options:
    """The compile-time constants of a call's kernel."""
    layout, config, bias = call.layout, tiles.config, call.attn_bias
    head_dim, head_dim_v, block_m = call.head_dim, call.head_dim_v, config.BLOCK_M
    smallest = target.smallest_chunk(block_m)
    k_step, k_low, k_high = _chunks(head_dim, formats.k, formats.is_paired, smallest)
    v_step, v_low, v_high = _chunks(head_dim_v, formats.v, formats.is_paired, smallest)
    v_by_token = is_by_token(call.v_descale, call.batch)
    scaled_columns = LATENT_COLUMNS if is_by_column(call.v_descale, call.v) else 0
    if scaled_columns:
        v_step, v_low, v_high = 1, scaled_columns, scaled_columns
    has_left = is_bound(call.window_size_left)
    ranks, rng = call.key_ranks, call.rng_state
    run = call.key_interleave if ranks > 1 else 1
    # whether there is a loop without masks over the keys that every row sees
    has_middle = block_m > 64 or bias is not None or call.tail_mask is not None
    has_middle = has_middle and layout is None
    merged = MERGED_BY_AMD_WARP if target.is_hip else MERGED_BY_WARP
    return groups.Options(
        HEAD_DIM=head_dim,
        K_LOW=k_low,
        K_HIGH=k_high,
        K_STEP=k_step,
        HEAD_DIM_V=head_dim_v,
        V_LOW=v_low,
        V_HIGH=v_high,
        V_STEP=v_step,
        OUT_LOW=v_step * v_low if v_step > 1 else v_low,
        GROUP_SIZE=call.group_size,
        PACK=tiles.pack,
        TOKENS=tiles.tokens,
        GAP=tiles.gap,
        IS_PAGED=call.page_size > 0,
        PAGE_SIZE=_page_size(call, tiles.block_n),
        HAS_LAYOUT=layout is not None,
        Q_BLOCK=0 if layout is None else layout.q_block_size,
        K_BLOCK=0 if layout is None else layout.k_block_size,
        LAYOUT_GROUP=1 if layout is None else call.num_heads // layout.crow_indices.shape[-2],
        HAS_LEFT=has_left,
        HAS_RIGHT=is_bound(call.window_right),
        HAS_SOFTCAP=call.softcap > 0.0,
        KEY_RANKS=ranks,
        KEY_INTERLEAVE=run,
        KEY_POSITION="int32" if run * ranks <= MOST_IN_ROUND else "int64",
        IS_ALIGNED=layout is None or ranks == 1,
        HAS_DROPOUT_BASE=rng is not None and call.dropout_p > 0.0 and rng.shape[0] == 5,
        BIAS="" if bias is None else "bool" if bias.dtype == torch.bool else "float",
        RAW_SCORES=_has_raw_scores(call, formats),
        CHAIN=FLOAT32_CHAIN if formats.is_precise else config.chain,
        FIRST_PHASE=(0 if has_left else 1) if has_middle else 2,
        IS_SPLIT=tiles.is_split,
        PART_ROWS=tiles.part_rows,
        BLOCK_MERGED=merged * config.num_warps,
        IS_MERGED_BY_ALL=tiles.is_merged_by_all,
        FIXED_UNITS=tiles.fixed_units,
        SEARCH_WIDTH=tiles.search_width,
        IS_ONE_LOOK=tiles.is_one_look,
        Q_FORMAT=formats.q,
        K_FORMAT=formats.k,
        V_FORMAT=formats.v,
        OUT_FORMAT=formats.out,
        K_ALIGNED=_aligned(call.k) if call.k.itemsize == 1 or scaled_columns else 0,
        V_ALIGNED=_aligned(call.v) if call.v.itemsize == 1 else 0,
        IS_V_LIKE_K=row_strides(call.k) == row_strides(call.v),
        IS_PAIRED=formats.is_paired,
        K_BY_TOKEN=is_by_token(call.k_descale, call.batch),
        V_BY_TOKEN=v_by_token,
        SCALED_COLUMNS=scaled_columns,
        HAS_UNITS=v_by_token and formats.product == tl.float16,
        IS_LOADED_FIRST=_is_loaded_first(call, formats, config, target),
        HAS_PTX=target.converts_float8,
        IS_Q_NORMED=formats.is_q_normed,
        DTYPE=formats.product.name,
        IS_PRECISE=formats.is_precise,
        BLOCK_M=block_m,
        BLOCK_N=tiles.block_n,
    )


def compiler_options(tiles: Tiles, target: Target) -> dict[str, int]:
    """Triton's compiler options."""
    config = tiles.config
    told = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if tiles.fixed_units > 0:
        # batch-invariant bits: whether a product and a sum are fused may depend on a row's place
        told["enable_fp_fusion"] = False
    if target.is_hip and config.waves_per_eu:
        told["waves_per_eu"] = config.waves_per_eu
    if config.maxnreg and target.arch.startswith("sm"):
        told["maxnreg"] = config.maxnreg
    return told
