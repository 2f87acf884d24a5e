"""`flash_varlen` on GPUs: which kernel a call takes."""

import logging
from typing import Any

from torch import Tensor

from torch_paged_attn.backends.triton import flash_varlen_sm90, recipes
from torch_paged_attn.backends.triton.attention import attend, batch_invariant
from torch_paged_attn.backends.triton.values import values_are_checked
from torch_paged_attn.ops.checks import check_attention, check_attention_values

logger = logging.getLogger(__name__)


def why_portable(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, *args: Any, **kwargs: Any
) -> str | None:
    """Why a call takes the portable kernel; None if it takes Hopper's."""
    reason = flash_varlen_sm90.unsupported(q, k, v, cu_seqlens_q, *args, **kwargs)
    if reason is None and batch_invariant():
        return "results must not depend on the batch"
    return reason or flash_varlen_sm90.too_small(q, k, cu_seqlens_q)


def flash_varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.flash_varlen`."""
    key = recipes.key_of("flash_varlen", 5, batch_invariant(), args, kwargs)
    if (recipe := recipes.recall(key)) is not None:
        return recipe(*args, **kwargs)
    check_attention("flash_varlen", *args, **kwargs)
    if values_are_checked():
        check_attention_values("flash_varlen", *args, **kwargs)
    reason = why_portable(*args, **kwargs)
    if reason is None:
        logger.debug("flash_varlen: the Hopper kernel")
        return flash_varlen_sm90.flash_varlen(*args, **kwargs)
    logger.debug("flash_varlen: the portable kernel, because %s", reason)
    return attend(*args, key=key, **kwargs)
