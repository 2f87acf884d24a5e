"""`select_keys` on GPUs: kernels score some tokens at a time and select exactly.

The scores of a chunk of tokens are `MOST_SCORES` numbers at most, unless one token has more keys.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.common.dequant import as_stored
from torch_paged_attn.backends.triton.common.seqlen_info import key_bound
from torch_paged_attn.backends.triton.hopper.selected import index_scores as hopper
from torch_paged_attn.backends.triton.portable.selected import arguments as selected
from torch_paged_attn.backends.triton.portable.selected.arguments import SelectedConfig
from torch_paged_attn.backends.triton.portable.selected.index_scores import (
    _index_scores_kernel,
    _pool_units_kernel,
)
from torch_paged_attn.backends.triton.portable.selected.keys import SelectedPointers
from torch_paged_attn.backends.triton.portable.selected.top_units import (
    TopPointers,
    _top_units_kernel,
)
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.contiguous import after_copies, without_gaps
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, Plan
from torch_paged_attn.backends.triton.runtime.target import Target, cdiv, next_power_of_2, target_of
from torch_paged_attn.backends.triton.runtime.workspace import Allocation
from torch_paged_attn.ops.select_keys import check_call
from torch_paged_attn.selection import Selection
from torch_paged_attn.selection_calls import SelectKeysCall, arguments

MOST_SCORES = 2**25
# tokens that share a tile of keys, at most
MOST_TOKENS = 64
# queries, token by head, that are multiplied at once on Hopper
COLUMNS = 64
# scores that a program reads at a time to pool them, and to select
POOLED, READ = 2048, 4096


_LISTED = [x for x in arguments("select_keys") if not x.keyword_only]
# the tensors of a call, in the schema's order; and where the two hints are among its arguments
NAMES = [x.name for x in _LISTED if not x.is_hint]
HINTS = next(i for i, x in enumerate(_LISTED) if x.is_hint)


def select_keys(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in the op's schema."""
    if args[HINTS] < 0 or args[HINTS + 1] < 0:
        check_call(SelectKeysCall.of(*args, **options))
    # no plan depends on hints
    return launch_cache.call("select_keys", _plan, (*args[:HINTS], *args[HINTS + 2 :]), options)


def _plan(*tensors: Tensor | None, **options: Any) -> Plan:
    tensors = *tensors, *(None,) * (len(NAMES) - len(tensors))
    tensors, copied = without_gaps(NAMES, tensors)
    call = SelectKeysCall.of(*tensors[:HINTS], 0, 0, *tensors[HINTS:], **options)
    check_call(call)
    given = [name for name, x in zip(NAMES, tensors, strict=True) if x is not None]
    return after_copies(_plan_checked(call, given), copied)


