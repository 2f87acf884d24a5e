"""Keys in Triton's cache that do not depend on which kernels a process used before.

Triton's key of a kernel holds the constants of its module, and those of a function that it calls
only if that function's own key was computed before (`DependenciesFinder._update_hash`, Triton 3.6).
So a kernel that comes after another one that calls the same functions has another key than in a
process that takes them in another order, and is compiled again. Here the keys of what a kernel
calls are computed first.
"""

import dis
import threading
import types
from collections.abc import Iterator
from typing import Any

from triton.runtime import jit

# what has a key: functions of kernels, and those that run while a kernel is compiled
_HAS_KEY = getattr(jit, "JITCallable", jit.JITFunction)

# by `id`: a function's own hash is its key
_settled: set[int] = set()
_lock = threading.Lock()


def settle_key(kernel: Any) -> None:
    """Compute a kernel's key after those of what it calls. Interpreted kernels have no keys."""
    if id(kernel) not in _settled and isinstance(kernel, _HAS_KEY):
        with _lock:
            _settle(kernel)


def _settle(function: Any) -> None:
    if id(function) in _settled:
        return
    for called in _called_by(function):
        _settle(called)
    function.cache_key  # noqa: B018
    _settled.add(id(function))


def _called_by(function: Any) -> Iterator[Any]:
    """The functions with keys that a function names, among them methods of the classes that it
    names. Triton's own, which are attributes of modules, have no constants."""
    known = function.fn.__globals__
    for name in sorted(_globals_in(function.fn.__code__)):
        value = known.get(name)
        members = value.hash_attrs if getattr(value, "__triton_aggregate__", False) else [value]
        yield from (x for x in members if isinstance(x, _HAS_KEY))


def _globals_in(code: types.CodeType) -> set[str]:
    """The names of globals in a function's code, and in functions within it."""
    found = {x.argval for x in dis.get_instructions(code) if x.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= _globals_in(constant)
    return found
