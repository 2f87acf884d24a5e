"""flash-attn's submodule `flash_attn.flash_attn_interface`: the same seven functions, and those
below autograd.
"""

from torch_paged_attn.integrations.flash_attn.forward_backward import (
    _flash_attn_backward,
    _flash_attn_forward,
    _flash_attn_varlen_backward,
    _flash_attn_varlen_forward,
)
from torch_paged_attn.integrations.flash_attn.functions import (
    flash_attn_func,
    flash_attn_varlen_func,
)
from torch_paged_attn.integrations.flash_attn.packed import (
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
)
from torch_paged_attn.integrations.flash_attn.with_kvcache import flash_attn_with_kvcache

__all__ = [
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
