"""`flash_varlen_backward` on GPUs: which kernels run a call."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.hopper.backward import plan as backward_sm90
from torch_paged_attn.backends.triton.portable.backward.plan import lacks_room, plan_backward
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.contiguous import after_copies, without_gaps
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backward_call import BackwardCall, arguments
from torch_paged_attn.ops import paths
from torch_paged_attn.ops.checks import refuse
from torch_paged_attn.ops.flash_varlen_backward import check

logger = logging.getLogger(__name__)


class BackwardOp:
    """The backward of an attention operator, called with the arguments of its schema. Plans, which
    `plan` makes of checked calls, do not depend on the two hints. kind: what else they depend on.
    """

    def __init__(
        self,
        forward: str,
        check: Callable[..., None],
        plan: Callable[[BackwardCall], Plan],
        kind: str | None = None,
    ) -> None:
        self._name, self._check, self._plan_checked = f"{forward}_backward", check, plan
        self._key = f"{self._name}, {kind}" if kind else self._name
        listed = [x for x in arguments(self._name) if not x.keyword_only]
        self._call_of: Callable[..., BackwardCall] = getattr(BackwardCall, forward)
        self._hints = next(i for i, x in enumerate(listed) if x.is_hint)
        self._names = [x.name for x in listed if not x.is_hint]
        self._most = len(self._names)

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        at = self._hints
        if args[at] < 0 or args[at + 1] < 0:
            self._check(*args, **options)
        tensors = *args[:at], *args[at + 2 :]
        # options are part of a plan's key, so a list has to be a tuple; and torch's own switch for
        # deterministic algorithms counts as an option
        options["output_mask"] = tuple(options.get("output_mask", (True,) * 5))
        is_strict = torch.are_deterministic_algorithms_enabled()
        options["deterministic"] = options.get("deterministic", True) or is_strict
        return launch_cache.call(self._key, self._plan, tensors, options)

    def _plan(self, *tensors: Tensor | None, **options: Any) -> Plan:
        tensors = *tensors, *(None,) * (self._most - len(tensors))
        tensors, copied = without_gaps(self._names, tensors)
        return after_copies(self._plan_contiguous(tensors, options), copied)

    def _plan_contiguous(self, tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Plan:
        args = *tensors[: self._hints], 0, 0, *tensors[self._hints :]
        self._check(*args, **options)
        call = self._call_of(*args, **options)
        BACKEND.refuse_lacking(call)
        return self._plan_checked(call)


def plan_dense(call: BackwardCall) -> Plan:
    """The plan of a backward of all keys, or of those of a layout's blocks."""
    ranks = call.forward.key_ranks
    if call.wanted[3] and call.forward.layout is not None and ranks > 1:
        problem = f"no gradient of attn_bias with a layout and key_ranks = {ranks}"
        refuse(call.op, problem, "pass an attn_bias that requires no grad")
    if (reason := lacks_room(call.forward)) is not None:
        refuse(call.op, reason, "pass tensors of 16 bits on this GPU")
    reason = backward_sm90.unsupported(call)
    paths.announce(call.op, "triton", "portable" if reason else "hopper", reason or "")
    if reason is None:
        logger.debug("%s: the Hopper kernels", call.op)
        return backward_sm90.plan_backward(call)
    logger.debug("%s: the portable kernels, because %s", call.op, reason)
    return plan_backward(call)


flash_varlen_backward = BackwardOp("flash_varlen", check, plan_dense)
