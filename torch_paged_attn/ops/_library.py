"""The namespace `paged_attn`: how operators are defined, and how backends are bound to them."""

import functools
import importlib.util
import re
from collections.abc import Callable
from typing import Any

import torch

from torch_paged_attn import environment
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops import paths
from torch_paged_attn.ops._autocast import bind_autocast
from torch_paged_attn.ops._gradients import Derivative, Gate
from torch_paged_attn.ops._inlining import inline
from torch_paged_attn.ops.backend import Backend, backends, backends_of, dispatch_keys, serving
from torch_paged_attn.ops.checks import fail, refuse, storage_fault
from torch_paged_attn.ops.repeated import remember

# A Library unregisters its operators when it is collected, so it lives as long as the module.
LIBRARY = torch.library.Library("paged_attn", "FRAGMENT")

# ops that write into their arguments and that torch_xla's users call
WRITING = ("reshape_and_cache", "flash_varlen_out")

# op name -> its checks (of metadata, of values), in order of definition
OPS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {}
# op name -> its schema, as text
SCHEMAS: dict[str, str] = {}
# op name -> its gate to autograd
GATES: dict[str, Gate] = {}
# op name -> a function of PyTorch operators for backends that have no kernel
COMPOSED: dict[str, Callable[..., Any]] = {}
# ops that the compiled library does not have, and that are not composed either
NOT_COMPILED: set[str] = set()


def define(
    schema: str,
    *,
    check: Callable[..., None],
    check_values: Callable[..., None],
    fake: Callable[..., Any],
    derivative: Derivative | None = None,
    composed: Callable[..., Any] | None = None,
    autocast: bool = False,
    call: Callable[..., AttentionCall | BackwardCall] | None = None,
    has_plan: bool = False,
) -> torch._ops.OpOverload:
    """Define one operator: its schema, its fake, its gate to autograd, and `<op>_error`.

    schema: as `torch.library` takes it, without the namespace
    check: raises for metadata and options that the contract forbids; it reads no tensor value
    check_values: raises for forbidden values in tensors
    fake: returns empty results of the right shape and dtype
    derivative: how autograd differentiates the op; None: it has no derivative
    composed: the op as a function of PyTorch operators, for backends that have no kernel
    autocast: whether tensors are cast under `torch.autocast`, by `_autocast.RULES`
    call: makes an AttentionCall or a BackwardCall of the op's arguments, if it is attention
    has_plan: whether compiled kernels have `<op>_plan`: how they would run a call, as JSON

    `<op>_error` takes the operator's arguments and returns the error message of the first rule that
    they break. A compiled kernel that finds a rule broken calls it for the message.
    """
    name = schema[: schema.index("(")]
    LIBRARY.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    gate = Gate(LIBRARY, name, schema[schema.index("(") :], check, derivative)
    GATES[name] = gate

    @torch.library.register_fake(f"paged_attn::{name}", lib=LIBRARY)
    def _fake(*args: Any, **kwargs: Any) -> Any:
        # only plain meta tensors; for FakeTensors `<op>_gated` has been called before
        if gate.requiring_grad(args):
            return gate.gated_op(*args, **kwargs)
        check(*args, **kwargs)
        return fake(*args, **kwargs)

    error_name = name.replace(".", "_") + "_error"
    arguments = re.sub(r"\([a-d]!\)", "", schema[schema.index("(") : schema.rindex("->")])
    LIBRARY.define(f"{error_name}{arguments}-> str")
    explain = functools.partial(_explain, gate, name, (check, check_values))
    LIBRARY.impl(error_name, explain, "CompositeExplicitAutograd")
    if has_plan:
        LIBRARY.define(f"{name}_plan{arguments}-> str")

    if not name.endswith("_backward"):
        inline(name, LIBRARY)
    if autocast:
        bind_autocast(LIBRARY, name, (gate.op, gate.gated_op))
    if composed is not None:
        COMPOSED[name] = composed
    if call is not None:
        paths.CALLS[name] = call
    OPS[name] = check, check_values
    SCHEMAS[name] = schema
    return gate.op


def bind_backends() -> None:
    """Register a kernel of every operator for every dispatch key of a backend.

    Compiled libraries are loaded now; a backend in Python is imported by the first call.
    """
    for key in dispatch_keys():
        first = backends_of(key)[0]
        is_loaded = first.is_compiled and first.unsupported() is None
        if is_loaded and not _sees_gradients():
            for name, gate in GATES.items():
                LIBRARY.impl(name, gate.call_gated, f"Autograd{key}")
        for name in OPS:
            # the compiled library has registered its own kernels
            has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
            if not (is_loaded and has_kernel(f"paged_attn::{name}", key)):
                LIBRARY.impl(name, _lazy(key, name), key)
                if is_loaded and name not in COMPOSED:
                    NOT_COMPILED.add(name)
    # torch_xla functionalizes tensors, and that dispatch key comes before XLA. An operator that
    # writes into its arguments needs a kernel there, and torch.compile cannot put it into a graph
    if importlib.util.find_spec("torch_xla") is not None:
        for name in OPS:
            packet, _, overload = name.partition(".")
            if packet in WRITING:
                # the op runs eagerly at a graph break, where Dynamo would trace its kernel
                LIBRARY.impl(name, torch.compiler.disable(_lazy("XLA", name)), "Functionalize")
                operator = getattr(torch.ops.paged_attn, packet)
                for callee in (operator, getattr(operator, overload or "default")):
                    torch._dynamo.disallow_in_graph(callee)


