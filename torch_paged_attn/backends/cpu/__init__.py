"""The CPU backend: C++ kernels on the libtorch stable ABI, registered by loading their library."""

import functools
import os
from pathlib import Path

import torch


def library_path() -> Path:
    """Where the compiled kernels lie; `PAGED_ATTN_LIBRARY` points somewhere else (sanitizers)."""
    default = Path(__file__).parents[2] / "_C.abi3.so"
    return Path(os.environ.get("PAGED_ATTN_LIBRARY", default))


@functools.cache
def load() -> str | None:
    """Load the kernels once. None when they are there, else the reason why not."""
    path = library_path()
    if not path.exists():
        return (
            "the CPU kernels are not built; with a C++ compiler, reinstall with"
            " PAGED_ATTN_BUILD_CPP=1 pip install --no-build-isolation torch_paged_attn"
        )
    try:
        torch.ops.load_library(str(path))
    except OSError as error:
        return f"the CPU kernels do not load: {error.__cause__ or error}"
    return None
