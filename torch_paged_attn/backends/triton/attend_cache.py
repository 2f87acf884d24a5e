"""`attend_cache` on GPUs: the plan of `flash_varlen` for the same memory, found by the arguments of
`flash_attn_with_kvcache`.
"""

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import numbers_of, tensor_names
from torch_paged_attn.backends.triton.flash_varlen import (
    HINTS,
    MOST_HINTS,
    flash_varlen,
    said_of_longest,
    said_of_reach,
)
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backends.triton.runtime.workspace import Allocation, Constants
from torch_paged_attn.ops.attend_cache import rows_of, rows_of_heads
from torch_paged_attn.ops.repeated import Recent

# the operator's tensors, by their names in `flash_varlen`
TENSORS = (
    "q", "k", "v", "seqused_k", "block_table", "cu_seqlens_q", "alibi_slopes", "sinks", "q_descale",
    "k_descale", "v_descale", "k_start",
)  # fmt: skip


class AttendCache:
    """The operator, called with the arguments of `ops.attend_cache`."""

    def __call__(
        self,
        *tensors: Tensor | None,
        max_seqlen_q: int = 0,
        max_seqlen_k: int = 0,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        is_packed = len(tensors) == len(TENSORS) and tensors[-1] is not None
        key, plan = _kind_of(max_seqlen_q, max_seqlen_k, is_packed)
        return launch_cache.call(key, plan, tensors, options)

    def recent(self) -> Recent:
        """Where the plans of its last calls are."""
        return launch_cache.recent(_kind_of, HINTS, TENSORS[-1])


attend_cache = AttendCache()


@functools.lru_cache(MOST_HINTS)
def _kind_of(
    max_seqlen_q: int, max_seqlen_k: int, is_packed: bool
) -> tuple[str, Callable[..., Plan]]:
    """As `AttentionOp`'s."""
    longest = said_of_longest(max_seqlen_q, max_seqlen_k, is_packed) if max_seqlen_q else 0
    return f"attend_cache, {longest}", functools.partial(_plan, longest)


def _plan(longest: int, *tensors: Tensor | None, **options: Any) -> Plan:
    found = dict(zip(TENSORS, tensors, strict=False))
    given = [name for name in TENSORS if found.get(name) is not None]
    q, k_cache, v_cache = (found[name] for name in "qkv")
    assert q is not None and k_cache is not None and v_cache is not None
    if found.get("k_start") is not None:
        names = "q", "k", "v"
        found |= zip(names, rows_of_heads(q, k_cache, v_cache), strict=True)
        return _with(given, longest, 0, found, None, options)
    rows = rows_of(q, k_cache, v_cache, found.get("cu_seqlens_q"))
    found |= {"q": rows, "k": k_cache.transpose(1, 2), "v": v_cache.transpose(1, 2)}
    made: dict[str, tuple[int, int]] = {}  # what is not given: how many numbers, and their step
    if found.get("cu_seqlens_q") is None:
        batch, seqlen_q = q.shape[:2]
        made["cu_seqlens_q"] = batch + 1, seqlen_q
        longest = said_of_longest(seqlen_q, 0, False)
    if found.get("block_table") is None:
        # row b of the cache is the only page of sequence b
        made["block_table"] = k_cache.shape[0], 1
    constants = None
    if made:
        constants = Constants(functools.partial(ranges, made, q.device), q.device)
        found |= zip(made, constants()[0], strict=True)
        given += made
    new_out = None
    if q.dim() == 4:
        new_out = Allocation((*q.shape[:3], numbers_of(v_cache)), q.dtype, q.device)
        options = options | {"out": new_out().flatten(0, 1)}
    table = found["block_table"]
    assert table is not None
    reach = said_of_reach(table.shape[-1] * k_cache.shape[1], False)
    return _with(given, longest, reach, found, constants, options, new_out)


def _with(
    given: list[str],
    longest: int,
    reach: int,
    found: dict[str, Tensor | None],
    constants: Constants | None,
    options: dict[str, Any],
    new_out: Allocation | None = None,
) -> Plan:
    """The plan of `flash_varlen` for the tensors `found`, of which a call has those that are
    `given`, and then the constants. `new_out`: for an `out` among the options, of any shape.
    """
    names = tensor_names("flash_varlen")
    attend = flash_varlen.plan(longest, reach, *map(found.get, names), **options)
    pick = operator.itemgetter(*(given.index(x) for x in names if x in given))

    def run(tensors: tuple[Any, ...], addresses: Any) -> tuple[Tensor, Tensor]:
        if constants is not None:
            made, at = constants()
            tensors, addresses = (*tensors, *made), addresses and (*addresses, *at)
        if new_out is None:
            return attend(pick(tensors), addresses and pick(addresses))
        out = new_out()
        at_out = addresses and (*pick(addresses), out.data_ptr())
        return attend((*pick(tensors), out), at_out)

    return run


def ranges(wanted: dict[str, tuple[int, int]], device: torch.device) -> tuple[Tensor, ...]:
    """0, step, 2 step, ...; as a column for a block table."""
    made = {
        name: torch.arange(count, dtype=torch.int32, device=device) * step
        for name, (count, step) in wanted.items()
    }
    return tuple(x[:, None] if name == "block_table" else x for name, x in made.items())
