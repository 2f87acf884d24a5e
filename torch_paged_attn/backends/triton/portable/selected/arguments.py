"""What the kernels of selected keys take: tiles, splits, and the groups of arguments."""

import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import LATENT_COLUMNS, AttentionCall, is_by_column
from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.common.seqlen_info import is_bound
from torch_paged_attn.backends.triton.portable.common.formats import formats_of
from torch_paged_attn.backends.triton.portable.common.gather_scatter import chunks
from torch_paged_attn.backends.triton.portable.forward.arguments import FLOAT32_CHAIN, row_strides
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedOptions,
    SelectedPointers,
    SelectedScalars,
    SelectedSizes,
    SelectedStrides,
)
from torch_paged_attn.backends.triton.runtime import contiguous
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, next_power_of_2

# wider rows of keys and values together take small tiles
WIDE = 256
# programs of a multiprocessor that are enough; the fewest keys of a split; the most splits
ENOUGH, LEAST_KEYS, MOST_SPLITS = 2, 256, 32


@dataclasses.dataclass(frozen=True)
class SelectedConfig:
    """Tiles of a kernel of selected keys: heads, keys; warps and stages."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int


def is_rdna(target: Target) -> bool:
    """Whether this is an AMD GPU with warps of 32, whose threads have fewer registers."""
    return target.is_hip and not target.arch.startswith("gfx9")


def choose_selected_config(
    target: Target, group_size: int, head_dim: int, itemsize: int
) -> SelectedConfig:
    """Tiles by a rule of thumb. head_dim: the larger of that of keys and values; itemsize: of the
    factors of products.
    """
    is_wide = head_dim > WIDE
    most = 64 if itemsize < 4 and not target.is_hip else 16
    block_m = min(most, max(16, next_power_of_2(group_size)))
    if itemsize == 4:
        return SelectedConfig(16, 16 if is_wide or is_rdna(target) else 32, 4, 1)
    if is_rdna(target):
        return SelectedConfig(block_m, 16 if is_wide else 32, 16 if is_wide else 4, 1)
    if target.is_hip:
        return SelectedConfig(block_m, 16 if is_wide else 64, 4, 1)
    if not is_wide:
        # QSA's prefill takes 2.37 ms on an H200; 32 keys in three stages 2.90, by two warps 2.55
        return SelectedConfig(block_m, 64, 4, 3 if head_dim <= 128 else 2)
    has_room = (target.shared_memory or 0) > 2**17
    if target.arch == "sm90":  # its products read keys from shared memory, not from registers
        return SelectedConfig(block_m, 32, 8 if block_m == 64 else 4, 2)
    return SelectedConfig(min(block_m, 32), 32 if has_room else 16, 8, 2 if has_room else 1)


def config_of(call: AttentionCall, target: Target) -> SelectedConfig:
    """The tiles of a call."""
    itemsize = formats_of(call, target, False).product.primitive_bitwidth // 8
    dims = max(call.head_dim, call.head_dim_v)
    config = choose_selected_config(target, call.group_size, dims, itemsize)
    if is_by_column(call.v_descale, call.v) and not target.is_hip:
        return dataclasses.replace(config, num_warps=8)  # scales take registers
    return config


def backward_config_of(call: AttentionCall, target: Target) -> SelectedConfig:
    """The tiles of a call's backward, whose programs hold gradients beside the tiles."""
    itemsize = formats_of(call, target, False).product.primitive_bitwidth // 8
    if max(call.head_dim, call.head_dim_v) > WIDE or itemsize == 4:
        return SelectedConfig(16, 16, 4, 1)
    if is_rdna(target):
        return SelectedConfig(16, 16, 8, 1)
    block_m = min(32, max(16, next_power_of_2(call.group_size)))
    return SelectedConfig(block_m, 32, 4, 1)


def parts_config_of(call: AttentionCall, target: Target) -> SelectedConfig:
    """The tiles of a backward that leaves parts of gradients: products that other kernels share."""
    config = backward_config_of(call, target)
    is_wide = max(call.head_dim, call.head_dim_v) > WIDE
    if target.arch == "sm90" and not formats_of(call, target, False).is_precise:
        # an H200 took 0.95 ms for 32 heads of 128 (8 warps: 1.38), and 14.7 for 16 heads of 576
        # (tiles of 16 or 64 keys: 16.4, 17.8)
        if is_wide:
            return dataclasses.replace(config, BLOCK_N=32, num_warps=8, num_stages=2)
        if is_narrow_on_hopper(call, target):
            return dataclasses.replace(config, BLOCK_N=64, num_stages=2)
        return dataclasses.replace(config, BLOCK_N=64, num_warps=8)
    if target.is_hip:  # what its registers hold
        is_16 = is_rdna(target) and config.num_warps == 8
        return dataclasses.replace(config, BLOCK_N=16, num_warps=16 if is_16 else 8)
    return dataclasses.replace(config, num_warps=8) if is_wide else config