def _sees_gradients() -> bool:
    try:
        return torch.ops.paged_attn.cpu_sees_gradients()
    except NotImplementedError:  # a library built before `cpu_sees_gradients` existed
        return False


def _lazy(key: str, name: str) -> Callable[..., Any]:
    """The kernel of an op for a dispatch key, whose backend is asked for at the first call."""
    return GATES[name].wrapped(functools.partial(_load, key, name))


def _load(key: str, name: str) -> Callable[..., Any]:
    """The function of the first backend that can run here, with the checks that this backend does
    not do itself.
    """
    backend, reason = serving(key)
    if backend is None:
        refuse(name, reason)
    function = _function(backend, name)
    paths.announce_experimental(backend.name, backend.untested())
    if name not in backend.announces:
        paths.announce(name, backend.name, f"its kernel for {key}")
    check, check_values = OPS[name]
    # a function composed of PyTorch operators checks nothing itself
    checks = [] if backend.checks_metadata and backend.has(name) else [check]
    if environment.CHECK:
        checks = [functools.partial(_check_storages, GATES[name]), check, check_values]
    if checks:
        return _checked(function, checks)
    if (recent := backend.recent(name)) is not None:
        remember(GATES[name].op, recent, GATES[name].written)
    return function


def _check_storages(gate: Gate, *args: Any, **_options: Any) -> None:
    for name, tensor in gate.named_tensors(args):
        if fault := storage_fault(tensor):
            fail(gate.name, name, *fault)


def _checked(function: Callable[..., Any], checks: list[Callable[..., None]]) -> Callable[..., Any]:
    def checked(*args: Any, **kwargs: Any) -> Any:
        for check in checks:
            check(*args, **kwargs)
        return function(*args, **kwargs)

    return checked


def _function(backend: Backend, name: str) -> Callable[..., Any]:
    if backend.has(name):
        return backend.function(name)
    if name in COMPOSED:
        return COMPOSED[name]
    refuse(name, f"not supported by the {backend.name} backend")


def _explain(
    gate: Gate, name: str, checks: tuple[Callable[..., None], ...], *args: Any, **kwargs: Any
) -> str:
    try:
        _check_storages(gate, *args)
        for check in checks:
            check(*args, **kwargs)
        if name in paths.CALLS:
            compiled = next(backend for backend in backends() if backend.is_compiled)
            compiled.refuse_lacking(paths.CALLS[name](*args, **kwargs))
        gate.refuse(args, kwargs)
    except (ValueError, IndexError, RuntimeError) as error:  # NotImplementedError is a RuntimeError
        return f"{type(error).__name__}: {error}"
    return ""


# a text of the CPU kernels, by its place in `CPU_TEXTS`
LIBRARY.define("cpu_text(int place) -> str")
# called by the CPU kernels when they take a code path for the first time, to log it
LIBRARY.define("cpu_announce(str op, bool has_pairs) -> ()")
# an op's argument that the CPU kernels do not support: its place, and its default as 64 bits. They
# refuse calls that give another value
LIBRARY.define("cpu_skip(str op, int place, int default) -> ()")
# whether the CPU kernels check if an input requires grad
LIBRARY.define("cpu_sees_gradients() -> bool")


# operators without arguments that return a text of the CPU kernels: the instruction set that they
# use; all that this processor supports, slowest first; the others of this architecture, a line
# each: its name, and why
CPU_TEXTS = ("cpu_isa", "cpu_isas", "cpu_isas_missing")


@functools.cache
def _cpu_text(place: int) -> str:
    """Asked once: torch never frees a text that a compiled operator of its stable ABI returns."""
    return torch.ops.paged_attn.cpu_text(place)


for place, name in enumerate(CPU_TEXTS):
    LIBRARY.define(f"{name}() -> str")
    LIBRARY.impl(name, functools.partial(_cpu_text, place), "CompositeExplicitAutograd")


def instruction_sets() -> tuple[str, list[str]]:
    """The instruction set that the CPU kernels use, and all that this processor supports, slowest
    first.
    """
    return torch.ops.paged_attn.cpu_isa(), torch.ops.paged_attn.cpu_isas().split()
