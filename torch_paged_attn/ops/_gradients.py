"""How a call that needs a gradient finds its way to autograd, and one that needs none past it.

A call that needs none makes no stop on its way. Autograd's dispatch keys fall through to the
backend, and the kernel itself looks at its inputs: the CPU's in csrc/ops/autograd.cpp, one written
in Python through `Gate.guarded`. If a result needs a gradient, the kernel sends the call to a twin
operator, `<op>_gated`, whose kernel takes autograd's place: it refuses what has no derivative, else
it records the call and goes on with the operator itself, below autograd, where no kernel looks.

A kernel cannot see a gradient that a wrapper around a tensor asks for: those of `torch.func`,
subclasses with `__torch_dispatch__`, FakeTensors. Two dispatch keys come before autograd's wherever
there are such wrappers or a dispatch mode is on, and nowhere else: they send the call to the twin.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

# what a call passes on its way to a wrapper, and only then
WRAPPING_KEYS = "PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode"
# where a call of the twin arrives if autograd is off (inference mode) or was passed before
BELOW_AUTOGRAD = "Python", "CompositeExplicitAutograd"

ALLOWED = "no requires_grad, or a call under torch.no_grad()"


class Derivative(Protocol):
    """How an operator is differentiated."""

    def check(self, asking: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Raise NotImplementedError for a call, right otherwise, that has no derivative; `asking`
        are the names of the tensors that require grad.
        """

    def save(
        self, ctx: Any, args: tuple[Any, ...], options: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        """Keep in `ctx` what the backward needs."""

    def backward(
        self, ctx: Any, asked: Sequence[bool], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of the positional arguments, from those of the results; None for what is
        not `asked` for.
        """


class Once:
    """The derivative of a backward, which autograd records under `create_graph=True`. Whoever
    differentiates it gets an error: gradients have no gradients.
    """

    def __init__(self, op: str) -> None:
        self.op = op

    def check(self, asking: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Whether anybody goes back through the call is not known yet."""

    def save(
        self, ctx: Any, args: tuple[Any, ...], options: dict[str, Any], results: tuple[Tensor, ...]
    ) -> None:
        """Nothing is needed."""

    def backward(
        self, ctx: Any, asked: Sequence[bool], gradients: tuple[Tensor | None, ...]
    ) -> tuple[Tensor | None, ...]:
        raise NotImplementedError(
            f"paged_attn::{self.op}: a gradient of its results came, which are gradients"
            " themselves; allowed: a loss without gradients in it"
        )


class Recorded(torch.autograd.Function):
    """A call that autograd records. Each operator has a subclass, whose name profilers show."""

    @staticmethod
    def forward(
        ctx: Any, gate: "Gate", keys: Any, options: dict[str, Any], *args: Any
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        # under a transform of torch.func, another level may record the call as well
        with torch.set_grad_enabled(torch._C._are_functorch_transforms_active()):
            results = gate.below_autograd(keys, args, options)
        ctx.derivative = gate.derivative
        ctx.derivative.save(ctx, args, options, results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, None, *ctx.derivative.backward(ctx, ctx.needs_input_grad[3:], gradients)


class RecordedLists(Recorded):
    """A call whose positional arguments are two lists of tensors, as long as each other."""

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


class Gate:
    """Looks whether a call of one operator needs a gradient."""

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
        self.check, self.derivative = check, derivative
        arguments = self.op._schema.arguments
        self.takes_lists = any("List[Tensor]" in str(a.type) for a in arguments)
        kind = RecordedLists if self.takes_lists else Recorded
        self.function: Any = type(packet, (kind,), {})
        # the positional arguments' names, "" for those that are no tensors
        self.tensors = [a.name * ("Tensor" in str(a.type)) for a in arguments if not a.kwarg_only]
        self.written = [
            i for i, a in enumerate(arguments) if a.alias_info and a.alias_info.is_write
        ]
        stem = name.replace(".", "_")
        library.define(f"{stem}_gated{signature}")
        self.twin = getattr(torch.ops.paged_attn, f"{stem}_gated").default
        library.impl(f"{stem}_gated", self.enter, "Autograd", with_keyset=True)
        for key in BELOW_AUTOGRAD:
            library.impl(f"{stem}_gated", self.pass_below, key, with_keyset=True)
        if self.written:  # torch's own loop over the slices serves only what writes nothing
            library.impl(f"{stem}_gated", self.refuse_vmap, "FuncTorchBatched")
        if derivative is not None:
            # torch 2.13 gives a caller in C++ each result as the type of the last but that: these
            # types read the same both ways
            before = signature[: signature.rindex("->")]
            results = "Tensor, " * len(self.op._schema.returns)
            library.define(f"{stem}_recorded{before}-> (str raised, {results}str text)")
            library.impl(f"{stem}_recorded", self.recorded, "CompositeImplicitAutograd")
        library.impl(name, torch.library.fallthrough_kernel, "Autograd")
        for key in WRAPPING_KEYS:
            library.impl(name, self.send_to_twin, key)

    def send_to_twin(self, *args: Any, **kwargs: Any) -> Any:
        return self.twin(*args, **kwargs)

    def recorded(self, *args: Any, **kwargs: Any) -> Any:
        """The twin for a kernel in C++, which would lose what Python raises: it gets the address of
        the type, nothing if nothing was raised, and the text.
        """
        try:
            return "", *self.twin(*args, **kwargs), ""
        except BaseException as error:
            self.raised = type(error)  # which must live until it is raised again
            nothing = (torch.empty(0) for _ in self.op._schema.returns)
            return str(id(self.raised)), *nothing, str(error)

    def enter(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """The twin's kernel: the operator, recorded if a gradient is needed."""
        self.refuse_tangents(args)
        if asking := self.asking(args):
            self.refuse_gradients(asking, args, kwargs)
            return self.record(self, keys, kwargs, *args)
        self.bump_versions(args)
        return self.below_autograd(keys, args, kwargs)

    def pass_below(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """The twin's kernel where autograd has been passed: nobody asks for a gradient."""
        self.refuse_tangents(args)
        self.bump_versions(args)
        if not self.asking(args):
            return self.below_autograd(keys, args, kwargs)
        with torch.no_grad():
            return self.below_autograd(keys, args, kwargs)

    def below_autograd(self, keys: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return self.op.redispatch(keys & torch._C._after_autograd_keyset, *args, **options)

    def asking(self, args: tuple[Any, ...]) -> list[str]:
        """The names of the tensors of which a gradient is asked for."""
        if not torch.is_grad_enabled():
            return []
        return [name for name, x in self.pairs(args) if x.requires_grad]

    def pairs(self, args: tuple[Any, ...]) -> Iterator[tuple[str, Tensor]]:
        """The tensors that are given, each with the name of its argument."""
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
        # one level of several, as an operator's kernel is called for each: what `Function.apply`
        # does instead needs the function whole, from outside
        from torch._functorch.autograd_function import enable_single_level_autograd_function

        with enable_single_level_autograd_function():
            return super(torch.autograd.Function, self.function).apply(*args)  # type: ignore[misc]

    def refuse(self, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Raise if a result would need a gradient that there is not."""
        self.refuse_tangents(args)
        if asking := self.asking(args):
            self.refuse_gradients(asking, args, options)

    def refuse_gradients(
        self, asking: Sequence[str], args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        name = self.op._schema.name
        if self.derivative is None:
            raise NotImplementedError(
                f"{name}: {asking[0]} requires grad, and the operator has no derivative;"
                f" allowed: {ALLOWED}"
            )
        self.check(*args, **options)
        self.derivative.check(asking, args, options)

    def refuse_tangents(self, args: tuple[Any, ...]) -> None:
        # there are tangents only inside a level of forward-mode AD
        if forward_ad._current_level < 0:
            return
        for name, x in self.pairs(args):
            if forward_ad.unpack_dual(x).tangent is not None:
                raise NotImplementedError(
                    f"{self.op._schema.name}: {name} carries a tangent of forward-mode AD, and no"
                    " operator has such a derivative; allowed: its primal"
                )

    def refuse_vmap(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"{self.op._schema.name}: vmap came, and the operator writes into its arguments;"
            " allowed: one call for all tokens, whose slots say where each goes"
        )

    def bump_versions(self, args: tuple[Any, ...]) -> None:
        """Tell autograd what a kernel writes through raw pointers."""
        counted = [x for i in self.written if (x := args[i]) is not None and not x.is_inference()]
        if counted:
            torch.autograd.graph.increment_version(counted)

    def guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A backend's function in Python, behind the gate."""
        tensors, twin, takes_lists = self.tensors, self.twin, self.takes_lists

        def kernel(*args: Any, **kwargs: Any) -> Any:
            if takes_lists and self.asking(args):
                return twin(*args, **kwargs)
            if not takes_lists and torch.is_grad_enabled():
                for name, x in zip(tensors, args, strict=False):
                    if name and x is not None and x.requires_grad:
                        return twin(*args, **kwargs)
            if forward_ad._current_level >= 0:
                self.refuse_tangents(args)
            if self.written:
                self.bump_versions(args)
            return function(*args, **kwargs)

        return kernel
