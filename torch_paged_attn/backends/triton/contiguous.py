"""Copies of the small tensors that kernels read end to end.

Kernels take the strides of queries, keys, values, masks, scales and layouts, but none of lengths,
bounds and sinks, and of a block table only that between its rows. Where such a tensor has gaps, a
plan is made for a copy without them, and each call copies first.
"""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton.runtime.launch_cache import Plan

READ_END_TO_END = frozenset(
    (
        *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "k_start", "q_position"),
        *("block_table", "sinks", "rng_state"),
    )
)


def without_gaps(
    names: list[str], tensors: tuple[Tensor | None, ...]
) -> tuple[tuple[Tensor | None, ...], list[int]]:
    """The tensors of these names, with copies of those that kernels cannot read as they lie; and
    which of the given ones, those that are not None, are copies.
    """
    made, copied, number = [], [], 0
    for name, x in zip(names, tensors, strict=True):
        if x is not None:
            has_gaps = x.dim() > 0 and x.shape[-1] > 1 and x.stride(-1) != 1
            if has_gaps and name in READ_END_TO_END:
                x = x.contiguous()
                copied.append(number)
            number += 1
        made.append(x)
    return tuple(made), copied


def after_copies(plan: Plan, copied: list[int]) -> Plan:
    """The plan, which was made for copies of the given tensors with these numbers."""
    if not copied or plan is NotImplemented:
        return plan

    def run(tensors: tuple[Any, ...], addresses: Any) -> Any:
        found = list(tensors)
        addresses = None if addresses is None else list(addresses)
        for i in copied:
            found[i] = found[i].contiguous()
            if addresses is not None:
                addresses[i] = found[i].data_ptr()
        return plan(tuple(found), addresses)

    return run
