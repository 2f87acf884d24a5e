"""`select_keys` on GPUs: kernels score some tokens at a time and select exactly.

The scores of a chunk of tokens are `MOST_SCORES` numbers at most, unless one token has more keys.
"""

from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.portable import selected
from torch_paged_attn.backends.triton.portable.index_scores import (
    _index_scores_kernel,
    _pool_units_kernel,
)
from torch_paged_attn.backends.triton.portable.selected import SelectedConfig
from torch_paged_attn.backends.triton.portable.tiles import key_bound
from torch_paged_attn.backends.triton.portable.top_units import TopPointers, _top_units_kernel
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, next_power_of_2, target_of
from torch_paged_attn.ops.select_keys import check_call
from torch_paged_attn.selection import Selection
from torch_paged_attn.selection_calls import SelectKeysCall

MOST_SCORES = 2**25
# tokens that share a tile of keys, at most
MOST_TOKENS = 64
# queries, token by head, that are multiplied at once on Hopper
COLUMNS = 64
# scores that a program reads at a time to pool them, and to select
POOLED, READ = 2048, 4096


def select_keys(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in the op's schema."""
    call = SelectKeysCall.of(*args, **kwargs)
    check_call(call)
    attention = selected.without_gaps(call.attention())
    key_indices, num_selected = call.new_results()
    key_indices.fill_(-1)
    num_keys = key_bound(attention)
    if attention.total_q == 0 or attention.batch == 0 or num_keys == 0 or call.num_units == 0:
        return key_indices, num_selected.zero_()
    # the kernels find tokens as those of selected keys do, and read no list here
    none = attention.cu_seqlens_q.new_empty((attention.total_q, 1, 0))
    attention.selection = Selection(none, None, call.select_size)
    step = max(1, MOST_SCORES // (call.groups * num_keys))
    for first in range(0, attention.total_q, step):
        rows = slice(first, min(first + step, attention.total_q))
        _select(call, attention, rows, num_keys, key_indices, num_selected)
    return key_indices, num_selected


def config_of(call: AttentionCall, target: Target) -> tuple[SelectedConfig, int]:
    """Tiles of heads and keys, and how many tokens are multiplied at once."""
    config = selected.config_of(call, target)
    # scores of float32 queries are sums of short chains, and keep their tiles
    if target.arch == "sm90" and call.q.itemsize < 4 and call.head_dim <= 128:
        at_once = COLUMNS // config.BLOCK_M if call.group_size <= config.BLOCK_M else 1
        return SelectedConfig(config.BLOCK_M, 128, 8, 3), at_once
    return SelectedConfig(config.BLOCK_M, config.BLOCK_N, config.num_warps, 1), 1


def _select(
    call: SelectKeysCall,
    attention: AttentionCall,
    rows: slice,
    num_keys: int,
    key_indices: Tensor,
    num_selected: Tensor,
) -> None:
    """Write the results of some rows."""
    device = call.q.device
    target = target_of(device)
    config, at_once = config_of(attention, target)
    options = selected.options_of(attention, target, config, False)._replace(IS_V_IN_K=True)
    pointers = selected.pointers_of(attention, target)
    shared: dict[str, Any] = {
        **selected.sizes_of(attention)._asdict(),
        "strides": selected.strides_of(attention),
        "OPTIONS": options,
    }
    count = rows.stop - rows.start
    scores = torch.empty((count, call.groups, num_keys), dtype=torch.float32, device=device)
    weights = None if call.weights is None else call.weights.float().contiguous()
    # sequences of few tokens share no keys with others
    tokens = min(MOST_TOKENS, cdiv(attention.total_q, attention.batch))
    Launch(
        _index_scores_kernel,
        (cdiv(count, tokens), call.groups, cdiv(num_keys, options.BLOCK_N)),
        first_row=rows.start,
        stop_row=rows.stop,
        tokens=tokens,
        num_keys=num_keys,
        **shared,
        IS_RELU=call.score == "relu",
        AT_ONCE=min(at_once, next_power_of_2(tokens)),
        STAGES=config.num_stages,
        num_warps=config.num_warps,
        num_stages=1,
    )(pointers, weights, scores)
    num_units = cdiv(num_keys, call.select_size)
    if call.select_size > 1:
        pooled = torch.empty((count, call.groups, num_units), dtype=torch.float32, device=device)
        units = max(1, POOLED // call.select_size)
        Launch(
            _pool_units_kernel,
            (count, call.groups, cdiv(num_units, units)),
            first_row=rows.start,
            num_keys=num_keys,
            num_units=num_units,
            **shared,
            POOL=call.pool,
            UNITS=units,
            num_warps=4,
        )(pointers, scores, pooled)
        scores = pooled
    rest = scores  # not used
    if num_units > READ:
        rest = torch.empty((count, call.groups, READ), dtype=torch.float32, device=device)
    Launch(
        _top_units_kernel,
        (count, call.groups),
        first_row=rows.start,
        num_units=num_units,
        wanted=min(call.num_units, num_units),
        width=call.num_units,
        force_first=call.force_first,
        force_last=call.force_last,
        **shared,
        UNITS=READ,
        HAS_FORCED=call.force_first + call.force_last > 0,
        num_warps=8,
    )(pointers, TopPointers(scores, rest, key_indices, num_selected))
