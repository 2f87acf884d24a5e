"""Plain PyTorch `flash_varlen`: arguments as in `ops.flash_varlen`, plus `precision`."""

from typing import Any

from torch import Tensor

from torch_paged_attn.reference.attention import attend


def flash_varlen(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    """Attention by its formula; `precision=GOLDEN` is float64 throughout."""
    return attend(*args, **kwargs)
