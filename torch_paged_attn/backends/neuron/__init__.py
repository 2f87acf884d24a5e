"""The Neuron backend: AWS Trainium and Inferentia, in NKI. Not one line of it imports `nki` until
an op is called.

Written against the public documentation of NKI 0.6 and run on an emulator of it. It has never run
on hardware: see `docs/neuron.md`.
"""

import importlib
from typing import Any

_HOMES = {
    "blocksparse": "attention",
    "flash_varlen": "attention",
    "merge_states": "merge_states",
    "reshape_and_cache": "reshape_and_cache",
    "reshape_and_cache_split": "reshape_and_cache",
}


def load() -> str | None:
    """None where the kernels can run, else the reason why not."""
    from torch_paged_attn.backends.neuron.toolchain import missing

    return missing()


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
