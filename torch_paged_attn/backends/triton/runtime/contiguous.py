"""The tensors of a call as kernels take them: picked by name, and small ones without gaps.

Kernels take the strides of queries, keys, values, masks, scales and layouts. They take none for
lengths, bounds and sinks, and only the row stride of a block table. If such a tensor has gaps, the
plan is made for a contiguous copy, and each call makes this copy first. So it is for queries and
packed keys that a kernel cannot address, if another kernel would give other bits.
"""

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.backends.triton.runtime.launch_cache import Plan

READ_END_TO_END = frozenset(
    (
        *("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "k_start", "q_position"),
        *("block_table", "sinks", "rng_state"),
    )
)


def with_whole_rows(x: Tensor) -> Tensor:
    """x, or a copy of it, with rows of contiguous numbers."""
    return x if x.stride(-1) == 1 else x.contiguous()


def picker(names: Sequence[str], fields: Iterable[str | None]) -> Callable[..., Any]:
    """Picks what is called like the fields from a tuple with these names and a None behind them,
    which stands for what is not there."""
    places: dict[str | None, int] = {name: i for i, name in enumerate(names)}
    return operator.itemgetter(*(places.get(x, len(names)) for x in fields))


def without_gaps(
    names: list[str], tensors: tuple[Tensor | None, ...]
) -> tuple[tuple[Tensor | None, ...], list[int]]:
    """The tensors of these names, where contiguous copies replace those that kernels cannot read;
    and the indices of the copies among the tensors that are not None.
    """
    made, copied, number = [], [], 0
    for name, x in zip(names, tensors, strict=True):
        if x is not None:
            # a number of sequences is no reason: plans of other numbers do not copy either
            has_gaps = x.dim() > 0 and x.stride(-1) != 1 and (x.dim() == 1 or x.shape[-1] > 1)
            if has_gaps and name in READ_END_TO_END:
                x = x.contiguous()
                copied.append(number)
            number += 1
        made.append(x)
    return tuple(made), copied


def after_copies(plan: Plan, copied: list[int]) -> Plan:
    """The plan with copies made first: of the given tensors with the indices `copied`."""
    if not copied or plan is NotImplemented:
        return plan

    def run(tensors: tuple[Any, ...], addresses: Any) -> Any:
        found = list(tensors)
        addresses = None if addresses is None else list(addresses)
        for i in copied:
            # not `contiguous`: what is copied may be contiguous, at an odd address
            found[i] = found[i].clone(memory_format=torch.contiguous_format)
            if addresses is not None:
                addresses[i] = found[i].data_ptr()
        return plan(tuple(found), addresses)

    return run
