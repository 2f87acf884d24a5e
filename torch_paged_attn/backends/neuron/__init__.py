"""The Neuron backend: AWS Trainium and Inferentia, in NKI. Imported by the first call there.

Written against the public documentation of NKI 0.6 and run on an emulator of it. It has never run
on hardware: see `docs/neuron.md`.
"""

from collections.abc import Callable
from typing import Any

from torch_paged_attn.backends.neuron.blocksparse import blocksparse
from torch_paged_attn.backends.neuron.flash_varlen import flash_varlen
from torch_paged_attn.backends.neuron.merge_states import merge_states
from torch_paged_attn.backends.neuron.paged_kv import is_dense
from torch_paged_attn.backends.neuron.plan_cache import keep_plans
from torch_paged_attn.backends.neuron.reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_split,
)
from torch_paged_attn.backends.neuron.runtime import can_trace, traced, unsupported

__all__ = [
    "blocksparse",
    "flash_varlen",
    "keep_plans",
    "load",
    "merge_states",
    "reshape_and_cache",
    "reshape_and_cache_split",
]


def load() -> str | None:
    """None where the kernels can run, else the reason why not."""
    return unsupported()


def traceable(name: str) -> Callable[..., Any] | None:
    """The op as torch.compile traces it, launches included; None where it has to stay opaque.

    The attention ops do: their work lists are made on the host from what the tensors hold. So do
    writes into caches between whose elements something else lies, such as keys beside values.
    """
    if name == "merge_states":
        return merge_states
    if not name.startswith("reshape_and_cache") or not can_trace():
        return None

    def trace(*args: Any, **kwargs: Any) -> Any:
        caches = args[2] if name == "reshape_and_cache" else args[2:4]
        if not all(is_dense(cache) for cache in caches):
            return NotImplemented
        with traced():
            return globals()[name.replace(".", "_")](*args, **kwargs)

    return trace
