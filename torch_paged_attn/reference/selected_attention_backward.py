"""Plain PyTorch `selected_attention_backward`: arguments as in `ops`, plus `precision`."""

import functools
from typing import Any

from torch import Tensor

from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.reference.attention import FLOAT32, Precision
from torch_paged_attn.reference.attention_backward import attend_backward
from torch_paged_attn.reference.selected_attention import selected_mask


def selected_attention_backward(
    *args: Any, precision: Precision = FLOAT32, **kwargs: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients by their formula; `precision=GOLDEN` is float64 throughout."""
    call = BackwardCall.selected_attention(*args, **kwargs)
    return attend_backward(call, precision, functools.partial(selected_mask, call.forward))