def is_narrow_on_hopper(call: AttentionCall, target: Target) -> bool:
    """Whether products of 16 bits on Hopper are of heads that leave room for large tiles."""
    formats = formats_of(call, target, False)
    is_narrow = max(call.head_dim, call.head_dim_v) <= 128
    return target.arch == "sm90" and not formats.is_precise and is_narrow


def unit_config_of(call: AttentionCall, target: Target) -> SelectedConfig:
    """The tiles of dk and dv, of units of several keys; BLOCK_N is at most that of a unit."""
    size = call.lists.select_size
    if is_narrow_on_hopper(call, target) and size >= 128:
        # an H200 took 3.1 ms for M3's units, and 3.5 with 64 rows in two stages
        return SelectedConfig(32, 128, 8, 3)
    if is_narrow_on_hopper(call, target) and size >= 64:
        return SelectedConfig(64, 64, 8, 2)
    config = backward_config_of(call, target)
    if is_rdna(target) and config.num_warps < 8:
        return dataclasses.replace(config, num_warps=16)
    return config


def leaves_query_parts(call: AttentionCall, target: Target) -> bool:
    """Whether units leave parts of dq: where they have more keys than their tokens have rows of
    queries, parts are fewer bytes than the keys that tokens would read."""
    selection = call.lists
    is_one_pass = is_narrow_on_hopper(call, target) and call.k_start is None
    return is_one_pass and selection.select_size >= max(64, 2 * call.group_size)


