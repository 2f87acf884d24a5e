"""The Triton backend: NVIDIA and AMD GPUs, no line of C++. Imported by the first call on a GPU."""

import importlib.util
from collections.abc import Callable
from typing import Any

if importlib.util.find_spec("triton") is not None:
    from torch_paged_attn.backends.triton.blocksparse import blocksparse
    from torch_paged_attn.backends.triton.flash_varlen import flash_varlen
    from torch_paged_attn.backends.triton.merge_states import merge_states
    from torch_paged_attn.backends.triton.reshape_and_cache import (
        reshape_and_cache,
        reshape_and_cache_split,
    )
    from torch_paged_attn.backends.triton.runtime.launch import traced

    __all__ = [
        "blocksparse",
        "flash_varlen",
        "merge_states",
        "reshape_and_cache",
        "reshape_and_cache_split",
    ]

# a call that was made before is known by its description
CHECKS_METADATA = True


def load() -> str | None:
    """None where the kernels can run, else the reason why not."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; a torch for CUDA or ROCm brings it"
    return None


def notes() -> list[str]:
    """Which kernels there are on this machine, for `python -m torch_paged_attn`."""
    from torch_paged_attn.backends.triton.hopper import attention as flash_varlen_sm90

    if (reason := flash_varlen_sm90.unsupported_device()) is not None:
        attention = f"flash_varlen and blocksparse take the portable kernel: {reason}"
    else:
        attention = (
            "flash_varlen and blocksparse take Hopper's own kernel for prefill in 16 bits, else the"
            " portable one; the DEBUG log of torch_paged_attn.backends.triton says which, and why"
        )
    return [attention, "reshape_and_cache and merge_states have one kernel for all GPUs"]


def traceable(name: str) -> Callable[..., Any] | None:
    """The op as torch.compile traces it, launches included; None where it stays one opaque node.

    Cache writes do: a graph copies what a kernel writes through two views of one tensor. Attention
    answers NotImplemented where it does (`flash_varlen.why_opaque`).
    """
    ops: dict[str, Callable[..., Any]] = {
        "blocksparse": blocksparse,
        "flash_varlen": flash_varlen,
        "merge_states": merge_states,
    }
    if name not in ops:
        return None

    def trace(*args: Any, **kwargs: Any) -> Any:
        with traced():
            return ops[name](*args, **kwargs)

    return trace
