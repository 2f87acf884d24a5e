"""Triton's own launcher of a compiled kernel, called without Triton's way to it.

`kernel[grid](...)` looks a kernel up and describes tensor maps anew at every launch. A
`ReadyKernel` calls the launcher under it with addresses, and keeps descriptions of tensor maps.
Only the launcher of one version of Triton is known.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton

from torch_paged_attn.lru import LRU

# the most tensor maps that are kept for a kernel
MOST_MAPS = 1024

# whether this is the Triton whose launcher and tensor maps `ready_kernel` and `fill_less` know
HAS_KNOWN_MAPS = triton.__version__.startswith("3.6.")


class ReadyKernel:
    """A compiled kernel that can be started on one device. `launcher` takes grid, stream, `fixed`,
    the kernel's addresses and its constants. `describe_map` returns the arguments that the launcher
    takes for a tensor map, from the map and its number among the kernel's.
    """

    __slots__ = ("_describe_map", "_maps", "device", "fixed", "launcher")

    def __init__(
        self,
        launcher: Callable[..., None],
        fixed: tuple[Any, ...],
        describe_map: Callable[[Any, int], list[Any]],
        device: int,
    ) -> None:
        self.launcher, self.fixed, self._describe_map = launcher, fixed, describe_map
        self.device = device
        self._maps = LRU(MOST_MAPS)

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


def ready_kernel(compiled: Any, device: int) -> ReadyKernel | None:
    """The kernel that Triton has compiled for a device, ready to start; None if only Triton can
    start it.
    """
    from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg

    run = compiled.run
    if type(run) is not CudaLauncher or run.global_scratch_size or run.profile_scratch_size:
        return None
    launcher, descriptions = run.launch, getattr(compiled.metadata, "tensordesc_meta", None)
    if inspect.isfunction(launcher):
        # this wrapper would describe every tensor map anew at each launch
        launcher = inspect.getclosurevars(launcher).nonlocals.get("launcher")
    if launcher is None:
        return None
    no_scratch = no_hooks = None, None
    fixed = (
        compiled.function, run.launch_cooperative_grid, run.launch_pdl, *no_scratch,
        compiled.packed_metadata, None, *no_hooks,
    )  # fmt: skip

    def describe_map(tensor_map: Any, number: int) -> list[Any]:
        description = descriptions[number] if descriptions else None
        return make_tensordesc_arg(tensor_map, as_filled(description, tensor_map))

    return ReadyKernel(launcher, fixed, describe_map, device)
