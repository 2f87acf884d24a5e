"""A call of `flash_attn_with_kvcache` like an earlier one, in one step.

On the host of a GPU the checks and views of a call cost more than the ops that it comes to. `leave`
puts together from the ops' repeats what answers the next call like this one; `ops/_repeat.py` says
when.
"""

import operator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import tensor_names
from torch_paged_attn.integrations._constants import current_stream, is_capturing
from torch_paged_attn.ops._gradients import bump_versions
from torch_paged_attn.ops._repeat import REPEATS, Repeat, repeatable, trimmed

OP = "flash_attn_with_kvcache"
TENSORS = tensor_names("flash_varlen")
# what is no option of an op
NAMES = (*TENSORS, "max_seqlen_q", "max_seqlen_k")


class OpCall(NamedTuple):
    """A call of an op, and the tensors that came of it."""

    op: str
    tensors: tuple[Tensor | None, ...]
    options: dict[str, Any]
    results: tuple[Tensor, ...] = ()


def attention_call(arguments: dict[str, Any]) -> OpCall:
    """The call of `flash_varlen` with these arguments."""
    tensors = tuple(arguments.get(name) for name in TENSORS)
    return OpCall("flash_varlen", tensors, {n: x for n, x in arguments.items() if n not in NAMES})


def leave(
    tensors: tuple[Any, ...],
    options: dict[str, Any],
    calls: list[OpCall],
    constants: tuple[Tensor, ...],
    shape: tuple[int, ...],
) -> None:
    """Leave a repeat of a call with these tensors and options.

    tensors: q, k_cache, v_cache and others
    calls: the ops that it came to, the last of them attention
    constants: tensors that are among the given ones, or good for every call like it on this stream
    shape: of the result
    """
    if torch.compiler.is_compiling() or "flash_varlen" not in REPEATS or is_capturing():
        return
    tensors = trimmed(tensors)
    given = [x for x in tensors if x is not None]
    if not all(isinstance(x, Tensor) for x in given):
        return
    constants = tuple(x for x in constants if all(x is not y for y in given))
    # what the ops get lies where a given tensor begins, a constant, or the result of an op before
    known = [*given, *constants, *(x for call in calls for x in call.results)]
    places = {x.data_ptr(): i for i, x in enumerate(known)}
    needed = [[x.data_ptr() for x in call.tensors if x is not None] for call in calls]
    is_known = len(places) == len(known) and all(x in places for row in needed for x in row)
    runs = [x for call in calls if (x := REPEATS.run_of(*call[:3])) is not None]
    if not is_known or len(runs) < len(calls) or not repeatable(tensors):
        return
    picks = [operator.itemgetter(*(places[x] for x in row)) for row in needed]
    *before, (attend, pick) = zip(runs, picks, strict=True)
    addresses_of_constants = [x.data_ptr() for x in constants]
    device = given[0].device
    stream = current_stream(device)

    def run(given: tuple[Tensor, ...], addresses: list[int]) -> Any:
        if current_stream(device) != stream or is_capturing():
            return NotImplemented
        found = (*given, *constants)
        at = (*addresses, *addresses_of_constants)
        for step, pick_step in before:
            made = step(pick_step(found), pick_step(at))
            if made is not None:
                found = *found, *made
                at = *at, *[x.data_ptr() for x in made]
        if before:
            bump_versions(*given[1:3])
        return attend(pick(found), pick(at))[0].view(shape)

    REPEATS.leave(OP, Repeat(tensors, options, run))
