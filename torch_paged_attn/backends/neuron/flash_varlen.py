"""`flash_varlen` on Neuron: planned in `attention.py`, computed by `kernels/attention.py`."""

from typing import Any

from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.neuron.attention import attend


def flash_varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.flash_varlen`."""
    return attend(AttentionCall.flash_varlen(*args, **kwargs))
