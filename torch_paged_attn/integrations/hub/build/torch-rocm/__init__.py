"""What the package `kernels` loads in place of a kernel of Hugging Face's hub."""

from torch_paged_attn.integrations.flash_attn import (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
