"""Autograd for the operators, without its cost for calls that need no gradient.

An autograd kernel would cost every call some microseconds. So the operators have none: their
autograd dispatch keys fall through, and the backend's kernel itself checks whether an input
requires grad (C++ kernels in csrc/ops/autograd.cpp, Python ones through `Gate.wrapped`). If one
does, the kernel calls a second operator, `<op>_gated`, with the same arguments. That one has an
autograd kernel: it raises if the call has no derivative, otherwise it records the call for the
backward and calls the operator again below autograd, where inputs no longer require grad.

Some tensors hide from a kernel that they require grad: those inside a `torch.func` transform,
subclasses with `__torch_dispatch__`, FakeTensors. For these a dispatch key above autograd is active
(`WRAPPING_KEYS`), whose kernel always calls `<op>_gated`.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from torch_paged_attn.ops.checks import refuse

# dispatch keys that are active only for wrapped tensors or under a dispatch mode
WRAPPING_KEYS = "PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode"
# dispatch keys of a call of `<op>_gated` in inference mode, or from below autograd
BELOW_AUTOGRAD = "Python", "CompositeExplicitAutograd"

INSTEAD = "call under torch.no_grad()"


class Derivative(Protocol):
    """How an operator is differentiated."""

    def check(
        self, required: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Raise NotImplementedError for a valid call that has no derivative.

        required: names of the tensors that require grad
        """

    def save(
        self, ctx: Any, args: tuple[Any, ...], options: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        """Store in `ctx` what the backward needs."""

    def backward(
        self, ctx: Any, needed: Sequence[bool], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the positional arguments.

        needed: for each positional argument, whether its gradient is needed; others may be None
        gradients: those of the results; None stands for zeros
        """


class OnceDifferentiable:
    """The derivative of a backward operator: NotImplementedError, since there is no double
    backward.

    Under `create_graph=True` autograd records the backward whether or not anybody differentiates
    it. So the error comes only when somebody does.
    """

    def __init__(self, op: str) -> None:
        self.op = op

    def check(
        self, required: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Every call is accepted: whether it will be differentiated is not known yet."""

    def save(
        self, ctx: Any, args: tuple[Any, ...], options: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        """Nothing is stored."""

    def backward(
        self, ctx: Any, needed: Sequence[bool], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        refuse(
            self.op,
            "double backward is not supported",
            "compute the gradient without create_graph, or a loss without gradients in it",
        )


class Recorded(torch.autograd.Function):
    """The autograd function of a recorded call. Each operator has a subclass named after it,
    because profilers show the class name.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: "Gate", keys: Any, options: dict[str, Any], *args: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # under nested torch.func transforms, an inner level may have to record the call as well
        with torch.set_grad_enabled(torch._C._are_functorch_transforms_active()):
            results = gate.below_autograd(keys, args, options)
        ctx.derivative = gate.derivative
        ctx.derivative.save(ctx, args, options, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.derivative.backward(ctx, ctx.needs_input_grad[3:], gradients)


class RecordedLists(Recorded):
    """The same for an operator whose positional arguments are two lists of tensors of one length.
    `apply` sees only tensors that are arguments themselves, so it gets the lists end to end.
    """

    @staticmethod
    def forward(
        ctx: Any, gate: "Gate", keys: Any, options: dict[str, Any], *args: Any
    ) -> tuple[Tensor, ...]:
        half = len(args) // 2
        ctx.set_materialize_grads(False)
        with torch.set_grad_enabled(torch._C._are_functorch_transforms_active()):
            results = gate.below_autograd(keys, (args[:half], args[half:]), options)
        ctx.derivative = gate.derivative
        ctx.derivative.save(ctx, args, options, results)
        return results


def _has_tangent(x: Tensor) -> bool:
    """Whether a tensor has a tangent at any level of forward-mode AD. In `jvp(grad(f))` it is the
    tensor within the one that `grad` has wrapped.
    """
    while forward_ad.unpack_dual(x).tangent is None:
        if not torch._C._functorch.is_functorch_wrapped_tensor(x):
            return False
        x = torch._C._functorch.get_unwrapped(x)
    return True


def increment_versions(tensors: Sequence[Tensor | None]) -> None:
    """Tell autograd that tensors have changed; those of inference mode have no version."""
    changed = [x for x in tensors if x is not None and not x.is_inference()]
    if changed:
        torch.autograd.graph.increment_version(changed)


class Gate:
    """What stands between the calls of one operator and autograd (see the module's docstring).

    It defines `<op>_gated`, and for operators with a derivative `<op>_recorded`, which C++ kernels
    call instead.
    """

    def __init__(
        self,
        library: torch.library.Library,
        name: str,
        signature: str,
        check: Callable[..., None],
        derivative: Derivative | None,
    ) -> None:
        packet, _, overload = name.partition(".")
        self.op = getattr(getattr(torch.ops.paged_attn, packet), overload or "default")
        self.name = packet  # in errors
        self.check, self.derivative = check, derivative
        arguments = self.op._schema.arguments
        self.takes_lists = any("List[Tensor]" in str(a.type) for a in arguments)
        kind = RecordedLists if self.takes_lists else Recorded
        self.function: Any = type(packet, (kind,), {})
        # names of the positional arguments, "" for those that are not tensors
        self.tensors = [a.name * ("Tensor" in str(a.type)) for a in arguments if not a.kwarg_only]
        self.written = [
            i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write
        ]
        stem = name.replace(".", "_")
        library.define(f"{stem}_gated{signature}")
        self.gated_op = getattr(torch.ops.paged_attn, f"{stem}_gated").default
        library.impl(f"{stem}_gated", self.enter, "Autograd", with_keyset=True)
        for key in BELOW_AUTOGRAD:
            library.impl(f"{stem}_gated", self.enter_below_autograd, key, with_keyset=True)
        if self.written:  # torch's vmap fallback, a loop, does not support operators that write
            library.impl(f"{stem}_gated", self.refuse_vmap, "FuncTorchBatched")
        if derivative is not None:
            # torch 2.13 converts the results for a caller in C++ with the list of their types
            # reversed, so that list has to be the same in both directions
            before = signature[: signature.rindex("->")]
            results = "Tensor, " * len(self.op._schema.returns)
            library.define(f"{stem}_recorded{before}-> (str raised, {results}str text)")
            library.impl(f"{stem}_recorded", self.recorded, "CompositeImplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        for key in WRAPPING_KEYS:
            library.impl(name, self.call_gated, key)

    def call_gated(self, *args: Any, **kwargs: Any) -> Any:
        return self.gated_op(*args, **kwargs)

    def recorded(self, *args: Any, **kwargs: Any) -> Any:
        """`<op>_gated` for a caller in C++, to which a Python exception cannot pass. The results
        are preceded by the address of the exception's type, "" if none was raised, and followed by
        its message.
        """
        try:
            return "", *self.gated_op(*args, **kwargs), ""
        except BaseException as error:
            self.raised = type(error)  # keeps the type alive until C++ raises it again
            nothing = (torch.empty(0, device="cpu") for _ in self.op._schema.returns)
            return str(id(self.raised)), *nothing, str(error)

    def enter(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """The autograd kernel of `<op>_gated`: record the call if an input requires grad, and run
        the operator.
        """
        self.refuse_tangents(args)
        if required := self.requiring_grad(args):
            self.refuse_gradients(required, args, kwargs)
            return self.record(self, keys, kwargs, *args)
        self.bump_versions(args)
        return self.below_autograd(keys, args, kwargs)

    def enter_below_autograd(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """The kernel of `<op>_gated` below autograd: run the operator without recording it."""
        self.refuse_tangents(args)
        self.bump_versions(args)
        if not self.requiring_grad(args):
            return self.below_autograd(keys, args, kwargs)
        with torch.no_grad():
            return self.below_autograd(keys, args, kwargs)

    def below_autograd(self, keys: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.op.redispatch(keys & torch._C._after_autograd_keyset, *args, **options)

    def requiring_grad(self, args: tuple[Any, ...]) -> list[str]:
        """The names of the tensors that require grad; none if grad mode is off."""
        if not torch.is_grad_enabled():
            return []
        return [name for name, x in self.named_tensors(args) if x.requires_grad]

    def named_tensors(self, args: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
        """The given tensor arguments with their names; `outs[0]` names an entry of a list."""
        for name, x in zip(self.tensors, args, strict=False):
            if not name or x is None:
                continue
            if isinstance(x, tuple | list):
                yield from ((f"{name}[{i}]", y) for i, y in enumerate(x))
            else:
                yield name, x

    def record(self, *args: Any) -> Any:
        if self.takes_lists:
            args = (*args[:3], *itertools.chain(*args[3:]))
        if not torch._C._are_functorch_transforms_active():
            return self.function.apply(*args)
        # this kernel is called once for each level of nested transforms, so only that level is
        # applied; `Function.apply` would apply all of them
        from torch._functorch.autograd_function import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return super(torch.autograd.Function, self.function).apply(*args)  # type: ignore[misc]

    def refuse(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Raise NotImplementedError for a call that needs a derivative which does not exist."""
        self.refuse_tangents(args)
        if required := self.requiring_grad(args):
            self.refuse_gradients(required, args, options)

    def refuse_gradients(
        self, required: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        if self.derivative is None:
            problem = f"{required[0]} requires grad, and the operator has no gradient"
            refuse(self.name, problem, INSTEAD)
        self.check(*args, **options)
        self.derivative.check(required, args, options)

    def refuse_tangents(self, args: tuple[Any, ...]) -> None:
        # a tensor can have a tangent only inside a level of forward-mode AD
        if forward_ad._current_level < 0:
            return
        for name, x in self.named_tensors(args):
            if _has_tangent(x):
                problem = f"{name} has a tangent, and there is no forward-mode AD"
                refuse(self.name, problem, "use reverse mode")

    def refuse_vmap(self, *args: Any, **kwargs: Any) -> Any:
        refuse(
            self.name,
            "vmap is not supported, because the operator writes into its arguments",
            "make one call for all tokens, with slot_mapping",
        )

    def bump_versions(self, args: tuple[Any, ...]) -> None:
        """Tell autograd which tensors the kernel changes: it writes through raw pointers, which
        autograd does not see.
        """
        increment_versions([args[i] for i in self.written])

    def wrapped(self, load: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """A kernel that first checks whether an input requires grad, and then calls a backend's
        Python function, which the first call has `load` find.
        """
        gated_op, takes_lists = self.gated_op, self.takes_lists
        are_tensors = [bool(name) for name in self.tensors]
        function: Callable[..., Any] | None = None

        def kernel(*args: Any, **kwargs: Any) -> Any:
            nonlocal function
            if function is None:
                function = load()
            if takes_lists and self.requiring_grad(args):
                return gated_op(*args, **kwargs)
            if not takes_lists and torch.is_grad_enabled():
                for x in itertools.compress(args, are_tensors):
                    if x is not None and x.requires_grad:
                        return gated_op(*args, **kwargs)
            if forward_ad._current_level >= 0:
                self.refuse_tangents(args)
            if self.written:
                self.bump_versions(args)
            return function(*args, **kwargs)

        return kernel
