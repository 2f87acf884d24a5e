"""The environment variables, read once when the package is imported (listed in docs/running.md).

Other modules read these names at every use, `environment.CHECK`, so that a test can replace one.
`PAGED_ATTN_CPU_ISA` is read by the compiled CPU kernels when their library is loaded.
"""

import os
from pathlib import Path


def _flag(name: str) -> bool:
    value = os.environ.get(name, "") or "0"
    if value not in ("0", "1"):
        raise ValueError(f"expected {name} to be 0 or 1, got {value!r}")
    return value == "1"


# a query's bits on a GPU depend on its sequence alone, not on the batch
BATCH_INVARIANT = _flag("PAGED_ATTN_BATCH_INVARIANT")
# backends written in Python also check the values in tensors, which waits for the device
CHECK = _flag("PAGED_ATTN_CHECK")
# the Neuron kernels run on their emulator, for tensors on the CPU
NEURON_EMULATE = _flag("PAGED_ATTN_NEURON_EMULATE")
# the TPU kernels run in Pallas' interpreter if torch_xla's device is a CPU
TPU_INTERPRET = _flag("PAGED_ATTN_TPU_INTERPRET")
# on torch_tpu, a cache write reuses the memory of the cache that it gets; for eager programs only
TPU_DONATE = _flag("PAGED_ATTN_TPU_DONATE")
# each call is a range in torch.profiler, named after its kernel
PROFILE = _flag("PAGED_ATTN_PROFILE")
# the library of CPU kernels; by default the one beside this file
LIBRARY = Path(os.environ.get("PAGED_ATTN_LIBRARY") or Path(__file__).parent / "_C.abi3.so")
# folders of compiled kernels, in which Triton looks first (`use_compiled` replaces them)
KERNELS = tuple(map(Path, filter(None, os.environ.get("PAGED_ATTN_KERNELS", "").split(os.pathsep))))
