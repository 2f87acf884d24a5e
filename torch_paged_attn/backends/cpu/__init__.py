"""The CPU backend: C++ kernels on the libtorch stable ABI, registered by loading their library."""

import functools

import torch

from torch_paged_attn import environment
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops.backend import Backend
from torch_paged_attn.ops.lacking import OF_BACKWARD, OPTIONAL


class Cpu(Backend):
    """Loads the library of kernels."""

    name = "cpu"
    dispatch_keys = ("CPU",)
    is_compiled = True
    lacks = OPTIONAL[:-1]
    lacks_in_backward = OF_BACKWARD[:-1]

    def unsupported(self) -> str | None:
        """None when the kernels are loaded, else the reason why not."""
        return _load()

    def unsupported_backward(self, call: AttentionCall) -> None:
        """None: every call that has gradients has them here."""


@functools.cache
def _load() -> str | None:
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


BACKEND = Cpu()
