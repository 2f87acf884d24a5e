"""Backends: the protocol they follow, the list of all, and which one serves a device.

A backend is a folder under `backends/` whose `__init__.py` defines `BACKEND`, an instance of a
subclass of `Backend`. That file imports nothing that is heavy or may be missing: kernels are
imported by the first call.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, ClassVar

import torch

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops.lacking import OF_BACKWARD, OPTIONAL, lacking
from torch_paged_attn.ops.paths import Path

# The folders of all backends. Of those that share a dispatch key, the first that can run answers.
FOLDERS = ("tpu", "neuron", "triton", "cpu")


class Backend:
    """Kernels for the tensors of one or more dispatch keys, and what the dispatcher asks of them.

    The defaults are those of a backend in Python: one file per op, checked before every call, and
    one opaque node in a graph of torch.compile.
    """

    name: ClassVar[str]
    """The backend's folder."""

    dispatch_keys: ClassVar[tuple[str, ...]]
    """The dispatch keys of the tensors that it takes: "CPU", "CUDA", "XLA", "PrivateUse1"."""

    is_compiled: ClassVar[bool] = False
    """Whether `unsupported` loads a library that registers kernels: no call meets Python."""

    lacks: ClassVar[tuple[str, ...]] = OPTIONAL
    """Arguments of attention that it has no kernel for: its functions refuse them by
    `refuse_lacking`, a compiled one's guard by a plain condition.
    """

    lacks_in_backward: ClassVar[tuple[str, ...]] = OF_BACKWARD
    """The same of a backward."""

    checks_metadata: ClassVar[bool] = False
    """Whether its functions refuse what the op's `check` refuses, so that nobody else has to."""

    announces: ClassVar[tuple[str, ...]] = ()
    """The ops whose functions log which of several kernels a call takes (`paths.announce`)."""

    def unsupported(self) -> str | None:
        """Why it cannot run here, or None."""
        return None

    def path(self, op: str, call: Any, target: str | None = None) -> Path:
        """What it would do with a call that the contract allows: an AttentionCall, a BackwardCall,
        or the other ops' arguments by name. Tensors may be fake, or lie on another device, and then
        hold no values. `target` names a GPU that may be elsewhere.
        """
        if (reason := self.unsupported()) is not None:
            return Path(self.name, None, reason)
        if not self.has(op):
            return Path(self.name, None, f"the {self.name} backend does not have it yet")
        return Path(self.name, op, "it is the only one")

    def has(self, op: str) -> bool:
        """Whether there is a function for an op; every backend has one but for backwards."""
        file = f"torch_paged_attn.backends.{self.name}.{op.partition('.')[0]}"
        return importlib.util.find_spec(file) is not None

    def function(self, op: str) -> Callable[..., Any]:
        """The function that takes an op's arguments, `reshape_and_cache_split` for
        `reshape_and_cache.split`; by default in the file that is named like the op.
        """
        file = op.partition(".")[0]
        module = importlib.import_module(f"torch_paged_attn.backends.{self.name}.{file}")
        return getattr(module, op.replace(".", "_"))

    def unsupported_backward(self, call: AttentionCall) -> str | None:
        """Why it has no gradient of this call of `flash_varlen` or `blocksparse`, which it can
        answer, or None. It is asked at the forward, and continues "q requires grad, and ".
        """
        return f"the {self.name} backend has no {call.op}_backward yet"

    def path_of(self, op: str, call: Any, target: str | None = None) -> Path:
        """`path`, or which argument of attention it lacks."""
        is_backward = isinstance(call, BackwardCall)
        if is_backward or isinstance(call, AttentionCall):
            names = self.lacks_in_backward if is_backward else self.lacks
            forward = call.forward if isinstance(call, BackwardCall) else call
            if (name := lacking(forward, names)) is not None:
                return Path(self.name, None, f"it does not have {name} yet")
        return self.path(op, call, target)

    def why_no_gradients(self, call: AttentionCall) -> str | None:
        """`unsupported_backward`, or which argument a backward lacks."""
        if (name := lacking(call, self.lacks_in_backward)) is not None:
            return f"the {self.name} backend has no {call.op}_backward with {name} yet"
        return self.unsupported_backward(call)

    def traceable(self, op: str) -> Callable[..., Any] | None:
        """The op as torch.compile traces it, kernel launches included, or None where a call stays
        one opaque node. The function may answer NotImplemented: this call stays one node.
        """
        return None

    def notes(self) -> list[str]:
        """What else `python -m torch_paged_attn` says about it."""
        return []


@functools.cache
def backends() -> tuple[Backend, ...]:
    """All backends, in the order in which they are asked."""
    modules = (importlib.import_module(f"torch_paged_attn.backends.{name}") for name in FOLDERS)
    return tuple(module.BACKEND for module in modules)


def backends_of(key: str) -> list[Backend]:
    """The backends of a dispatch key, in the order in which they are asked."""
    return [backend for backend in backends() if key in backend.dispatch_keys]


def serving(key: str) -> tuple[Backend | None, str]:
    """The backend that answers on a dispatch key, or None and why each cannot run here."""
    reasons = []
    for backend in backends_of(key):
        reason = backend.unsupported()
        if reason is None:
            return backend, ""
        reasons.append(reason)
    return None, "; ".join(reasons) or "no backend for this device yet"


def serving_device(device: torch.device) -> tuple[Backend | None, str]:
    """The backend that answers for tensors on a device, or None and why not."""
    keys = {"cpu": "CPU", "cuda": "CUDA", "xla": "XLA"}
    return serving(keys.get(device.type, "PrivateUse1"))
