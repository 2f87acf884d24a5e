"""`flash_varlen` on GPUs: which kernel a call takes."""

import logging
from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton import flash_varlen_sm90, recipes
from torch_paged_attn.backends.triton.attention import attend, batch_invariant
from torch_paged_attn.ops.attention_checks import check_attention

logger = logging.getLogger(__name__)


def why_portable(call: AttentionCall) -> str | None:
    """Why a call takes the portable kernel; None if it takes Hopper's."""
    reason = flash_varlen_sm90.unsupported(call)
    if reason is None and batch_invariant():
        return "results must not depend on the batch"
    return reason or flash_varlen_sm90.too_small(call)


def answer(call: AttentionCall, key: Any) -> tuple[Tensor, Tensor]:
    """Launch a call that was checked; with a `key` the portable kernel keeps a recipe for it."""
    reason = why_portable(call)
    if reason is None:
        logger.debug("%s: the Hopper kernel", call.op)
        return flash_varlen_sm90.flash_varlen(call)
    logger.debug("%s: the portable kernel, because %s", call.op, reason)
    return attend(call, key=key)


def flash_varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.flash_varlen`."""
    key = recipes.key_of("flash_varlen", 5, batch_invariant(), args, kwargs)
    if (recipe := recipes.recall(key)) is not None:
        return recipe(*args, **kwargs)
    call = AttentionCall.flash_varlen(*args, **kwargs)
    check_attention(call)
    return answer(call, key)
