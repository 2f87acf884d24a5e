"""flash-attn's functions on every device, with the arguments of flash-attn 2.8.

>>> from torch_paged_attn.integrations.flash_attn import flash_attn_varlen_func

All seven functions of flash-attn are here; `bert_padding` and `flash_attn_interface` are its
submodules of that name, `flash_attn_3` is FlashAttention-3's module `flash_attn_interface`. Code
that says `import flash_attn` itself runs on these after

>>> torch_paged_attn.integrations.flash_attn.install()

Further arguments are keyword-only and have the names of FlashAttention-3, vLLM and SGLang:
seqused_k, s_aux (attention sinks), descales of 8-bit caches, out, page_table, cu_seqlens_q.

As in flash-attn, causal masks and windows are aligned to the bottom right, a row that sees no key
is 0, and softmax_lse is a natural logarithm in float32. Unlike in flash-attn, page_size and
head_dim are arbitrary, a window may be combined with causal (which clamps its right side to 0), and
tensors may have any strides whose last one is 1. float8 queries give bfloat16 results unless `out`
is given.

With `deterministic=False`, flash-attn's default, the backward may add up in any order. These
arguments do not change results: `max_seqlen_*` (hints; 0-d tensors are not read), `num_splits`,
`pack_gqa`, `sm_margin`, `scheduler_metadata`, `ver`. An argument that is not supported raises
NotImplementedError. Wrong shapes, dtypes and values raise the errors of the ops.
"""

from torch_paged_attn.integrations.flash_attn._install import install, uninstall
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
    "install",
    "uninstall",
]
