"""Print the keys under which Triton looks for each function of our kernels when a `Launch` asks for
it, in the order of their names or, with an argument, the other way round; and the constants whose
order in a key Triton leaves to chance. Nothing is compiled, and no GPU is needed."""

import contextlib
import importlib
import json
import pkgutil
import sys

from triton.runtime.jit import JITCallable, JITFunction

from torch_paged_attn.backends import triton as backend
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.cache_key import settle_key


def functions() -> dict[str, JITCallable]:
    found = {}
    for module in pkgutil.walk_packages(backend.__path__, f"{backend.__name__}."):
        for function in vars(importlib.import_module(module.name)).values():
            if isinstance(function, JITCallable):
                found[f"{function.fn.__module__}.{function.__name__}"] = function
    return dict(sorted(found.items()))


def clashes(function: JITCallable) -> list[str]:
    """Names that stand for different constants in modules of one kernel: Triton sorts these by
    where the modules lie in memory."""
    values: dict[str, set[str]] = {}
    for (name, _), (value, _) in function.used_global_vals.items():
        values.setdefault(name, set()).add(str(value))
    return [name for name, of_modules in values.items() if len(of_modules) > 1]


class _NotCompiled(Exception):
    """Triton was asked for a kernel."""


def _ask(*_: object, **__: object) -> None:
    raise _NotCompiled


def launch(function: JITCallable) -> None:
    """What the first launch does until Triton is asked; other functions than kernels, too."""
    if not isinstance(function, JITFunction):
        settle_key(function)
        return
    with contextlib.suppress(_NotCompiled):
        launch_cache.Launch(function, (1,))()


if __name__ == "__main__":
    JITFunction.warmup = JITFunction.run = _ask  # type: ignore[method-assign]
    # as on a GPU
    launch_cache.IS_KNOWN, launch_cache.current_device = True, lambda: 0
    launch_cache.refuse_host = lambda pointers: None  # they stay on the CPU
    found = functions()
    for name in sorted(found, reverse=len(sys.argv) > 1):
        launch(found[name])
    keys = {name: function.cache_key for name, function in found.items()}
    wrong = {name for function in found.values() for name in clashes(function)}
    print(json.dumps({"keys": keys, "clashes": sorted(wrong)}))
