"""`flash_varlen_backward` on GPUs: which kernels a call takes."""

import logging
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton.portable.backward import plan_backward, tensor_names
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.launch_cache import Plan
from torch_paged_attn.backward_call import BackwardCall

logger = logging.getLogger(__name__)


class BackwardOp:
    """The backward of an attention operator, called with the arguments of its schema. The two
    hints, on which no result depends, are no part of what a plan is for.
    """

    def __init__(self, op: str) -> None:
        self._name = f"{op}_backward"
        self._call_of: Callable[..., BackwardCall] = getattr(BackwardCall, op)
        names = tensor_names(op)
        # cu_seqlens_q and cu_seqlens_k are the last tensors before the hints
        self._hints = names.index("cu_seqlens_k") + 1
        self._after_hints = len(names) - self._hints

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, ...]:
        at = self._hints
        rest = args[at + 2 :]
        tensors = *args[:at], *rest, *(None,) * (self._after_hints - len(rest))
        if "output_mask" in options:  # a list is no key
            options["output_mask"] = tuple(options["output_mask"])
        return launch_cache.call(self._name, self._plan, tensors, options)

    def _plan(self, *tensors: Tensor | None, **options: Any) -> Plan:
        at = self._hints
        call = self._call_of(*tensors[:at], 0, 0, *tensors[at:], **options)
        return plan_backward(call)


flash_varlen_backward = BackwardOp("flash_varlen")
