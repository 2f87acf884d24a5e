"""`select_keys` on GPUs: a kernel scores some tokens at a time, and PyTorch selects exactly.

A program of the kernel has one token, one group of index heads and BLOCK_N keys. The scores of a
chunk of tokens are `MOST_SCORES` numbers at most, unless one token has more keys.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, key_lengths
from torch_paged_attn.backends.triton.portable import selected
from torch_paged_attn.backends.triton.portable.selected_keys import (
    find_token,
    list_logits,
    load_keys,
    load_queries,
)
from torch_paged_attn.backends.triton.portable.tiles import key_bound
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch
from torch_paged_attn.backends.triton.runtime.target import target_of
from torch_paged_attn.ops.select_keys import check_call
from torch_paged_attn.ops.selected_checks import sequence_of
from torch_paged_attn.selection import Selection
from torch_paged_attn.selection_calls import SelectKeysCall

INF = float("inf")
MOST_SCORES = 2**26


@triton.jit(do_not_specialize=("first_row", "num_keys", "sizes"))
def _index_scores_kernel(
    pointers, weights_ptr, scores_ptr, first_row, num_keys, sizes, strides, scalars,
    IS_RELU: tl.constexpr, OPTIONS: tl.constexpr,
):  # fmt: skip
    """scores_ptr: (rows, G, num_keys), -inf where the token does not see the key. weights_ptr:
    contiguous (total_q, num_heads), or None.
    """
    BLOCK_M: tl.constexpr = OPTIONS.BLOCK_M
    BLOCK_N: tl.constexpr = OPTIONS.BLOCK_N
    PAGE_SIZE: tl.constexpr = OPTIONS.PAGE_SIZE
    HEAD_TILES: tl.constexpr = (OPTIONS.GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(1)
    token = find_token(first_row + tl.program_id(0), group, pointers, strides, sizes, OPTIONS)
    n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    key = n.to(tl.int64)
    is_seen = (key < token.key_len) & token.exists
    if OPTIONS.HAS_RIGHT:
        is_seen = is_seen & (key <= token.position)
    if PAGE_SIZE == 0:
        page, slot = tl.zeros([BLOCK_N], tl.int64), token.k_first + key
        is_seen = is_seen & (slot >= 0) & (slot < sizes.num_rows)
    else:
        column, slot = key // PAGE_SIZE, key % PAGE_SIZE
        is_seen = is_seen & (column < sizes.max_pages)
        table_ptr = pointers.block_table + tl.cast(token.b, tl.int64) * sizes.stride_table
        page = tl.load(table_ptr + column, mask=is_seen, other=0).to(tl.uint32)
        page = tl.minimum(page, tl.cast(sizes.num_rows - 1, tl.uint32)).to(tl.int64)
    k, v = load_keys(page, slot, is_seen, group, pointers, strides, OPTIONS)
    total = tl.zeros([BLOCK_N], tl.float32)
    for head_tile in tl.range(0, HEAD_TILES):
        queries = load_queries(token, group, head_tile, pointers, strides, OPTIONS)
        s = list_logits(queries, k, v, pointers, scalars, OPTIONS)
        if IS_RELU:
            s = tl.maximum(s, 0.0)
        weight = tl.where(queries.exists, 1.0, 0.0)
        if weights_ptr is not None:
            at = token.row * OPTIONS.NUM_HEADS + queries.head
            weight = tl.load(weights_ptr + at, mask=queries.exists, other=0.0)
        total += tl.sum(s * weight[:, None], 0)
    row = (tl.program_id(0) * tl.num_programs(1) + group).to(tl.int64)
    total = tl.where(is_seen, total, float("-inf"))
    tl.store(scores_ptr + row * num_keys + n, total, mask=n < num_keys)


def select_keys(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in the op's schema."""
    call = SelectKeysCall.of(*args, **kwargs)
    check_call(call)
    attention = selected.without_gaps(call.attention())
    key_indices, num_selected = call.new_results()
    key_indices.fill_(-1)
    num_selected.zero_()
    num_keys = key_bound(attention)
    if attention.total_q == 0 or attention.batch == 0 or num_keys == 0:
        return key_indices, num_selected
    step = max(1, MOST_SCORES // (call.groups * num_keys))
    for first in range(0, attention.total_q, step):
        rows = slice(first, min(first + step, attention.total_q))
        ids, counts = _selected(call, attention, rows, _scores(call, attention, rows, num_keys))
        key_indices[rows, :, : ids.shape[-1]] = ids
        num_selected[rows] = counts
    return key_indices, num_selected


def _scores(call: SelectKeysCall, attention: AttentionCall, rows: slice, num_keys: int) -> Tensor:
    """`(rows, G, num_keys)` float32; -inf where a token does not see the key."""
    target = target_of(call.q.device)
    # the kernels of selected keys find tokens, and read no list here
    none = attention.cu_seqlens_q.new_empty((attention.total_q, 1, 0))
    attention.selection = Selection(none)
    config = selected.config_of(attention, target)
    options = selected.options_of(attention, target, config, False)._replace(IS_V_IN_K=True)
    scores = torch.empty(
        (rows.stop - rows.start, call.groups, num_keys), dtype=torch.float32, device=call.q.device
    )
    weights = None if call.weights is None else call.weights.float().contiguous()
    Launch(
        _index_scores_kernel,
        (*scores.shape[:2], -(-num_keys // options.BLOCK_N)),
        first_row=rows.start,
        num_keys=num_keys,
        sizes=selected.sizes_of(attention),
        strides=selected.strides_of(attention),
        scalars=selected.scalars_of(attention)._replace(scale=1.0),
        IS_RELU=call.score == "relu",
        OPTIONS=options,
        num_warps=config.num_warps,
        num_stages=1,
    )(selected.pointers_of(attention, target), weights, scores)
    return scores


def _selected(
    call: SelectKeysCall, attention: AttentionCall, rows: slice, scores: Tensor
) -> tuple[Tensor, Tensor]:
    """The selected units `(rows, G, <= num_units)` int32, ascending, then -1; and their number."""
    size, device = call.select_size, scores.device
    units = -(-scores.shape[-1] // size)
    if size > 1:
        room = (0, units * size - scores.shape[-1])
        keys = torch.nn.functional.pad(scores, room, value=-INF).unflatten(-1, (units, size))
        is_seen = keys > -INF
        is_there = is_seen.any(-1)
        if call.pool == "max":
            scores = keys.amax(-1)
        else:
            scores = keys.masked_fill(~is_seen, 0.0).sum(-1)
            if call.pool == "mean":
                scores = scores / is_seen.sum(-1).clamp(min=1)
    else:
        is_there = scores > -INF
    b = sequence_of(attention, rows)
    lengths = key_lengths(call.cu_seqlens_q, call.cu_seqlens_k, call.seqused_k).long()[b]
    row = torch.arange(rows.start, rows.stop, device=device)
    position = attention.first_positions()[b] + row - call.cu_seqlens_q[b]
    own = torch.minimum(position, lengths - 1).div(size, rounding_mode="floor")[:, None, None]
    unit = torch.arange(units, device=device)
    is_forced = (unit < call.force_first) | (unit <= own) & (unit > own - call.force_last)
    scores = scores.masked_fill(is_forced, INF).masked_fill(~is_there, -INF)
    wanted = min(call.num_units, units)
    # the value of the last that is selected; of those that are equal to it, the first ones
    last = scores.topk(wanted, -1).values[..., -1:]
    is_better, is_equal = scores > last, (scores == last) & is_there
    left = wanted - is_better.sum(-1, keepdim=True)
    is_taken = is_better | is_equal & (is_equal.cumsum(-1) <= left)
    place = (is_taken.cumsum(-1) - 1).where(is_taken, wanted)
    ids = torch.full((*scores.shape[:-1], wanted + 1), -1, dtype=torch.int32, device=device)
    ids.scatter_(-1, place, unit.to(torch.int32).expand(scores.shape))
    return ids[..., :wanted], is_taken.sum(-1, dtype=torch.int32)
