"""Paged attention for PyTorch: `torch.ops.paged_attn.*`, which mean the same on every device.

>>> import torch_paged_attn
>>> out, softmax_lse = torch_paged_attn.flash_varlen(q, k, v, cu_seqlens_q, causal=True)

`flash_attn_func`, `flash_attn_varlen_func` and `flash_attn_with_kvcache` take the arguments that
flash-attn's functions take.
"""

import importlib
from typing import TYPE_CHECKING, Any

import torch.nn.attention

from torch_paged_attn import ops
from torch_paged_attn.ops import *  # noqa: F403

if TYPE_CHECKING:
    from torch_paged_attn import layouts
    from torch_paged_attn._compile import use_compiled
    from torch_paged_attn._explain import Explanation, explain
    from torch_paged_attn._warmup import warmup
    from torch_paged_attn.integrations.flash_attn import (
        flash_attn_func,
        flash_attn_varlen_func,
        flash_attn_with_kvcache,
    )
    from torch_paged_attn.kv_cache import CacheFull, PagedBatch, PagedKVCache
    from torch_paged_attn.layouts import BlockSparseLayout

__version__ = "0.1.0"

__all__ = [
    "BlockSparseLayout",
    "CacheFull",
    "Explanation",
    "PagedBatch",
    "PagedKVCache",
    "explain",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "layouts",
    "use_compiled",
    "warmup",
]
__all__ += ops.__all__

# name -> the module that defines it, imported when the name is first used: importing the package
# only registers the operators
_LATER = {
    "BlockSparseLayout": "layouts",
    "CacheFull": "kv_cache",
    "Explanation": "_explain",
    "PagedBatch": "kv_cache",
    "PagedKVCache": "kv_cache",
    "explain": "_explain",
    "flash_attn_func": "integrations.flash_attn",
    "flash_attn_varlen_func": "integrations.flash_attn",
    "flash_attn_with_kvcache": "integrations.flash_attn",
    "use_compiled": "_compile",
    "warmup": "_warmup",
}


def _activate() -> Any:
    return importlib.import_module(f"{__name__}.integrations.torch_attention").activate()


def _activate_sdpa() -> Any:
    return importlib.import_module(f"{__name__}.integrations.torch_sdpa").activate()


# this only registers the two names; a user activates one
# torch 2.9, the last that torch_xla runs on, has no such list
if (_register := getattr(torch.nn.attention, "register_flash_attention_impl", None)) is not None:
    _register("PAGED_ATTN", register_fn=_activate)
    _register("PAGED_ATTN_SDPA", register_fn=_activate_sdpa)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name not in _LATER:
        return importlib.import_module(f"{__name__}.{name}")
    return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
