"""`selected_mass` on GPUs: one program per query token, list, and range of its entries.

A program takes all heads that share the list, one tile after another, so that the sum over heads
has the same order every time. Units of more than a tile of keys are summed up by PyTorch.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.backward_kernels import (
    find_lse,
    probabilities,
)
from torch_paged_attn.backends.triton.portable.selected.keys import (
    SelectedSizes,
    find_keys,
    find_token,
    list_logits,
    load_keys,
    load_queries,
)
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.ops.selected_mass import check_call
from torch_paged_attn.selection_calls import MassCall


@triton.jit(do_not_specialize=SelectedSizes._fields)
def _selected_mass_kernel(
    pointers, lse_ptr, mass_ptr,
    total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
    max_pages, splits,
    strides, scalars, KV_HEADS: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """mass_ptr: (total_q, G, entries * SELECT_SIZE / PART), where PART is the number of keys of a
    unit that a tile has. KV_HEADS: heads of keys that share a list.
    """
    sizes = SelectedSizes(
        total_q, batch, entries, num_rows, stride_index_token, stride_count_token, stride_table,
        max_pages, splits,
    )  # fmt: skip
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PART: tl.constexpr = min(OPTIONS.SELECT_SIZE, BLOCK_N)
    HEAD_TILES: tl.constexpr = (OPTIONS.GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    group, n0 = tl.program_id(1), tl.program_id(2) * BLOCK_N
    token = find_token(tl.program_id(0), group, pointers, strides, sizes, OPTIONS)
    page, slot, is_seen = find_keys(n0, token, pointers, strides, sizes, scalars, OPTIONS)
    mass = tl.zeros([BLOCK_N], tl.float32)
    for i in tl.range(0, KV_HEADS * HEAD_TILES):
        kv_head = group * KV_HEADS + i // HEAD_TILES
        queries = load_queries(token, kv_head, i % HEAD_TILES, pointers, strides, OPTIONS)
        k, v = load_keys(page, slot, is_seen, kv_head, pointers, strides, OPTIONS)
        s = list_logits(queries, k, v, pointers, scalars, OPTIONS)
        _, lse, sees = find_lse(lse_ptr, token, queries, sizes)
        lse = tl.where(sees, lse, 0.0)
        p = probabilities(s, lse[:, None], OPTIONS.IS_PRECISE)
        mass += tl.sum(tl.where(is_seen[None, :] & sees[:, None], p, 0.0), 0)
    PARTS: tl.constexpr = BLOCK_N // PART
    of_parts = tl.sum(tl.reshape(mass, [PARTS, PART]), 1)
    count = (sizes.entries * OPTIONS.SELECT_SIZE) // PART
    part = n0 // PART + tl.arange(0, PARTS)
    row = token.row * tl.num_programs(1) + group
    tl.store(mass_ptr + row * count + part, of_parts, mask=part < count)


def selected_mass(*args: Any, **kwargs: Any) -> Tensor:
    """Arguments as in the op's schema."""
    call = MassCall.of(*args, **kwargs)
    check_call(call)
    attention = selected.without_gaps(call.attention)
    mass, size = call.new_result(), call.selection.select_size
    if mass.numel() == 0:
        return mass
    if attention.batch == 0:
        return mass.zero_()
    target = target_of(mass.device)
    config = selected.config_of(attention, target)
    # keys are not values here
    options = selected.options_of(attention, target, config, False)._replace(IS_V_IN_K=True)
    parts = max(1, size // options.BLOCK_N)
    total_q, groups, entries = mass.shape
    tiles = -(-entries * size // options.BLOCK_N)
    written = mass.new_empty(total_q, groups, entries * parts)
    Launch(
        _selected_mass_kernel,
        (total_q, groups, tiles),
        **selected.sizes_of(attention)._asdict(),
        strides=selected.strides_of(attention),
        scalars=selected.scalars_of(attention),
        KV_HEADS=attention.num_kv_heads // groups,
        OPTIONS=options,
        num_warps=config.num_warps,
        num_stages=1,
    )(selected.pointers_of(attention, target), call.softmax_lse.contiguous(), written)
    return written if parts == 1 else written.unflatten(-1, (entries, parts)).sum(-1)
