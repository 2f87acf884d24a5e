"""What a call put on its tape as a function of its own, written out line by line:

    def play(x0, x1, x2, x3, x4, x5):
        if x4 is not None or not check(x0, x1, x2, x3, x5): return UNKNOWN
        a0 = x0.data_ptr()
        ...
        if (a0 | a1 | a2 | a3 | a5) & 15: return UNKNOWN
        if current_device() != DEVICE: ...
        stream = current_stream(DEVICE)
        n0 = empty(*new0)
        b0 = n0.data_ptr()
        ...
        zeros, memory = shared_memory(DEVICE, stream, COUNT, ROOM)
        counters, room = zeros.data_ptr(), memory.data_ptr()
        run0(*grid0, stream, *kernel0, a0, a1, a2, b0, b1, room + 0, counters, a3, *fixed0)
        return n0, n1

Python would spend more on loops, tuples and lists around these lines than it does on them.
"""

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.driver import driver

from torch_paged_attn.backends.triton.runtime.launch import Launch, Tape
from torch_paged_attn.backends.triton.runtime.workspace import shared_memory
from torch_paged_attn.ops._again import UNKNOWN

# what torch.compile's own code checks its inputs and allocates its outputs with, at a fraction of
# what Python's ways cost
_torch: Any = torch._C._dynamo.guards

# tensor maps that are kept for one descriptor
MOST_MAPS = 256

# where memory in shared room begins, in bytes
ALIGNMENT = 256


