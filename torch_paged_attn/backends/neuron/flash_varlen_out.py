"""`flash_varlen_out` on Neuron: kernels have results of their own, which are copied."""

from typing import Any

from torch import Tensor

from torch_paged_attn.backends.neuron.flash_varlen import flash_varlen


def flash_varlen_out(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Arguments as in `ops.flash_varlen_out`."""
    found, lse = flash_varlen(*args, out_dtype=out.dtype, **kwargs)
    out.copy_(found)
    return lse
