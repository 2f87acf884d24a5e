"""Triton's own launcher of a compiled kernel, called without Triton's way to it.

`kernel[grid](...)` looks a kernel up and describes tensor maps anew at every launch. A
`ReadyKernel` calls the launcher under it with addresses, and keeps descriptions of tensor maps.
The launchers of Triton 3.6 to 3.9 are known. 3.6 compiles one for each kernel's signature, which
takes the kernel's arguments one by one; later versions have one function for all kernels, which
takes them as a tuple. Both go through all of them at every launch; our `Starter` (csrc/python),
where it is built, through those alone that change. With another Triton, Triton launches.
"""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any

import triton

from torch_paged_attn.lru import LRU
from torch_paged_attn.ops.repeated import library

# the most tensor maps that are kept for a kernel
MOST_MAPS = 1024

# major and minor version
VERSION = tuple(map(int, triton.__version__.split(".")[:2]))
OLDEST, NEWEST = (3, 6), (3, 9)

# whether this is a Triton whose launcher and tensor maps `ready_kernel` and `fill_less` know
HAS_KNOWN_MAPS = OLDEST <= VERSION <= NEWEST


def unknown_triton() -> str | None:
    """What is different with a Triton that is not known, for people; None if it is known."""
    if HAS_KNOWN_MAPS:
        return None
    oldest, newest = (".".join(map(str, x)) for x in (OLDEST, NEWEST))
    return (
        f"the launcher of Triton {triton.__version__} is not known ({oldest} to {newest} are):"
        " Triton starts every kernel, which takes the host longer, and on Hopper the heads of a"
        " group that is no power of two share fewer tiles; results are as accurate"
    )


# (stream, *arguments): starts a kernel
Start = Callable[..., None]

# the types of parameters that a `Starter` writes
KNOWN = frozenset(("constexpr", "nvTmaDesc", "fp32", "i1", "i8", "i16", "i32", "i64", "u64"))

# a launch with more shared memory has an attribute of its own (Triton 3.8)
MOST_SHARED = 228 << 10


@functools.cache
def starter_type() -> Any:
    """The type that starts kernels from C; None where it is not built, or there is no driver."""
    return getattr(library(), "Starter", None)


class ReadyKernel:
    """A compiled kernel that can be started on one device. `launcher` takes grid, stream, `fixed`,
    and the kernel's addresses and constants: one by one, or with `takes_tuple` as a tuple. `types`
    are those of its arguments if a `Starter` can start it, else None.
    `describe_map` returns the arguments that the launcher takes for a tensor map, from the map and
    its number among the kernel's. `compiled` is Triton's object, which unloads the kernel from the
    device when nothing refers to it any more.
    """

    __slots__ = (
        *("_describe_map", "_maps", "compiled", "device", "fixed", "launcher"),
        *("takes_tuple", "types"),
    )

    def __init__(
        self,
        launcher: Callable[..., None],
        fixed: tuple[Any, ...],
        describe_map: Callable[[Any, int], list[Any]],
        device: int,
        takes_tuple: bool = False,
        compiled: Any = None,
        types: tuple[Any, ...] | None = None,
    ) -> None:
        self.launcher, self.fixed, self._describe_map = launcher, fixed, describe_map
        self.device, self.takes_tuple, self.compiled = device, takes_tuple, compiled
        self.types = types
        self._maps = LRU(MOST_MAPS)

    def starter(self, grid: tuple[int, ...], constants: tuple[Any, ...]) -> Start:
        """A function that starts the kernel with a grid and constants."""
        if self.types is not None:
            function, _, is_dependent = self.fixed[:3]
            warps, _, shared = self.compiled.packed_metadata
            given = len(self.types) - len(constants)
            size = function, grid, 32 * warps, shared, is_dependent
            return starter_type()(*size, self.types, given, constants)
        launcher, fixed, takes_tuple = self.launcher, self.fixed, self.takes_tuple

        def start(stream: int, *addresses: Any) -> None:
            given = *addresses, *constants
            launcher(*grid, stream, *fixed, *((given,) if takes_tuple else given))

        return start

    def addresses(self, pointers: tuple[Any, ...]) -> list[Any]:
        """The launcher's arguments for tensors, None, tensor maps, and groups of the first two."""
        found: list[Any] = []
        maps = 0
        for x in pointers:
            if isinstance(x, tuple):
                found.append(_group_addresses(x))
            elif hasattr(x, "block_shape"):
                found += self._describe_map(x, maps)
                maps += 1
            else:
                found.append(x if x is None else x.data_ptr())
        return found

    def map_arguments(self, number: int, boxes: Any, address: int) -> list[Any]:
        """The launcher's arguments for a tensor map with these boxes at an address."""
        found = self._maps.get(key := (number, boxes, address))
        if found is None:
            found = self._describe_map(boxes.at(address), number)
            self._maps.put(key, found)
        return found


