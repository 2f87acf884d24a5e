"""Plain PyTorch `flash_varlen`: arguments as in `ops.flash_varlen`, plus `precision`."""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.reference.attention import FLOAT32, Precision, attend


def flash_varlen(
    *args: Any, precision: Precision = FLOAT32, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Attention by its formula; `precision=GOLDEN` is float64 throughout."""
    return attend(AttentionCall.flash_varlen(*args, **kwargs), precision)
