"""`flash_varlen` on GPUs: which kernel a call takes."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.hopper import attention as flash_varlen_sm90
from torch_paged_attn.backends.triton.portable.attention import attend
from torch_paged_attn.backends.triton.runtime import recipes
from torch_paged_attn.backends.triton.runtime.launch import is_traced
from torch_paged_attn.ops._again import UNKNOWN
from torch_paged_attn.ops.flash_varlen import check

logger = logging.getLogger(__name__)

# tensors after the two hints
OPTIONAL_TENSORS = 10


def why_portable(call: AttentionCall) -> str | None:
    """Why a call takes the portable kernel; None if it takes Hopper's."""
    reason = flash_varlen_sm90.unsupported(call)
    if reason is None and environment.BATCH_INVARIANT:
        return "results must not depend on the batch"
    return reason or flash_varlen_sm90.unprofitable(call)


def why_opaque(call: AttentionCall) -> str | None:
    """Why a graph holds a call as one node; None if it holds the kernel that the call takes."""
    from torch._inductor import config

    if why_portable(call) is None:
        return "a graph holds no kernels in Gluon and no tensor maps"
    if config.triton.cudagraphs:
        return "in a CUDA graph one launch is faster than it and the copies that a graph makes"
    if any(x.itemsize == 1 for x in (call.q, call.k)) or call.result_dtype.itemsize == 1:
        return "a graph would copy a tensor that a kernel reads as another type"
    if call.attn_bias is not None and call.attn_bias.dtype == torch.bool:
        return "a graph would copy a mask that a kernel reads as another type"
    return None


def answer(
    call_of: Callable[..., AttentionCall],
    check: Callable[..., None],
    hints: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Tensor, Tensor]:
    """The results of an operator called with these arguments: from a recipe, or checked, planned
    and launched. Number `hints` and the next, which change nothing, are no part of a recipe.
    """
    op, rest = call_of.__name__, args[hints + 2 :]
    tensors = *args[:hints], *rest, *(None,) * (OPTIONAL_TENSORS - len(rest))

    def plan() -> tuple[Tensor, Tensor]:
        check(*args, **kwargs)
        call = call_of(*args, **kwargs)
        if is_traced():
            return attend(call) if why_opaque(call) is None else NotImplemented
        reason = why_portable(call)
        if reason is None:
            logger.debug("%s: the Hopper kernel", op)
            return flash_varlen_sm90.attend(call)
        logger.debug("%s: the portable kernel, because %s", op, reason)
        return attend(call)

    results: Any = UNKNOWN
    if min(args[hints : hints + 2], default=0) >= 0:
        results = recipes.play(op, tensors, kwargs)
    return recipes.make(plan, op, tensors, kwargs) if results is UNKNOWN else results


def flash_varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.flash_varlen`."""
    # the two hints come after q, k, v and the lengths
    return answer(AttentionCall.flash_varlen, check, 5, args, kwargs)