def splits_of(call: AttentionCall, target: Target, config: SelectedConfig) -> int:
    """How many programs share a list. Of a batch-invariant call, one."""
    selection = call.lists
    keys = selection.key_indices.shape[2] * selection.select_size
    programs = call.total_q * call.num_kv_heads * cdiv(call.group_size, config.BLOCK_M)
    if call.is_batch_invariant or programs == 0:
        return 1
    wanted = ENOUGH * target.multiprocessors // programs
    return max(1, min(wanted, keys // LEAST_KEYS, MOST_SPLITS))


def options_of(
    call: AttentionCall,
    target: Target,
    config: SelectedConfig,
    is_split: bool,
    by_key: bool = False,
) -> SelectedOptions:
    """Compile-time constants of a call's kernels. by_key: products have rows of keys, too."""
    selection, formats = call.lists, formats_of(call, target, False)
    rows = max(config.BLOCK_M, config.BLOCK_N) if by_key else config.BLOCK_M
    smallest = target.smallest_chunk(rows) if not formats.is_precise else 16
    k_low, k_high = chunks(call.head_dim, smallest)
    v_low, v_high = chunks(call.head_dim_v, smallest)
    # gradients of wide rows leave no registers for an exchange: sm90's spilled 5 KB of them
    is_full = by_key and max(call.head_dim, call.head_dim_v) > WIDE
    return SelectedOptions(
        HEAD_DIM=call.head_dim,
        K_LOW=k_low,
        K_HIGH=k_high,
        HEAD_DIM_V=call.head_dim_v,
        V_LOW=v_low,
        V_HIGH=v_high,
        NUM_HEADS=call.num_heads,
        GROUP_SIZE=call.group_size,
        SELECT_SIZE=selection.select_size,
        PAGE_SIZE=call.page_size,
        IS_SLOTS=call.is_slots,
        HAS_LEFT=is_bound(call.window_size_left),
        HAS_RIGHT=is_bound(call.window_right),
        HAS_SOFTCAP=call.softcap > 0.0,
        IS_V_IN_K=_is_v_in_k(call) and (v_low, v_high) == (k_low, 0),
        IS_SPLIT=is_split,
        Q_FORMAT=formats.q,
        K_FORMAT=formats.k,
        V_FORMAT=formats.v,
        OUT_FORMAT=formats.out,
        DTYPE=formats.product.name,
        IS_PRECISE=formats.is_precise,
        CHAIN=FLOAT32_CHAIN if formats.is_precise else 0,
        BLOCK_M=config.BLOCK_M,
        BLOCK_N=config.BLOCK_N,
        SCALED_COLUMNS=LATENT_COLUMNS if is_by_column(call.v_descale, call.v) else 0,
        COPIES=1 if is_full else _copies(selection.select_size, target, config),
        # where one tile at a time is on its way, there is nothing to gain, and registers to lose
        FINDS_AHEAD=config.num_stages > 1,
    )


def _copies(select_size: int, target: Target, config: SelectedConfig) -> int:
    """How often the numbers of a tile's keys are found; once if they are those of one unit."""
    if select_size % config.BLOCK_N == 0:
        return 1
    lanes = 64 if target.is_hip and not is_rdna(target) else 32
    return max(1, config.num_warps * lanes // config.BLOCK_N)


def _is_v_in_k(call: AttentionCall) -> bool:
    """Whether values are the first columns of the keys, so that they are read once."""
    k, v = call.k, call.v
    is_whole = call.head_dim_v == next_power_of_2(call.head_dim_v) <= call.head_dim
    return is_whole and k.stride()[:-1] == v.stride()[:-1] and k.data_ptr() == v.data_ptr()


def strides_of(call: AttentionCall) -> SelectedStrides:
    """Strides of a call's tensors."""
    selection, q, latent = call.lists, call.q, call.q_latent
    indices, counts = selection.key_indices, selection.num_selected
    groups = indices.shape[1]

    def scale(x: Tensor | None) -> tuple[int, int]:
        if x is None or x.dim() == 0:
            return 0, 0
        return (0, x.stride(0)) if x.dim() == 1 else (x.stride(0), x.stride(1))

    by_column = 0, 0, 0
    v_descale = scale(call.v_descale)
    if call.v_descale is not None and is_by_column(call.v_descale, call.v):
        page, head, slot = row_strides(call.v_descale)
        v_descale, by_column = (0, head), (page, slot, call.v_descale.stride(-1))
    found = (
        *q.stride()[:2],
        *row_strides(call.k),
        *row_strides(call.v),
        *((0, 0) if latent is None else latent.stride()[:2]),
        indices.stride(1) if groups > 1 else 0,
        indices.stride(2),
        counts.stride(1) if counts is not None and groups > 1 else 0,
        *scale(call.q_descale),
        *scale(call.k_descale),
        *v_descale,
        *by_column,
    )
    return SelectedStrides._make(found)


def sizes_of(call: AttentionCall, splits: int = 1) -> SelectedSizes:
    """Numbers that change from call to call."""
    selection, table = call.lists, call.block_table
    indices, counts = selection.key_indices, selection.num_selected
    return SelectedSizes(
        total_q=call.total_q,
        batch=call.batch,
        entries=indices.shape[2],
        num_rows=call.k.shape[0],
        stride_index_token=indices.stride(0),
        stride_count_token=0 if counts is None else counts.stride(0),
        stride_table=0 if table is None else table.stride(0),
        max_pages=0 if table is None else table.shape[1],
        splits=splits,
    )


def scalars_of(call: AttentionCall) -> SelectedScalars:
    """Numbers that depend on options."""
    return SelectedScalars(
        float(call.scale), call.window_size_left, call.window_right, float(call.softcap)
    )


def pointers_of(call: AttentionCall, target: Target) -> SelectedPointers:
    """A call's tensors as kernels take them."""
    return pointers_to(call.tensors(), target)


def pointers_to(given: dict[str, Tensor | None], target: Target) -> SelectedPointers:
    """Tensors of a call by name, None for those that it does not have, as kernels take them."""
    stored: dict[str, Any] = {name: given[name] for name in ("q", "k", "v", "q_latent")}
    for name, x in stored.items():
        stored[name] = None if x is None else as_stored(x, target)[0]
    own = {name: given[name] for name in SelectedPointers._fields if name not in stored}
    return SelectedPointers(**stored, **own)


def without_gaps(call: AttentionCall) -> AttentionCall:
    """The call with contiguous copies of small tensors that have gaps."""
    given = {name: getattr(call, name) for name in contiguous.READ_END_TO_END}
    made, _ = contiguous.without_gaps(list(given), tuple(given.values()))
    changes: dict[str, Any] = {n: x for n, x in zip(given, made, strict=True) if x is not given[n]}
    return dataclasses.replace(call, **changes) if changes else call


def new_parts(call: AttentionCall, splits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Memory for values, maxima and sums of partial results."""
    shape = splits, call.total_q, call.num_heads
    made = functools.partial(torch.empty, dtype=torch.float32, device=call.q.device)
    return made((*shape, call.head_dim_v)), made(shape), made(shape)
