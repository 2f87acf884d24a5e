"""`flash_varlen` on GPUs: which kernel runs a call."""

import dataclasses
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn.attention_call import (
    AttentionCall,
    arguments,
    is_by_column,
    sizes_of_tensors,
)
from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.dispatch import kernels, unpacked
from torch_paged_attn.backends.triton.dispatch.cost_model import UNPACKED
from torch_paged_attn.backends.triton.hopper import support
from torch_paged_attn.backends.triton.hopper.forward import plan as flash_varlen_sm90
from torch_paged_attn.backends.triton.hopper.forward.choices import FORM, Form
from torch_paged_attn.backends.triton.hopper.forward.tiles import are_few_stretches
from torch_paged_attn.backends.triton.hopper.mla import plan as mla
from torch_paged_attn.backends.triton.hopper.selected import in_order_plan as columns
from torch_paged_attn.backends.triton.portable.forward.plan import plan_attention
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.contiguous import after_copies, without_gaps
from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.backends.triton.runtime.launch_cache import MakePlan, Plan, Resizable
from torch_paged_attn.ops import paths
from torch_paged_attn.ops.attention_checks import check_attention
from torch_paged_attn.ops.checks import refuse
from torch_paged_attn.ops.repeated import Recent

logger = logging.getLogger(__name__)


# kernels of a call -> their name in the log
SAID = {
    "hopper latent": "the Hopper kernel for latent attention",
    "hopper columns": "the Hopper kernel for latents with scales by column",
    "hopper": "the Hopper kernel",
    "hopper and portable": "the Hopper kernel over copied keys and the portable kernel",
    "portable": "the portable kernel",
}

# Plans are kept for each value of the hint max_seqlen_q up to MOST_SAID; more queries fill a tile
# of Hopper's kernel, whatever the number of heads. For packed short sequences the hint is rounded
# up to a multiple of STEP_SAID
MOST_SAID = STEP_SAID = support.BLOCK_M

# the operator's arguments on which a plan depends as far as their values say
HINTS = "max_seqlen_q", "max_seqlen_k"

# the most pairs of hints whose rounded values are kept
MOST_HINTS = 1024

# for paged keys, the hint max_seqlen_k is rounded up to a multiple of the first number, above the
# second so that there are four values up to twice a power of two, and counts as the third at most
REACH_STEP, REACH_IN_STEPS, MOST_REACH = 64, 512, 2**17


def unsupported_on_hopper(call: AttentionCall) -> str | None:
    """Why Hopper's kernel can run no sequence of a call; None if it can run some."""
    reason = support.unsupported(call)
    if reason is None and call.is_batch_invariant:
        return support.unordered(call)
    return reason


def decides_bits(call: AttentionCall) -> bool:
    """Whether Hopper's kernel runs batch-invariant calls of a model like this one. It adds up in
    another order than the portable kernel does, so it has to run all of them.
    """
    is_ours = call.is_batch_invariant and 0 not in call.k.shape
    return is_ours and (support.unsupported_model(call) or support.unordered(call)) is None


def with_aligned_copies(call: AttentionCall) -> tuple[AttentionCall, list[int]]:
    """The call with copies of queries and packed keys that Hopper's kernel cannot address, if its
    bits are to be those of Hopper's kernel; and the numbers of these tensors.
    """
    if is_traced() or not decides_bits(call):
        return call, []
    names = ("q", "k", "v") if call.block_table is None else ("q",)
    tensors = [getattr(call, name) for name in names]
    copied = [i for i, x in enumerate(tensors) if support.is_misaligned(x, x.dim() - 1)]
    copies = {names[i]: tensors[i].clone(memory_format=torch.contiguous_format) for i in copied}
    return dataclasses.replace(call, **copies), copied


def refuse_other_bits(call: AttentionCall) -> None:
    """Raise NotImplementedError for a batch-invariant call whose keys Hopper's kernel cannot read,
    though it runs other calls of the same model.
    """
    if not decides_bits(call):
        return
    if (reason := support.out_of_reach(call)) is not None:
        instead = "use pages of a multiple of 16 tokens, aligned to 16 bytes"
        refuse(call.op, f"no batch_invariant on Hopper where {reason}", instead)


def unsupported_latent(call: AttentionCall) -> str | None:
    """Why the kernel for latent attention cannot run a call; None if it can, provided that the
    values are columns of the keys.
    """
    reason = mla.unsupported(call) or mla.unprofitable(call)
    if reason is None and call.is_batch_invariant:
        return "results must not depend on the batch"
    return reason