def _plan_checked(call: SelectKeysCall, given: list[str]) -> Plan:
    """The plan of a call that has the tensors of these names."""
    attention = call.attention()
    new_ids, new_counts = map(Allocation.like, call.new_results())
    num_keys = key_bound(attention)
    if attention.total_q == 0 or attention.batch == 0 or num_keys == 0 or call.num_units == 0:
        return lambda tensors, addresses: (new_ids().fill_(-1), new_counts().zero_())
    # the kernels find tokens as those of selected keys do, and read no list here
    none = attention.cu_seqlens_q.new_empty((attention.total_q, 1, 0))
    attention.selection = Selection(none, None, call.select_size)
    step = max(1, MOST_SCORES // (call.groups * num_keys))
    starts = [
        _plan_rows(call, attention, slice(first, min(first + step, attention.total_q)), num_keys)
        for first in range(0, attention.total_q, step)
    ]
    target = target_of(call.q.device)

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        found = dict(zip(given, tensors, strict=True))
        weights = found.get("weights")
        if weights is not None:
            weights = weights.float().contiguous()
        ids, counts = new_ids().fill_(-1), new_counts()
        for start in starts:
            start(_pointers_of(found, target), found, weights, ids, counts)
        return ids, counts

    return run


def _pointers_of(found: dict[str, Tensor], target: Target) -> SelectedPointers:
    """A call's tensors as kernels take them. Of lists, which have no entries, none is read."""
    q, k = (as_stored(found[name], target)[0] for name in ("q", "k"))
    own = {name: found.get(name) for name in SelectedPointers._fields}
    own |= {"q": q, "k": k, "v": k, "key_indices": found["cu_seqlens_q"]}
    return SelectedPointers(**own)


def config_of(call: AttentionCall, target: Target) -> tuple[SelectedConfig, int]:
    """Tiles of heads and keys, and how many tokens are multiplied at once."""
    config = selected.config_of(call, target)
    # scores of float32 queries are sums of short chains, and keep their tiles
    if target.arch == "sm90" and call.q.itemsize < 4 and call.head_dim <= 128:
        at_once = COLUMNS // config.BLOCK_M if call.group_size <= config.BLOCK_M else 1
        return SelectedConfig(config.BLOCK_M, 128, 8, 3), at_once
    return SelectedConfig(config.BLOCK_M, config.BLOCK_N, config.num_warps, 1), 1


def _plan_rows(
    call: SelectKeysCall, attention: AttentionCall, rows: slice, num_keys: int
) -> Callable[..., None]:
    """A function that writes the results of some rows of calls like this one. It takes the tensors
    as kernels take them, by name, and weights in float32, and the tensors for results.
    """
    target = target_of(call.q.device)
    config, at_once = config_of(attention, target)
    options = selected.options_of(attention, target, config, False)._replace(IS_V_IN_K=True)
    shared: dict[str, Any] = {
        **selected.sizes_of(attention)._asdict(),
        "strides": selected.strides_of(attention),
        "OPTIONS": options,
    }
    count, groups = rows.stop - rows.start, call.groups
    new = functools.partial(Allocation, dtype=torch.float32, device=call.q.device)
    new_scores = new((count, groups, num_keys))
    is_relu = call.score == "relu"
    score: Callable[..., None]
    by_hopper = (hopper.unsupported(attention) or hopper.unprofitable(attention)) is None
    if by_hopper:
        score = hopper.plan_scores(attention, rows, is_relu, num_keys)
    else:
        # sequences of few tokens share no keys with others
        tokens = min(MOST_TOKENS, cdiv(attention.total_q, attention.batch))
        score = Launch(
            _index_scores_kernel,
            (cdiv(count, tokens), groups, cdiv(num_keys, options.BLOCK_N)),
            first_row=rows.start,
            stop_row=rows.stop,
            tokens=tokens,
            num_keys=num_keys,
            **shared,
            IS_RELU=is_relu,
            AT_ONCE=min(at_once, next_power_of_2(tokens)),
            STAGES=config.num_stages,
            num_warps=config.num_warps,
            num_stages=1,
        )
    num_units = cdiv(num_keys, call.select_size)
    units = max(1, POOLED // call.select_size)
    new_pooled = new((count, groups, num_units)) if call.select_size > 1 else None
    pool = Launch(
        _pool_units_kernel,
        (count, groups, cdiv(num_units, units)),
        first_row=rows.start,
        num_keys=num_keys,
        num_units=num_units,
        **shared,
        POOL=call.pool,
        UNITS=units,
        num_warps=4,
    )
    new_rest = new((count, groups, READ)) if num_units > READ else None
    top = Launch(
        _top_units_kernel,
        (count, groups),
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
    )

    def start(
        pointers: SelectedPointers, found: dict[str, Tensor], weights: Tensor | None,
        ids: Tensor, counts: Tensor,
    ) -> None:  # fmt: skip
        scores = new_scores()
        read: Any = found if by_hopper else pointers
        score(read, weights, scores)
        if new_pooled is not None:
            pooled = new_pooled()
            pool(pointers, scores, pooled)
            scores = pooled
        rest = scores if new_rest is None else new_rest()  # not used
        top(pointers, TopPointers(scores, rest, ids, counts))

    return start
