"""flash-attn's submodule `flash_attn.flash_attn_interface`: the same seven functions."""

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
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]
