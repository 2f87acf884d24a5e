"""`flash_varlen` on GPUs: which kernel a call takes, or which two."""

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall, arguments
from torch_paged_attn.backends.triton import mixed
from torch_paged_attn.backends.triton.hopper import attention as flash_varlen_sm90
from torch_paged_attn.backends.triton.hopper import chunks, few_queries, mla, support
from torch_paged_attn.backends.triton.hopper.choices import Form, is_numbered, is_one_launch
from torch_paged_attn.backends.triton.portable.attention import plan_attention
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.ops import paths
from torch_paged_attn.ops.attention_checks import check_attention

logger = logging.getLogger(__name__)


def _plan_latent(call: AttentionCall, longest: int) -> Plan:
    return mla.plan_attention(call, plan_attention(call))


def _plan_hopper(call: AttentionCall, longest: int) -> Plan:
    return flash_varlen_sm90.plan_attention(call, form=form_of(call, longest))


def _plan_both(call: AttentionCall, longest: int) -> Plan:
    return mixed.plan_attention(call)


def _plan_portable(call: AttentionCall, longest: int) -> Plan:
    return plan_attention(call, longest=in_turns(call, longest))


# by the kernels of a call: what the log says, and what plans it
SAID = {
    "hopper latent": "the Hopper kernel for latent attention",
    "hopper": "the Hopper kernel",
    "hopper and portable": "the Hopper kernel and the portable one",
    "portable": "the portable kernel",
}
PLANS: dict[str, Callable[[AttentionCall, int], Plan]] = {
    "hopper latent": _plan_latent,
    "hopper": _plan_hopper,
    "hopper and portable": _plan_both,
    "portable": _plan_portable,
}

# more queries than these fill a tile of Hopper's, whatever the heads are; of packed sequences
# that are short, more are told in steps of so many
MOST_SAID = STEP_SAID = support.BLOCK_M

# keys of the longest of sequences in pages, of few queries each, are told as powers of two
LEAST_REACH, MOST_REACH = 9, 17


def why_not_hopper(call: AttentionCall) -> str | None:
    """Why no sequence of a call may take Hopper's kernel; None if some may."""
    reason = support.unsupported(call)
    if reason is None and call.is_batch_invariant:
        return support.unordered(call)
    return reason


def why_not_latent(call: AttentionCall) -> str | None:
    """Why a call takes no kernel for latent attention; None if it does where its values are columns
    of its keys."""
    reason = mla.unsupported(call) or mla.unprofitable(call)
    if reason is None and call.is_batch_invariant:
        return "results must not depend on the batch"
    return reason


def why_portable(call: AttentionCall, longest: int = 0) -> str | None:
    """Why a call takes the portable kernel alone; None if it takes Hopper's, or both. `longest`, if
    it is not 0, is what the caller says of the longest sequence's queries.
    """
    reason = why_not_hopper(call)
    # one of them does all sequences, or bits would depend on how many there are
    if reason is not None or call.is_batch_invariant:
        return reason
    if mixed.is_mixed(call, longest):
        return None
    if few_queries.is_guessed(call, longest):
        return None
    if support.are_few_short(call, longest):
        return None
    if support.is_short(call, longest):
        return "sequences are short and few" if support.is_small(call) else None
    return support.unprofitable(call)


def in_turns(call: AttentionCall, longest: int) -> int:
    """`longest`, if the tiles of sequences are taken in turns (`seqlen_info.py`), else 0."""
    if call.is_batch_invariant or why_not_hopper(call) is not None:
        return 0
    if support.are_few_short(call, longest):
        return 0
    return longest if support.is_short(call, longest) else 0


def form_of(call: AttentionCall, longest: int) -> Form:
    """What Hopper's kernel is told of a batch that it has for itself."""
    if call.is_batch_invariant:
        return Form(is_guessed=support.is_few_rows(call))
    if mixed.is_mixed(call, longest):
        if is_numbered(call):
            return Form(is_numbered=True)
        return Form(is_mixed=True)
    is_guessed = few_queries.is_guessed(call, longest)
    if not is_guessed and chunks.are_few_chunks(call):
        return Form(is_numbered=True)
    if is_guessed and few_queries.is_uncut(call, longest):
        return Form(is_guessed=True, is_numbered=True)
    is_dealt = is_guessed and few_queries.is_dealt(call, longest)
    are_few = support.are_few_short(call, longest)
    turns = in_turns(call, longest)
    return Form(longest=turns, is_guessed=is_guessed, is_dealt=is_dealt, are_few=are_few)


def kernels_of(call: AttentionCall, longest: int = 0) -> tuple[str, str | None]:
    """`"hopper latent"`, `"hopper"`, `"portable"` or `"hopper and portable"`; of the last two, why
    not `"hopper"`."""
    if why_not_latent(call) is None:
        return "hopper latent", None
    reason = why_portable(call, longest)
    if reason is not None:
        return "portable", reason
    if not call.is_batch_invariant and mixed.is_mixed(call, longest):
        if is_numbered(call) or is_one_launch(call):
            return "hopper", None
        return "hopper and portable", "the batch may hold long and short sequences"
    return "hopper", None


