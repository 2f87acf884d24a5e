"""The TPU backend: the ops in Pallas, as pure JAX functions.

`flash_varlen.py`, `blocksparse.py`, `reshape_and_cache.py` and `merge_states.py` hold one function
each, named like its op and taking its arguments as JAX arrays; no module of theirs imports torch.
Compiled by the TPU compiler and run by Pallas' interpreter; never yet run on a TPU.
"""

import importlib.util


def load() -> str | None:
    """None where the kernels can run, else the reason why not."""
    if importlib.util.find_spec("jax") is None:
        return "jax is not installed: pip install 'torch-paged-attn[tpu]'"
    return None
