"""The Neuron backend: AWS Trainium and Inferentia, in NKI. Imported by the first call there.

Written against the public documentation of NKI 0.6 and run on an emulator of it. It has never run
on hardware: see `docs/neuron.md`.
"""

from torch_paged_attn.backends.neuron.blocksparse import blocksparse
from torch_paged_attn.backends.neuron.flash_varlen import flash_varlen
from torch_paged_attn.backends.neuron.merge_states import merge_states
from torch_paged_attn.backends.neuron.reshape_and_cache import (
    reshape_and_cache,
    reshape_and_cache_split,
)
from torch_paged_attn.backends.neuron.toolchain import missing

__all__ = [
    "blocksparse",
    "flash_varlen",
    "load",
    "merge_states",
    "reshape_and_cache",
    "reshape_and_cache_split",
]


def load() -> str | None:
    """None where the kernels can run, else the reason why not."""
    return missing()
