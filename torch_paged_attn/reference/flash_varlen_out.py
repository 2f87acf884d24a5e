"""Plain PyTorch `flash_varlen_out`: arguments as in `ops.flash_varlen_out`, plus `precision`."""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.reference.attention import FLOAT32, Precision, attend


def flash_varlen_out(*args: Any, precision: Precision = FLOAT32, **kwargs: Any) -> Tensor:
    """Attention by its formula, written into the first argument; returns softmax_lse."""
    call = AttentionCall.flash_varlen_out(*args, **kwargs)
    found, lse = attend(call, precision)
    assert call.out is not None
    call.out.copy_(found)
    return lse
