"""The Triton kernels on a GPU where there is one, else on the CPU in Triton's interpreter."""

import importlib
import os
import types

import pytest
import torch
from dispatched import dispatched

HAS_GPU = torch.cuda.is_available()

# read when the kernels are imported, which no other test does
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

pytest.importorskip("triton")

if not HAS_GPU:
    importlib.import_module("quick_interpreter").use()
    importlib.import_module("same_pointers").watch()


@pytest.fixture(scope="session")
def device():
    return torch.device("cuda" if HAS_GPU else "cpu")


@pytest.fixture(scope="session")
def kernels():
    """The backend's functions, called without the dispatcher: on a CPU it would pick C++."""
    from torch_paged_attn.backends.triton import BACKEND

    ops = (
        "flash_varlen", "blocksparse", "merge_states", "reshape_and_cache", "append_slots",
        "append_and_attend", "attend_cache",
    )  # fmt: skip
    functions = {op: BACKEND.function(op) for op in ops}
    for name in ("split", "quantize"):
        functions[f"reshape_and_cache_{name}"] = BACKEND.function(f"reshape_and_cache.{name}")
    return types.SimpleNamespace(**functions)


@pytest.fixture(scope="session")
def run(kernels):
    """Run a `Call` on the backend, wherever its tensors are."""

    def run(call, **changes):
        args, options = dispatched(call.op, call.args | changes)
        return getattr(kernels, call.op)(*args, **options)

    return run


@pytest.fixture(scope="session")
def compiler():
    """A process where Triton does not interpret, for what is compiled for chips of one maker: its
    start takes seconds. What reads all of `cross_compile.CALLS`, to which tests add, has its own.
    """
    import cross_compile

    with cross_compile.workers(1) as process:
        yield process


@pytest.fixture
def tensor_cores(monkeypatch):
    """The interpreter adds up products of float16 as tensor cores do, which cut off bits."""
    if not HAS_GPU:
        import tensor_cores
        from triton.runtime import interpreter

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", tensor_cores.create_dot)


@pytest.fixture(autouse=True)
def forget_calls(kernels):
    """Every call of a test is planned: the environment may have changed."""
    from torch_paged_attn.backends.triton.runtime import launch_cache

    launch_cache.clear()


@pytest.fixture(autouse=True)
def poison_allocations():
    """`torch.empty` hands out NaN: a kernel that leaves an element unwritten is found."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
