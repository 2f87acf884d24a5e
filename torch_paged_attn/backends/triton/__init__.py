"""The Triton backend: NVIDIA and AMD GPUs, no line of C++. Imported by the first call on a GPU."""

import importlib.util

if importlib.util.find_spec("triton") is not None:
    from torch_paged_attn.backends.triton.blocksparse import blocksparse
    from torch_paged_attn.backends.triton.flash_varlen import flash_varlen
    from torch_paged_attn.backends.triton.merge_states import merge_states
    from torch_paged_attn.backends.triton.reshape_and_cache import (
        reshape_and_cache,
        reshape_and_cache_split,
    )

    __all__ = [
        "blocksparse",
        "flash_varlen",
        "merge_states",
        "reshape_and_cache",
        "reshape_and_cache_split",
    ]


def load() -> str | None:
    """None where the kernels can run, else the reason why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; a torch for CUDA or ROCm brings it"
    return None
