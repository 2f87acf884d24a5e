"""Plain PyTorch `flash_varlen_backward`: arguments as in `ops`, plus `precision`."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.reference.attention import FLOAT32, Precision
from torch_paged_attn.reference.attention_backward import attend_backward


def flash_varlen_backward(
    *args: Any, precision: Precision = FLOAT32, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by their formula; `precision=GOLDEN` is float64 throughout."""
    return attend_backward(BackwardCall.flash_varlen(*args, **kwargs), precision)
