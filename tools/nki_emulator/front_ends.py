"""The functions of Neuron's packages that the backend's `runtime.py` relies on, as they were when
their documentation and sources were read (SDK 2.32, NKI 0.6, torch-neuronx 2.9 and its successor);
and fakes that take exactly these arguments.
"""

import inspect
import types
from collections.abc import Callable, Iterable
from typing import Any

from nki_emulator.signatures import signature

# module -> function -> parameters
RECORDED = {
    "nki": {"jit": "fn=None, **kwargs"},
    "torch_neuronx.nki_hop": {"wrap_nki": "nki_kernel, **kwargs"},
    "torch_neuronx.utils": {"get_platform_target": ""},
    "libtorch_neuronx_lite.nki.nki_hop": {"wrap_nki": "nki_kernel, **kwargs"},
    "torch_xla.runtime": {"device_type": ""},
    "torch._C": {"_get_privateuse1_backend_name": ""},
}


class Kernel:
    """What `nki.jit` returns: `kernel[cores](...)` with one number of cores."""

    def __init__(self, function: Callable, log: list) -> None:
        self.function, self.log = function, log

    def __getitem__(self, cores: int) -> Callable:
        assert isinstance(cores, int), "nki.jit's kernels take one number in brackets"

        def call(*args: Any) -> Any:
            self.log.append(("nki.jit", cores))
            return self.function(*args)

        return call


class Caller:
    """What `wrap_nki` returns: it makes a tuple of integers of what stands in brackets."""

    def __init__(self, kernel: Kernel, log: list) -> None:
        self.kernel, self.log = kernel, log

    def __getitem__(self, grid: Iterable[int]) -> Callable:
        cores = tuple(map(int, grid))

        def call(*args: Any) -> Any:
            self.log.append(("wrap_nki", cores))
            return self.kernel.function(*args)

        return call


def _strict(documented: str, answer: Callable) -> Callable:
    """`answer`, for arguments that the recorded signature takes."""

    def function(*args: Any, **kwargs: Any) -> Any:
        signature(documented).bind(*args, **kwargs)
        return answer(*args, **kwargs)

    return function


def fake(module: str, log: list, **answers: Any) -> Any:
    """A module with the recorded functions; each binds its arguments before it answers."""
    made: Any = types.ModuleType(module)
    behaviour: dict[str, Callable] = {
        "jit": lambda fn: Kernel(fn, log),
        "wrap_nki": lambda kernel: Caller(kernel, log),
        **{name: lambda value=value: value for name, value in answers.items()},
    }
    for name, documented in RECORDED[module].items():
        setattr(made, name, _strict(documented, behaviour[name]))
    made.__version__ = "0.6.0"
    return made


def parameters(function: Callable) -> list[tuple[str, Any]] | None:
    """Names and kinds; builtins of C++ have no signature to look at."""
    try:
        found = inspect.signature(function)
    except ValueError:
        return None
    return [(p.name, p.kind) for p in found.parameters.values()]
