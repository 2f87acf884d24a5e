"""Calls whose result would need a gradient are refused by name: no backend has a derivative yet.

A call that needs none makes no stop on its way. Autograd's dispatch keys fall through to the
backend, and the kernel itself looks at its inputs: the CPU's in csrc/ops/autograd.cpp, one written
in Python through `Gate.guarded`.

A kernel cannot see a gradient that a wrapper around a tensor asks for: those of `torch.func`,
subclasses with `__torch_dispatch__`, FakeTensors. Two dispatch keys come before autograd's wherever
there are such wrappers or a dispatch mode is on, and nowhere else. They send the call to a twin
operator, `<op>_gated`, whose kernel takes autograd's place: it looks at the wrappers, then goes on
with the operator itself, below autograd.

An operator that gets a derivative calls it in the twin's kernel, `Gate.enter`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# what a call passes on its way to a wrapper, and only then
WRAPPING_KEYS = "PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode"
# autograd's own, and where a call arrives instead if autograd is off (inference mode)
GATE_KEYS = "Autograd", "Python", "CompositeExplicitAutograd"


def bump_versions(*written: Tensor) -> None:
    """Tell autograd that tensors were written to through raw pointers."""
    counted = [x for x in written if not x.is_inference()]
    if counted:
        torch.autograd.graph.increment_version(counted)


class Gate:
    """Looks whether a call of one operator needs a gradient."""

    def __init__(self, library: torch.library.Library, name: str, signature: str) -> None:
        packet, _, overload = name.partition(".")
        self.op = getattr(getattr(torch.ops.paged_attn, packet), overload or "default")
        arguments = self.op._schema.arguments
        # the positional arguments' names, "" for those that are no tensors
        self.tensors = [a.name * ("Tensor" in str(a.type)) for a in arguments if not a.kwarg_only]
        self.written = [
            i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write
        ]
        twin = name.replace(".", "_") + "_gated"
        library.define(f"{twin}{signature}")
        self.twin = getattr(torch.ops.paged_attn, twin).default
        for key in GATE_KEYS:
            library.impl(twin, self.enter, key, with_keyset=True)
        if self.written:  # torch's own loop over the slices serves only what writes nothing
            library.impl(twin, self.refuse_vmap, "FuncTorchBatched")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        for key in WRAPPING_KEYS:
            library.impl(name, self.send_to_twin, key)

    def send_to_twin(self, *args: Any, **kwargs: Any) -> Any:
        return self.twin(*args, **kwargs)

    def enter(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """The twin's kernel: the operator without autograd, if no gradient is needed."""
        self.check(args)
        self.bump_versions(args)
        with torch._C._AutoDispatchBelowAutograd():
            return self.op.redispatch(keys & torch._C._after_autograd_keyset, *args, **kwargs)

    def check(self, args: tuple[Any, ...]) -> None:
        """Raise if a result would need a gradient."""
        grad_mode = torch.is_grad_enabled()
        # there are tangents only inside a level of forward-mode AD
        dual_level: int = forward_ad._current_level
        if not grad_mode and dual_level < 0:
            return
        for name, value in zip(self.tensors, args, strict=False):
            if not name or value is None:
                continue
            if grad_mode and value.requires_grad:
                came, allowed = "requires grad", "no requires_grad, or a call under torch.no_grad()"
            elif dual_level >= 0 and forward_ad.unpack_dual(value).tangent is not None:
                came, allowed = "carries a tangent of forward-mode AD", "its primal"
            else:
                continue
            raise NotImplementedError(
                f"{self.op._schema.name}: {name} {came}, and no backend has a derivative yet;"
                f" allowed: {allowed}"
            )

    def refuse_vmap(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self.op._schema.name}: vmap came, and the operator writes into its arguments;"
            " allowed: one call for all tokens, whose slots say where each goes"
        )

    def bump_versions(self, args: tuple[Any, ...]) -> None:
        """Tell autograd what a kernel writes through raw pointers."""
        bump_versions(*[args[i] for i in self.written if args[i] is not None])

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A backend's function in Python, behind the gate."""

        def kernel(*args: Any, **kwargs: Any) -> Any:
            self.check(args)
            if self.written:
                self.bump_versions(args)
            return function(*args, **kwargs)

        return kernel
