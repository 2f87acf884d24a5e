"""The `Backend` protocol, the list of all backends, and which of them serves a device.

A backend is a folder under `backends/` whose `__init__.py` defines `BACKEND`, an instance of a
subclass of `Backend`. That file must import quickly and without the backend's own packages: kernels
are imported by the first call.
"""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops import selected_pages
from torch_paged_attn.ops.lacking import OF_BACKWARD, OPTIONAL, all_but, lacking, refuse_lacking
from torch_paged_attn.ops.path import Path
from torch_paged_attn.ops.repeated import Recent

# The folders of all backends. Of several with the same dispatch key, the first that can run is
# used.
FOLDERS = ("tpu", "neuron", "triton", "cpu")


class Backend:
    """Kernels for the tensors of one or more dispatch keys, and what else is known of them.

    The defaults suit a backend written in Python: it has one file per op, the op's checks run
    before each call, and torch.compile sees each call as one opaque node.
    """

    name: ClassVar[str]
    """The name of the backend's folder."""

    dispatch_keys: ClassVar[tuple[str, ...]]
    """The dispatch keys of its tensors, such as "CPU", "CUDA", "XPU" or "PrivateUse1"."""

    is_compiled: ClassVar[bool] = False
    """Whether its kernels are in a compiled library, which `unsupported` loads and which registers
    them itself: a call then runs no Python.
    """

    supports: ClassVar[tuple[str, ...]] = ()
    """The optional arguments of attention (`lacking.OPTIONAL`) that its kernels support; "tail_mask
    but of blocksparse": of all other ops. Calls that give another one are refused by its name.
    """

    supports_in_backward: ClassVar[tuple[str, ...]] = ()
    """The same of its backward (`lacking.OF_BACKWARD`)."""

    files: ClassVar[Mapping[str, str]] = {}
    """The modules of ops that are not in a file of the backend's folder named after the op: op ->
    module below that folder.
    """

    lacks_ops: ClassVar[tuple[str, ...]] = ("reshape_and_cache.quantize",)
    """Ops that it does not have, though it has others of the same file."""

    checks_metadata: ClassVar[bool] = False
    """Whether its functions run the op's `check` themselves, so that it need not run before them.
    """

    announces: ClassVar[tuple[str, ...]] = ()
    """The ops whose functions log themselves which of several kernels runs (`paths.announce`)."""

    selects_pages: ClassVar[bool] = False
    """Whether its `selected_attention` is that of whole pages (`selected_pages.py`)."""

    @functools.cached_property
    def lacks(self) -> tuple[str, ...]:
        """The optional arguments that its kernels do not support, as `lacking` takes them. Its
        functions call `refuse_lacking`; a compiled backend checks them in C++.
        """
        return all_but(self.supports, OPTIONAL)

    @functools.cached_property
    def lacks_in_backward(self) -> tuple[str, ...]:
        """The same of its backward."""
        return all_but(self.supports_in_backward, OF_BACKWARD)

    def unsupported(self) -> str | None:
        """Why the backend cannot run on this machine; None if it can."""
        return None

    def untested(self, target: str | None = None) -> str | None:
        """Why the backend is experimental on a chip: no such chip has run its tests. None if one
        has.

        target: a GPU as in `path`; None: the chip of this machine
        """
        return "its tests have run on no chip, in an emulator only"

    def is_asked_for(self, key: str) -> bool:
        """Whether the user has asked for this backend on a dispatch key, so that no other one may
        serve it where this one cannot run.
        """
        return False

    def path(self, op: str, call: Any, target: str | None = None) -> Path:
        """The kernel that would run a valid call, and why.

        call: an AttentionCall or a BackwardCall; for other ops, their arguments by name. Tensors
            that are fake or on another device have no values here
        target: a GPU such as `"sm90:132"`, which need not be in this machine; None: the one here
        """
        if (reason := self.unsupported()) is not None:
            return Path(self.name, None, reason)
        if not self.has(op):
            return Path(self.name, None, f"the {self.name} backend does not have it yet")
        return Path(self.name, op, "it is the only one")

    def has(self, op: str) -> bool:
        """Whether there is a function for an op. Backwards may be missing, and the ops of selected
        keys.
        """
        if op in self.lacks_ops:
            return False
        return importlib.util.find_spec(self._module(op)) is not None

    def function(self, op: str) -> Callable[..., Any]:
        """The function that runs an op, with the op's arguments. By default it is in the file named
        after the op, or that of `files`: `reshape_and_cache_split` in reshape_and_cache.py for
        `reshape_and_cache.split`.
        """
        return getattr(importlib.import_module(self._module(op)), op.replace(".", "_"))

    def _module(self, op: str) -> str:
        op = op.partition(".")[0]
        return f"torch_paged_attn.backends.{self.name}.{self.files.get(op, op)}"

    def recent(self, op: str) -> Recent | None:
        """Where the plans of an op's last calls are, by which a call like them runs without the
        dispatcher (`repeated.py`); None if the backend keeps none.
        """
        return None

    def unsupported_backward(self, call: AttentionCall) -> str | None:
        """Why the backend has no backward for this call of `flash_varlen` or `blocksparse`, whose
        forward it supports; None if it has one. Called at the forward. The text continues
        "q requires grad, and ".
        """
        return f"the {self.name} backend has no {call.op}_backward yet"

    def path_of(self, op: str, call: Any, target: str | None = None) -> Path:
        """`path`, or the attention argument that the backend does not support."""
        if self.unsupported() is None and not (self.is_compiled or self.has(op)):
            return Path(self.name, None, f"the {self.name} backend does not have it yet")
        if isinstance(call, AttentionCall | BackwardCall):
            if (name := lacking(*self._optional(call))) is not None:
                return Path(self.name, None, f"it does not have {name} yet")
            if op == "selected_attention" and self.selects_pages:
                assert isinstance(call, AttentionCall)
                if (reason := selected_pages.unsupported(call)) is not None:
                    return Path(self.name, None, reason)
        return self.path(op, call, target)

    def _optional(
        self, call: AttentionCall | BackwardCall
    ) -> tuple[AttentionCall, tuple[str, ...]]:
        if isinstance(call, BackwardCall):
            return call.named_forward(), self.lacks_in_backward
        return call, self.lacks

    def refuse_lacking(self, call: AttentionCall | BackwardCall) -> None:
        """Raise NotImplementedError for a call that gives an argument which the backend, or its
        backward, does not support.
        """
        forward, names = self._optional(call)
        refuse_lacking(forward, self.name, names)

    def unsupported_gradients(self, call: AttentionCall) -> str | None:
        """`unsupported_backward`, or the argument that the backward does not support."""
        if (name := lacking(call, self.lacks_in_backward)) is not None:
            return f"the {self.name} backend has no {call.op}_backward with {name} yet"
        return self.unsupported_backward(call)

    def traceable(self, op: str) -> Callable[..., Any] | None:
        """A function with the op's arguments that torch.compile traces, kernel launches included.
        None if calls of the op stay one opaque node; the function returns NotImplemented if this
        call does.
        """
        return None

    def attend_heads(self, given: dict[str, Any], out: Tensor, lse: Tensor) -> bool:
        """Write the results of `flash_varlen(**given)`, a checked call, to `out` and `lse`, which
        may be slices of the results of all heads. False, and nothing is written, if no kernel can.
        """
        return False

    def compiler(self) -> Any:
        """The module that compiles kernels in processes of their own: `compile_calls`,
        `compiled_elsewhere` and `remembered` of backends/triton/compile_ahead.py. None if there is
        nothing to compile in advance.
        """
        return None

    def remote_merge(self) -> Any:
        """The module that merges the results of all ranks in memory that they share: `Slots` and
        `merge_remote` of backends/triton/merges/merge_remote.py. None if there is no such kernel.
        """
        return None

    def notes(self) -> list[str]:
        """Further lines about the backend in the report of `python -m torch_paged_attn`."""
        return []


@functools.cache
def backends() -> tuple[Backend, ...]:
    """All backends, in order of preference."""
    modules = (importlib.import_module(f"torch_paged_attn.backends.{name}") for name in FOLDERS)
    return tuple(module.BACKEND for module in modules)


def dispatch_keys() -> tuple[str, ...]:
    """The dispatch keys of all backends."""
    return tuple(dict.fromkeys(key for backend in backends() for key in backend.dispatch_keys))


def backends_of(key: str) -> list[Backend]:
    """The backends of a dispatch key, in order of preference."""
    return [backend for backend in backends() if key in backend.dispatch_keys]


def serving(key: str) -> tuple[Backend | None, str]:
    """The backend that is used for a dispatch key and "", or None and why no backend can run."""
    reasons = []
    for backend in backends_of(key):
        reason = backend.unsupported()
        if reason is None:
            return backend, ""
        reasons.append(reason)
        if backend.is_asked_for(key):
            break
    return None, "; ".join(reasons) or "no backend for this device yet"


def serving_device(device: torch.device) -> tuple[Backend | None, str]:
    """`serving` for tensors on a device."""
    return serving(torch._C._dispatch_key_for_device(device.type))