def why_opaque(call: AttentionCall, longest: int = 0) -> str | None:
    """Why a graph holds a call as one node; None if it holds the kernel that the call takes."""
    from torch._inductor import config

    if kernels_of(call, longest)[0].startswith("hopper"):
        return "a graph holds no kernels in Gluon and no tensor maps"
    if config.triton.cudagraphs:
        return "in a CUDA graph one launch is faster than it and the copies that a graph makes"
    if call.is_batch_invariant:
        return "a graph does not say that products and sums are not to be fused"
    if any(x.itemsize == 1 for x in (call.q, call.k, call.v)) or call.result_dtype.itemsize == 1:
        return "a graph would copy a tensor that a kernel reads as another type"
    masks = call.attn_bias, call.tail_mask
    if any(x is not None and x.dtype == torch.bool for x in masks):
        return "a graph would copy a mask that a kernel reads as another type"
    return None


def said_of_longest(max_seqlen_q: Any, max_seqlen_k: Any, is_packed: bool) -> int:
    """What a plan is told of the longest sequence by the two hints: how many queries it has, if
    they are few; of packed sequences, how many tokens at most, if they are short; else 0.
    """
    # no number that is traced
    if type(max_seqlen_q) is not int:
        return 0
    if not is_packed:
        return max_seqlen_q if max_seqlen_q <= MOST_SAID else 0
    if type(max_seqlen_k) is not int:
        return 0
    longest = max(max_seqlen_q, max_seqlen_k)
    if longest > MOST_SAID:
        longest = -(-longest // STEP_SAID) * STEP_SAID
    return longest if longest <= support.MOST_SHORT else 0


def said_of_reach(max_seqlen_k: Any, is_packed: bool) -> int:
    """What a plan is told of the keys of the longest sequence, where keys are in pages: a power of
    two that is not less, or the largest of these; 0 where nothing is said.
    """
    if is_packed or type(max_seqlen_k) is not int or not max_seqlen_k:
        return 0
    return 1 << min(max((max_seqlen_k - 1).bit_length(), LEAST_REACH), MOST_REACH)


class AttentionOp:
    """An attention operator, called with the arguments of its schema. Of the two hints, on which no
    result depends, a plan is told how many queries the longest sequence has, if it has few, and
    about how many keys.
    """

    def __init__(self, name: str, check: Callable[[AttentionCall], None]) -> None:
        listed = [x for x in arguments(name) if not x.keyword_only]
        self._name, self._check = name, check
        self._call_of = getattr(AttentionCall, name)
        self._hints = next(i for i, x in enumerate(listed) if x.is_hint)
        self._table = next(i for i, x in enumerate(listed) if x.name == "block_table")
        self._most = len(listed) - 2
        # by what is said of the longest sequence: calls of the cache, and what plans them
        said = *range(MOST_SAID), *range(MOST_SAID, support.MOST_SHORT + 1, STEP_SAID)
        reaches = 0, *(1 << i for i in range(LEAST_REACH, MOST_REACH + 1))
        kinds = ((n, reach) for n in said for reach in reaches[: None if n <= MOST_SAID else 1])
        self._kinds = {
            (n, reach): (f"{name}, {n}, {reach}", functools.partial(self.plan, n, reach))
            for n, reach in kinds
        }

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        at = self._hints
        if args[at] < 0 or args[at + 1] < 0:
            self._check(self._call_of(*args, **options))
        tensors = *args[:at], *args[at + 2 :]
        is_packed = len(args) <= self._table or args[self._table] is None
        longest = said_of_longest(args[at], args[at + 1], is_packed)
        key, plan = self._kinds[longest, said_of_reach(args[at + 1], is_packed)]
        return launch_cache.call(key, plan, tensors, options)

    def plan(self, longest: int, reach: int, *tensors: Tensor | None, **options: Any) -> Plan:
        """The plan for the operator's tensors. `longest` is what is said of the longest sequence's
        queries, and `reach` of its keys, 0 where nothing is.
        """
        tensors = *tensors, *(None,) * (self._most - len(tensors))
        args = *tensors[: self._hints], 0, reach, *tensors[self._hints :]
        call = self._call_of(*args, **options)
        self._check(call)
        if is_traced():
            return plan_attention(call) if why_opaque(call, longest) is None else NotImplemented
        kernels, reason = kernels_of(call, longest)
        paths.announce(self._name, "triton", kernels, reason or "")
        because = f", because {reason}" if kernels == "portable" else ""
        logger.debug("%s: %s%s", self._name, SAID[kernels], because)
        return PLANS[kernels](call, longest)


flash_varlen = AttentionOp("flash_varlen", check_attention)
