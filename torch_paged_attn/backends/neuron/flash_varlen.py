"""`flash_varlen` on Neuron: see `attention_kernel.py` for the algorithm."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.neuron.attention import attend
from torch_paged_attn.backends.neuron.values import values_are_checked
from torch_paged_attn.ops.checks import check_attention, check_attention_values


def flash_varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Arguments as in `ops.flash_varlen`."""
    check_attention("flash_varlen", *args, **kwargs)
    if values_are_checked():
        check_attention_values("flash_varlen", *args, **kwargs)
    return attend("flash_varlen", *args, **kwargs)
