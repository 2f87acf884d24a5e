"""The Triton kernels on a GPU where there is one, else on the CPU in Triton's interpreter."""

import os
import sys
from pathlib import Path

import pytest
import torch

# where test_cross_compile and its worker processes find their other half
sys.path.insert(0, str(Path(__file__).parent))

HAS_GPU = torch.cuda.is_available()

# read when the kernels are imported, which no other test does
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def kernels():
    """The backend's functions, called without the dispatcher: on a CPU it would pick C++."""
    from torch_paged_attn.backends import triton as backend

    return backend


@pytest.fixture(scope="session")
def run(kernels):
    """Run a `Call` on the backend, wherever its tensors are."""

    def run(call, **changes):
        args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | call.args | changes
        first = ["q", "k", "v", "crow_indices", "col_indices", "cu_seqlens_q", "cu_seqlens_k"]
        first += ["max_seqlen_q", "max_seqlen_k"]
        positional = [args.pop(name) for name in first if name in args]
        return getattr(kernels, call.op)(*positional, **args)

    return run


@pytest.fixture(autouse=True)
def poison_allocations():
    """`torch.empty` hands out NaN: a kernel that leaves an element unwritten is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
