"""Which kernel runs a call: as a `Path` for `explain`, in the log, and as a range in profiles.

The backend chooses the kernel (`Backend.path`). Calls themselves do not run this code, except for
`announce`, and for the ranges under `PAGED_ATTN_PROFILE=1`.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from torch_paged_attn import environment
from torch_paged_attn.attention_call import AttentionCall, fill_hints
from torch_paged_attn.backward_call import BackwardCall
from torch_paged_attn.ops.accepted import as_accepted, operator_of
from torch_paged_attn.ops.backend import serving_device
from torch_paged_attn.ops.checks import fail
from torch_paged_attn.ops.path import Path as Path
from torch_paged_attn.ops.path import announce as announce  # backends log by this module
from torch_paged_attn.ops.path import announce_experimental as announce_experimental

Function = TypeVar("Function", bound=Callable[..., Any])

# op -> the function that makes an AttentionCall or BackwardCall of the op's arguments; `define` of
# ops/_library.py fills it
CALLS: dict[str, Callable[..., AttentionCall | BackwardCall]] = {}
# op -> its public function
PUBLIC: dict[str, Callable[..., Any]] = {}


def is_real(x: Tensor) -> bool:
    """Whether a tensor holds values that the host can read."""
    return x.device.type == "cpu" and not isinstance(x, FakeTensor)


def bound(op: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call of an op's public function by name: defaults are included, and
    missing hints are computed from shapes.
    """
    given = inspect.signature(function_of(op)).bind(*args, **options)
    given.apply_defaults()
    found = given.arguments
    if "max_seqlen_q" in found:
        table, hints = found.get("block_table"), ("max_seqlen_q", "max_seqlen_k")
        filled = fill_hints(found["q"], found["k"], table, *(found[name] for name in hints))
        found |= zip(hints, filled, strict=True)
        operator = getattr(torch.ops.paged_attn, op).default
        _, found = as_accepted(operator_of(operator), (found["q"],), found)
    return found


def public(function: Function) -> Function:
    """A decorator for an op's public function: `explain` finds it, and profiles name its calls."""
    PUBLIC[function.__name__] = function
    return profiled(function.__name__, function)


def function_of(op: str) -> Callable[..., Any]:
    """The public function of an op."""
    if op not in PUBLIC:
        fail("explain", "op", repr(op), f"one of {', '.join(PUBLIC)}")
    return PUBLIC[op]


def call_of(op: str, given: dict[str, Any]) -> AttentionCall | BackwardCall | dict[str, Any]:
    """The arguments as an `AttentionCall` or `BackwardCall`; of other ops, as they are."""
    return CALLS[op](**given) if op in CALLS else given


def tensors_of(given: dict[str, Any]) -> list[Tensor]:
    """All tensors among the arguments, those in lists and pairs included."""
    several = [y for x in given.values() for y in (x if isinstance(x, tuple | list) else (x,))]
    return [x for x in several if isinstance(x, Tensor)]


def taken(op: str, args: tuple[Any, ...], options: dict[str, Any]) -> Path | None:
    """The path of a call on the device of its tensors; None if no backend serves that device."""
    given = bound(op, args, options)
    backend, _ = serving_device(tensors_of(given)[0].device)
    return None if backend is None else backend.path_of(op, call_of(op, given))


def profiled(op: str, function: Function) -> Function:
    """`function`, which takes an op's arguments. Under PAGED_ATTN_PROFILE=1 each call is a range in
    `torch.profiler` whose name says op, backend, kernel and shapes.
    """
    if not environment.PROFILE:
        return function

    @functools.wraps(function)
    def in_range(*args: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return function(*args, **options)
        with torch.profiler.record_function(_range_name(op, args, options)):
            return function(*args, **options)

    return in_range  # type: ignore[return-value]


def _range_name(op: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
    try:
        with torch.no_grad():
            path = taken(op, args, options)
            tensors = tensors_of(bound(op, args, options))[:3]
    except Exception:  # an invalid call: the op raises the error itself
        return f"paged_attn::{op}"
    kernel = "no kernel" if path is None else f"{path.backend} {path.kernel}"
    shapes = (f"{'x'.join(map(str, x.shape))} {str(x.dtype)[6:]}" for x in tensors)
    return f"paged_attn::{op} [{kernel}] {', '.join(shapes)}"