def _group_addresses(group: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(
        [
            _group_addresses(x) if isinstance(x, tuple) else x if x is None else x.data_ptr()
            for x in group
        ]
    )


def fill_less(tensor_map: Any, box: tuple[int, ...]) -> None:
    """Make the tensor memory accelerator load and store boxes of shape `box`, which is smaller than
    the tensor map's `block_shape`: Triton only has powers of two.
    """
    tensor_map.filled = box


def as_filled(description: Any, tensor_map: Any) -> Any:
    """Triton's description of a tensor map, with the shape that `fill_less` gave it. Triton loads
    wide boxes in several of fewer columns, each as wide as the swizzle: that width stays.
    """
    box = getattr(tensor_map, "filled", None)
    if box is None:
        return description
    return description | {"block_size": [*box[:-1], description["block_size"][-1]]}


def _types_of(compiled: Any) -> tuple[Any, ...] | None:
    """The types of a kernel's arguments if a `Starter` can start it, with the parts of each tensor
    map; None if not.
    """
    warps_clusters_shared = compiled.packed_metadata
    if starter_type() is None or compiled.run.launch_cooperative_grid:
        return None
    if warps_clusters_shared[1] != 1 or warps_clusters_shared[2] > MOST_SHARED:
        return None
    is_described = bool(getattr(compiled.metadata, "tensordesc_meta", None))
    types: list[Any] = []
    for x in compiled.src.signature.values():
        if isinstance(x, str) and x.startswith("tensordesc"):
            box = re.search(r"\[([^]]*)", x)
            if box is None or not is_described:
                return None
            rank = box[1].count(",") + 1
            types += ["nvTmaDesc", *["i32"] * rank, *["i64"] * rank]
        else:
            types.append(x)
    return tuple(types) if _are_known(types) else None


def _are_known(types: Any) -> bool:
    return all(
        _are_known(x) if isinstance(x, tuple) else x.startswith("*") or x in KNOWN for x in types
    )


def ready_kernel(compiled: Any, device: int) -> ReadyKernel | None:
    """The kernel that Triton has compiled for a device, ready to start; None if only Triton can
    start it.
    """
    from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg

    run = compiled.run
    if type(run) is not CudaLauncher or run.global_scratch_size or run.profile_scratch_size:
        return None
    if getattr(run, "gsan_enabled", False):
        return None  # Triton's sanitizer has arguments of its own
    launcher, descriptions = run.launch, getattr(compiled.metadata, "tensordesc_meta", None)
    if inspect.isfunction(launcher):
        # this wrapper would describe every tensor map anew at each launch
        launcher = inspect.getclosurevars(launcher).nonlocals.get("launcher")
    if launcher is None:
        return None
    # 3.8 and later hand over the grid and more, which only AMD's tensor maps need
    unused = (None,) if VERSION >= (3, 8) else ()

    def describe_map(tensor_map: Any, number: int) -> list[Any]:
        description = descriptions[number] if descriptions else None
        return make_tensordesc_arg(tensor_map, as_filled(description, tensor_map), *unused)

    no_scratch = no_hooks = None, None
    types = _types_of(compiled)
    fixed: tuple[Any, ...] = compiled.function, run.launch_cooperative_grid, run.launch_pdl
    if VERSION < (3, 7):
        fixed = *fixed, *no_scratch, compiled.packed_metadata, None, *no_hooks
        return ReadyKernel(launcher, fixed, describe_map, device, False, compiled, types)
    described = run.arg_annotations, run.kernel_signature
    fixed = *fixed, compiled.packed_metadata, None, *no_hooks, *no_scratch, *described
    return ReadyKernel(launcher, fixed, describe_map, device, True, compiled, types)
