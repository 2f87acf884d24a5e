"""Count the kernels that calls would compile on a GPU that is not here. Nothing is compiled.

    from kernel_counts import counted

    with counted("sm90") as kernels:
        for step in range(200):
            flash_attn_func(...)  # tensors on the CPU
    assert len(kernels) <= 6, kernels.report()

Within `counted`, the package's operators take the kernels of that chip wherever tensors are, and
return zeros (large results stay uninitialised). A launch does what it does on the chip, up to the
point where Triton would look the kernel up. So tiles, specialisations and compiler options are
those of the chip. This works in a process in which Triton does not interpret: `counted_in` has one
run a function.
"""

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from typing import Any

import torch

# elements of a result up to which it is filled with zeros
MOST_FILLED = 1 << 20


class Kernels:
    """The kernels that were asked for; `len` is how many would be compiled."""

    def __init__(self) -> None:
        # kernel's name -> Triton's key -> what the kernel is compiled for, by argument
        self.found: dict[str, dict[str, dict[str, Any]]] = {}
        # kernel's name and a number of a group of arguments -> what Triton compiles for its values
        self.in_groups: dict[str, set[Any]] = {}

    def __len__(self) -> int:
        return sum(map(len, self.found.values()))

    def by_name(self) -> dict[str, int]:
        """Kernel's name -> how many would be compiled."""
        return {name: len(of) for name, of in self.found.items()}

    def specialised(self) -> dict[str, set[Any]]:
        """The numbers of groups for whose values there are kernels of their own: Triton heeds
        `do_not_specialize` of arguments alone, not of a group of numbers.
        """
        return {name: kinds for name, kinds in self.in_groups.items() if len(kinds) > 1}

    def note_groups(self, kernel: str, arguments: Any, specialization: Any) -> None:
        """Take down the numbers of the groups of a call."""
        for (name, value), (kind, key) in zip(arguments.items(), specialization, strict=True):
            if isinstance(value, tuple) and kind != "constexpr":
                for of_number, found in _numbers(f"{kernel}: {name}", value, kind, key):
                    self.in_groups.setdefault(of_number, set()).add(found)

    def report(self) -> str:
        """Each kernel's name and number, and the values that differ from one to the next."""
        lines = []
        for name, of in self.found.items():
            lines.append(f"{name}: {len(of)}")
            arguments = sorted({argument for one in of.values() for argument in one})
            for argument in arguments:
                values = dict.fromkeys(str(one.get(argument)) for one in of.values())
                if len(values) > 1:
                    lines.append(f"    {argument}: {', '.join(values)}")
        return "\n".join(lines)


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of what an argument is compiled for, by name."""
    fields = getattr(value, "_fields", None)
    if isinstance(value, tuple | list) and len(value):
        for i, part in enumerate(value):
            yield from _flat(f"{name}.{fields[i] if fields else i}", part)
    else:
        yield name, value


def _numbers(name: str, value: Any, kind: Any, key: Any) -> Iterator[tuple[str, Any]]:
    """The numbers in a group of arguments, by name, and what each is compiled for."""
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", range(len(value)))
        keys = key or (None,) * len(value)
        for field, *of_part in zip(fields, value, kind, keys, strict=True):
            yield from _numbers(f"{name}.{field}", *of_part)
    elif type(value) is int:
        yield name, (kind, key)


def _described(kernel: Any, arguments: Any, specialization: Any, options: Any) -> dict[str, Any]:
    """What a kernel is compiled for, by argument and, for groups, by field."""
    found: dict[str, Any] = {}
    for (name, value), (kind, key) in zip(arguments.items(), specialization, strict=True):
        fields = getattr(value, "_fields", None)
        if kind == "constexpr":
            found |= _flat(name, value)
        elif fields is not None:
            for field, one, more in zip(fields, kind, key or (None,) * len(fields), strict=True):
                found |= _flat(f"{name}.{field}", (one, more))
        else:
            found |= _flat(name, (kind, key))
    return found | {f"compiler.{name}": value for name, value in options.items()}


def _zeros(results: Any) -> Any:
    """The results, filled with zeros unless they are large: no kernel has written them."""
    for x in results if isinstance(results, tuple) else (results,):
        if isinstance(x, torch.Tensor) and x.numel() <= MOST_FILLED:
            x.zero_()
    return results


def on_chip() -> contextlib.AbstractContextManager[Any]:
    """Within it, the operators of this thread take the kernels of the chip that is counted for."""
    from torch_paged_attn.backends.triton.compile_ahead import OnGPU

    class Zeros(OnGPU):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            results = super().__torch_dispatch__(func, types, args, kwargs)
            return _zeros(results) if func.namespace == "paged_attn" else results

    return Zeros()


@contextlib.contextmanager
def counted(arch: str) -> Iterator[Kernels]:
    """Within it, calls of the package start no kernel, and those are noted that they would compile
    on a chip of `cross_compile.CHIPS`, such as "sm90".
    """
    from cross_compile import elsewhere
    from triton.runtime.jit import JITFunction, compute_cache_key

    from torch_paged_attn.backends.triton.runtime import launch_cache

    kernels, run = Kernels(), JITFunction.run

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        *_, key_cache, _, _, bind = kernel.device_caches[arch]
        arguments, specialization, options = bind(
            *args, **kwargs, debug=False, instrumentation_mode=""
        )
        kernels.note_groups(kernel.__name__, arguments, specialization)
        key = compute_cache_key(key_cache, specialization, options)
        of = kernels.found.setdefault(kernel.__name__, {})
        if key not in of:
            of[key] = _described(kernel, arguments, specialization, options)

    launch_cache.clear()
    JITFunction.run = note  # type: ignore[method-assign]
    try:
        with elsewhere(arch), on_chip():
            yield kernels
    finally:
        JITFunction.run = run  # type: ignore[method-assign]
        launch_cache.clear()


def _count(arch: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Kernels:
    with counted(arch) as kernels:
        function(*args)
    return kernels


def counted_in(process: Executor, arch: str, function: Callable[..., Any], *args: Any) -> Kernels:
    """The kernels of `function(*args)`, called in a process of `cross_compile.workers`, whose start
    takes seconds. The function has to be importable by its name.
    """
    return process.submit(_count, arch, function, args).result()
