"""The TPU backend: the ops in Pallas, as pure JAX functions, and their way to torch.

`flash_varlen.py`, `blocksparse.py`, `reshape_and_cache.py` and `merge_states.py` hold one function
each, named like its op and taking its arguments as JAX arrays; no module of theirs imports torch.
`binding.py` puts the ops on torch tensors, `front_ends.py` finds the way to the device.
Compiled by the TPU compiler and run by Pallas' interpreter; never yet run on a TPU.
"""

import importlib.util

from torch_paged_attn.backends.tpu.front_ends import missing

if importlib.util.find_spec("jax") is not None:
    from torch_paged_attn.backends.tpu.binding import (
        blocksparse,
        flash_varlen,
        merge_states,
        reshape_and_cache,
        reshape_and_cache_split,
    )

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