def unsupported_columns(call: AttentionCall) -> str | None:
    """Why Hopper's kernel for latents with scales by column does not run a call of them; None if it
    does.
    """
    reason = columns.unsupported(call) or columns.unprofitable(call)
    if reason is None and call.is_batch_invariant:
        return "results must not depend on the batch"
    return reason


class Choice(NamedTuple):
    """The kernel that runs a call: `"hopper latent"`, `"hopper columns"`, `"hopper"`, `"portable"`,
    or some sequences each, `"hopper and portable"`; why, if it is not `"hopper"`; and how it runs
    it.
    """

    kernel: str
    reason: str | None = None
    form: Form = FORM  # of Hopper's kernel
    way: kernels.Way | None = None  # by which it was chosen, of several
    in_turns: int = 0  # for the portable kernel, as `longest` in `portable.attention`


def choose(call: AttentionCall, longest: int = 0) -> Choice:
    """The kernel that runs a call. `longest`: the hint max_seqlen_q, or 0."""
    if unsupported_latent(call) is None:
        return Choice("hopper latent")
    if is_by_column(call.v_descale, call.v):
        reason = unsupported_columns(call)
        return Choice("hopper columns" if reason is None else "portable", reason)
    reason = unsupported_on_hopper(call)
    if (way := kernels.way_of(call, longest, reason)) is not None:
        if way.name == UNPACKED:
            reason = "keys of sequences of many queries are copied in 16 bits"
            return Choice("hopper and portable", reason, way=way)
        if way.form is not None:
            return Choice("hopper", None, way.form, way)
        return Choice("portable", reason or "it takes the least time, as estimated", way=way)
    if reason is not None:
        return Choice("portable", reason)
    if call.is_batch_invariant:
        if not support.is_few_rows(call):
            return Choice("hopper")
        is_numbered = are_few_stretches(call)
        return Choice("hopper", form=Form(is_numbered=is_numbered, is_cut=True, tiles="low"))
    if support.is_short(call, longest):
        if support.is_small(call):
            return Choice("portable", "sequences are short and few", in_turns=longest)
        are_few = support.are_few_short(call)
        return Choice("hopper", form=Form(tiles="low") if are_few else Form(longest=longest))
    reason = support.unprofitable(call)
    return Choice("hopper" if reason is None else "portable", reason)