def write_out(
    tape: Tape, tensors: tuple[Tensor | None, ...], results: Any
) -> Callable[..., Any] | None:
    """A function of tensors like these that does what is on the tape and returns results like
    these, or UNKNOWN for tensors of another description. None where a launch has a pointer that
    comes from nowhere.
    """
    inputs: dict[int, Tensor] = {}
    unlike = []
    for i, x in enumerate(tensors):
        same = next((j for j, y in inputs.items() if y is x), None)
        if x is None or same is not None:
            unlike.append(f"x{i} is not {'None' if x is None else f'x{same}'}")
        else:
            inputs[i] = x
    unlike.append(f"not check({', '.join(f'x{i}' for i in inputs)})")
    origins = _Origins()
    for i, x in inputs.items():
        origins.add(x, f"a{i}")
    returned = results if isinstance(results, tuple) else ()
    new = list(returned)
    room = 0
    for x in tape.allocations:
        if len(tape.launches) == 1:
            origins.add(x, f"room + {room}")
            room += -(-x.nbytes // ALIGNMENT) * ALIGNMENT
        else:
            new.append(x)
    for i, x in enumerate(new):
        origins.add(x, f"b{i}")
    if tape.counters is not None:
        origins.add(tape.counters, "counters")

    names: dict[str, Any] = {
        "UNKNOWN": UNKNOWN,
        "DEVICE": tape.launches[0].device,
        "COUNT": tape.num_counters,
        "ROOM": room,
        "check": _torch.TensorGuards(
            *inputs.values(),
            dynamic_dims_sizes=[list(x.shape) for x in inputs.values()],
            dynamic_dims_strides=[list(x.stride()) for x in inputs.values()],
        ).check,
        "current_device": torch._C._cuda_getDevice,
        "device": torch.cuda.device,
        "current_stream": driver.active.get_current_stream,
        "empty": _torch._empty_strided_cuda,
        "shared_memory": shared_memory,
    }
    starts = []
    for i, launch in enumerate(tape.launches):
        pointers = _write_pointers(launch, i, origins, names)
        names[f"grid{i}"] = (*launch.grid, 1, 1)[:3]
        starts.append(f"run{i}(*grid{i}, stream, *kernel{i}, {', '.join(pointers)}, *fixed{i})")
    if origins.are_unknown:
        return None

    off = [f"a{i} & 15 != {x.data_ptr() % 16}" for i, x in inputs.items() if x.data_ptr() % 16]
    aligned = " | ".join(f"a{i}" for i, x in inputs.items() if x.data_ptr() % 16 == 0)
    if aligned:
        off.append(f"({aligned}) & 15")
    off += [f"{a} != {b}" for a, b in sorted(origins.coinciding)]
    arguments = ", ".join(f"x{i}" for i in range(len(tensors)))
    lines = [
        f"if {' or '.join(unlike)}: return UNKNOWN",
        *(f"a{i} = x{i}.data_ptr()" for i in inputs),
        f"if {' or '.join(off)}: return UNKNOWN",
        "if current_device() != DEVICE:",
        f"  with device(DEVICE): return play({arguments})",
        "stream = current_stream(DEVICE)",
    ]
    for i, x in enumerate(new):
        names[f"new{i}"] = tuple(x.shape), x.stride(), x.dtype
        lines.append(f"n{i} = empty(*new{i})")
        lines.append(f"b{i} = n{i}.data_ptr()")
    if tape.counters is not None or room:
        # they must not be given back before the launch
        lines.append("zeros, memory = shared_memory(DEVICE, stream, COUNT, ROOM)")
        lines.append("counters, room = zeros.data_ptr(), memory.data_ptr()")
    lines += starts
    lines.append(f"return {''.join(f'n{i}, ' for i in range(len(returned))) or None}")
    exec(_compiled("\n  ".join([f"def play({arguments}):", *lines])), names)
    return names["play"]


@functools.lru_cache(maxsize=1024)
def _compiled(source: str) -> types.CodeType:
    """Calls of many shapes share their lines."""
    return compile(source, __file__, "exec")


class _Origins:
    """Where pointers come from, as expressions."""

    def __init__(self) -> None:
        self._tensors: list[tuple[Tensor, str]] = []
        # those that one pointer may stand for, as long as they are equal
        self.coinciding: set[tuple[str, str]] = set()
        self.are_unknown = False

    def add(self, x: Tensor, expression: str) -> None:
        """The address of a tensor."""
        self._tensors.append((x, expression))

    def at(self, address: int) -> str | None:
        """The tensor at an address; 0 is that of an empty one."""
        if address == 0:
            return "0"
        found = [expression for x, expression in self._tensors if x.data_ptr() == address]
        self.coinciding.update((found[0], other) for other in found[1:])
        return found[0] if found else None

    def of(self, x: Tensor) -> str:
        """A tensor, or a part of one."""
        expression = self.at(x.data_ptr())
        if expression is None:
            storage = x.untyped_storage().data_ptr()
            wholes = [
                (whole, name)
                for whole, name in self._tensors
                if whole.untyped_storage().data_ptr() == storage
            ]
            if len(wholes) == 1:
                whole, name = wholes[0]
                expression = f"{name} + {x.data_ptr() - whole.data_ptr()}"
        self.are_unknown |= expression is None
        return expression or "0"


def _write_pointers(
    launch: Launch, number: int, origins: _Origins, names: dict[str, Any]
) -> list[str]:
    """The pointers that a launch's arguments begin with, as expressions."""
    run, kernel, expand = _start_of(launch.compiled)
    args = launch.args
    written: list[str] = []
    maps = 0
    while len(written) < len(args) and not isinstance(x := args[len(written)], int | float):
        if x is None:
            written.append("None")
        elif isinstance(x, Tensor):
            written.append(origins.of(x))
        else:
            name = f"map{number}_{maps}"
            names[name] = _MapAt(x, maps, expand)
            written.append(f"*{name}({origins.at(x.base.data_ptr())})")
            maps += 1
    constants = [launch.options[name] for name in launch.kernel.arg_names[len(args) :]]
    names[f"run{number}"], names[f"kernel{number}"] = run, kernel
    names[f"fixed{number}"] = (*args[len(written) :], *constants)
    return written


# how many arguments a tensor map is to what starts a kernel
Expand = Callable[[Any, int], list[Any]]


def _start_of(compiled: Any) -> tuple[Callable[..., None], tuple[Any, ...], Expand]:
    """What starts a compiled kernel, what it is told between stream and arguments, and how it
    takes a tensor map.
    """
    start, kernel, metadata = compiled.run, compiled.function, compiled.packed_metadata
    if not triton.__version__.startswith("3.6.") or torch.version.hip is not None:
        return start, (kernel, metadata, None, None, None), lambda descriptor, _: [descriptor]
    # what is within `start`, which would look for memory that a kernel needs (ours need none), and
    # make each tensor map anew
    assert start.global_scratch_size == start.profile_scratch_size == 0
    is_cooperative, is_dependent = start.launch_cooperative_grid, start.launch_pdl
    told = kernel, is_cooperative, is_dependent, None, None, metadata, None, None, None
    if not inspect.isfunction(start.launch):
        return start.launch, told, lambda descriptor, _: [descriptor]
    from triton.backends.nvidia.driver import make_tensordesc_arg

    inner = inspect.getclosurevars(start.launch).nonlocals
    described = inner["tensordesc_meta"]
    return inner["launcher"], told, lambda x, i: make_tensordesc_arg(x, described[i])


class _MapAt:
    """A launch's tensor map like another, at any address."""

    def __init__(self, descriptor: Any, number: int, expand: Expand) -> None:
        self._descriptor, self._number, self._expand = descriptor, number, expand
        self._made: dict[int, list[Any]] = {}

    def __call__(self, address: int) -> list[Any]:
        made = self._made.get(address)
        if made is None:
            if len(self._made) >= MOST_MAPS:
                self._made.clear()
            descriptor = copy.copy(self._descriptor)
            descriptor.base = self._descriptor.base.at(address)
            made = self._made[address] = self._expand(descriptor, self._number)
        return made
