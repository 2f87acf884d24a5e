"""The Neuron kernels on NumPy, in the emulator."""

import importlib.util

import pytest
import torch
from forks import Forks

# the emulator's bfloat16 and float8
if importlib.util.find_spec("ml_dtypes") is None:
    collect_ignore_glob = ["test_*.py"]
else:
    # CPU tensors stay with the CPU kernels here: only the backend sees the switch
    environment = importlib.import_module("torch_paged_attn.environment")
    environment.NEURON_EMULATE = True


@pytest.fixture(scope="session")
def forks():
    """Runs programs in processes of their own."""
    forks = Forks()
    yield forks
    forks.close()


@pytest.fixture
def machine(request):
    """A fresh emulated core; parametrise indirectly with its generation."""
    from nki_emulator import emulated

    with emulated(getattr(request, "param", 3)) as machine:
        yield machine


@pytest.fixture
def run():
    """Run a `Call` on the backend."""
    from torch_paged_attn.backends.neuron import BACKEND

    def run(call, **changes):
        args = {"cu_seqlens_k": None, "max_seqlen_q": 0, "max_seqlen_k": 0} | call.args | changes
        first = ["q", "k", "v", "crow_indices", "col_indices", "cu_seqlens_q", "cu_seqlens_k"]
        first += ["max_seqlen_q", "max_seqlen_k"]
        positional = [args.pop(name) for name in first if name in args]
        return BACKEND.function(call.op)(*positional, **args)

    return run


@pytest.fixture(autouse=True)
def poison_allocations():
    """`torch.empty` hands out NaN: a kernel that leaves an element unwritten is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