def why_opaque(call: AttentionCall, longest: int = 0) -> str | None:
    """Why a call is an opaque node in graphs of torch.compile; None if its kernel is traced."""
    from torch._inductor import config

    if choose(call, longest).kernel != "portable":
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
    """The hint on the longest sequence on which a plan depends: its number of queries, if it is
    small; for packed sequences, an upper bound of its tokens, if they are short; else 0.
    """
    # while a graph is traced, sizes may be symbols
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
    """The hint on the longest sequence's keys on which a plan depends, for paged keys: max_seqlen_k
    rounded up, so that plans are few; 0 if it is not given.
    """
    if is_packed or type(max_seqlen_k) is not int or not max_seqlen_k:
        return 0
    step = REACH_STEP
    if max_seqlen_k > REACH_IN_STEPS:
        step = 1 << ((max_seqlen_k - 1).bit_length() - 3)
    return min(-(-max_seqlen_k // step) * step, MOST_REACH)


def sizes_of(call: AttentionCall) -> tuple[str | None, ...] | None:
    """For each given tensor of a valid call, the number that its first dimension follows from. None
    if another dimension may follow from one: then a call of other sizes is not known to be valid.
    """
    if call.layout is not None or call.attn_bias is not None:
        return None
    found, names = [], sizes_of_tensors()
    for name, x in call.given_tensors().items():
        number = names.get(name)
        if number is None and x.dim() == 2:  # slopes or scales (batch, heads)
            return None
        if name == "v_descale" and x.dim() == 3 and not call.is_paged:  # of packed keys' columns
            return None
        found.append(None if number == "total_k" and call.is_paged else number)
    return tuple(found)


class AttentionOp:
    """An attention operator, called with the arguments of its schema. A plan depends on the two
    hints only as far as `said_of_longest` and `said_of_reach` say; results do not depend on them.
    """

    def __init__(self, name: str, check: Callable[[AttentionCall], None]) -> None:
        listed = [x for x in arguments(name) if not x.keyword_only]
        self._name, self._check = name, check
        self._call_of = getattr(AttentionCall, name)
        self._hints = next(i for i, x in enumerate(listed) if x.is_hint)
        self._table = next(i for i, x in enumerate(listed) if x.name == "block_table")
        self._names = [x.name for x in listed if not x.is_hint]
        self._most = len(self._names)
        self._known_kind_of = functools.lru_cache(MOST_HINTS)(self._kind_of)

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if args[self._hints] < 0 or args[self._hints + 1] < 0:
            self._check(self._call_of(*args, **options))
        return launch_cache.call(*self._planned_by(args), options)

    def recent(self) -> Recent:
        """Where the plans of its last calls are."""
        return launch_cache.recent(self._known_kind_of, HINTS, "block_table")

    def _planned_by(self, args: tuple[Any, ...]) -> tuple[str, MakePlan, tuple[Tensor | None, ...]]:
        """The name in the launch cache of calls with such hints, the function that plans a call,
        and the tensors that it takes.
        """
        at = self._hints
        is_paged = len(args) > self._table and args[self._table] is not None
        # symbols of a traced graph cannot be keys of a cache
        find = self._kind_of if is_traced() else self._known_kind_of
        key, plan = find(args[at], args[at + 1], is_paged)
        return key, plan, (*args[:at], *args[at + 2 :])

    def _kind_of(
        self, max_seqlen_q: Any, max_seqlen_k: Any, is_paged: bool
    ) -> tuple[str, MakePlan]:
        """The name in the launch cache of calls with these hints, and the function that plans such
        a call.
        """
        longest = said_of_longest(max_seqlen_q, max_seqlen_k, not is_paged)
        reach = said_of_reach(max_seqlen_k, not is_paged)
        return f"{self._name}, {longest}, {reach}", functools.partial(
            self.make_plan, longest, reach
        )

    def plan(self, longest: int, reach: int, *tensors: Tensor | None, **options: Any) -> Plan:
        """The plan for the operator's tensors. `longest` and `reach` are what `said_of_longest` and
        `said_of_reach` return.
        """
        call, copied = self._checked(reach, tensors, options)
        return after_copies(self._plan_checked(call, longest), copied)

    def make_plan(
        self, longest: int, reach: int, *tensors: Tensor | None, **options: Any
    ) -> Plan | Resizable:
        """The same, and what plans calls of other sizes, if these are known not to need checks."""
        call, copied = self._checked(reach, tensors, options)
        plan = after_copies(self._plan_checked(call, longest), copied)
        names = tuple(call.given_tensors())
        if copied or is_traced() or (sizes := sizes_of(call)) is None:
            return plan
        kind = call.kind()

        def resize(tensors: tuple[Tensor, ...]) -> Plan:
            named = dict(zip(names, tensors, strict=True))
            return self._plan_checked(AttentionCall.of_kind(kind, named), longest)

        return Resizable(plan, sizes, resize)

    def _checked(
        self, reach: int, tensors: tuple[Tensor | None, ...], options: dict[str, Any]
    ) -> tuple[AttentionCall, list[int]]:
        """The call for which a plan is made, and which of the given tensors are copied first."""
        args, copied = self._planned_for(reach, tensors)
        call = self._call_of(*args, **options)
        self._check(call)
        BACKEND.refuse_lacking(call)
        call, aligned = with_aligned_copies(call)
        refuse_other_bits(call)
        return call, [*copied, *aligned]

    def _planned_for(
        self, reach: int, tensors: tuple[Tensor | None, ...]
    ) -> tuple[tuple[Any, ...], list[int]]:
        """The operator's positional arguments for which a plan is made, and which of the given
        tensors are copied first.
        """
        tensors = *tensors, *(None,) * (self._most - len(tensors))
        tensors, copied = without_gaps(self._names, tensors)
        return (*tensors[: self._hints], 0, reach, *tensors[self._hints :]), copied

    def _plan_checked(self, call: AttentionCall, longest: int) -> Plan:
        if is_traced() and why_opaque(call, longest) is not None:
            return NotImplemented
        kernel, reason, form, way, in_turns = choose(call, longest)
        if not is_traced():
            paths.announce(self._name, "triton", kernel, reason or "")
            because = f", because {reason}" if kernel == "portable" else ""
            logger.debug("%s: %s%s", self._name, SAID[kernel], because)
        if kernel == "hopper and portable":
            return unpacked.plan_attention(call)
        if kernel == "hopper":
            return flash_varlen_sm90.plan_attention(call, form=form)
        if kernel == "hopper columns":
            return columns.plan_attention(call)
        config, splits = (None, None) if way is None else (way.config, way.splits)
        in_turns = 0 if is_traced() else in_turns
        plan = plan_attention(call, config=config, splits=splits, longest=in_turns)
        return mla.plan_attention(call, plan) if kernel == "hopper latent" else plan


flash_varlen = AttentionOp("flash_varlen", check_attention)
