"""The CPU backend: C++ kernels on the libtorch stable ABI, registered by loading their library."""

import functools

import torch

from torch_paged_attn import environment


@functools.cache
def load() -> str | None:
    """Load the kernels once. None when they are there, else the reason why not."""
    if not environment.LIBRARY.exists():
        return (
            "the CPU kernels are not built; with a C++ compiler, reinstall with"
            " PAGED_ATTN_BUILD_CPP=1 pip install --no-build-isolation torch_paged_attn"
        )
    try:
        torch.ops.load_library(str(environment.LIBRARY))
    except OSError as error:
        return f"the CPU kernels do not load: {error.__cause__ or error}"
    return None
