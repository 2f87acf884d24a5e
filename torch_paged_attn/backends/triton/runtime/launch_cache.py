"""What calls and launches like earlier ones need not work out again.

Below the dispatcher, which has dealt with modes, subclasses and gradients. Two caches, each with an
explicit key and a bound:

- A *plan* does all of a call that depends on no value and no address: `make_plan` checks the call
  and chooses tiles, grids and numbers, once for all layers of a step. Its key is what the tensors
  are (`described`), the options, and what of the environment a plan depends on.
- A *kernel* is ready to start: Triton's own launcher and the constants that it takes. Its key is
  what the kernel is compiled for (`compiled_for`), in which no number of tokens, sequences or pages
  has a place. So the first layer of a step of a new size makes a plan, but looks up no kernel in
  Triton.

Plans hold no tensors. The launcher is known for one Triton, on NVIDIA's chips; elsewhere, and for
kernels that need scratch memory of Triton's, every launch is Triton's `kernel[grid](...)`.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
import triton
from torch import Tensor

from torch_paged_attn import environment
from torch_paged_attn.backends.triton.runtime import workspace
from torch_paged_attn.backends.triton.runtime.launch import add_node, is_traced
from torch_paged_attn.backends.triton.runtime.lru import LRU
from torch_paged_attn.backends.triton.runtime.target import INTERPRETED, assumed
from torch_paged_attn.backends.triton.runtime.workspace import current_stream

MOST_PLANS = 1024
MOST_KERNELS = 512
# tensor maps of a kernel
MOST_MAPS = 512

# makes a call's results, given the tensors it was planned for or others like them
Plan = Callable[..., Any]

# the Triton whose launcher `ready_kernel` knows
IS_KNOWN = (
    triton.__version__.startswith("3.6.") and torch.version.cuda is not None and not INTERPRETED
)

# a mode such as that of torch.set_default_device sees every look at a tensor otherwise
_no_torch_functions: Any = torch._C.DisableTorchFunction
_current_device: Any = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)

_plans = LRU(MOST_PLANS)
_kernels = LRU(MOST_KERNELS)


def clear() -> None:
    """Drop all plans and kernels, and the memory that streams hold."""
    _plans.clear()
    _kernels.clear()
    workspace.clear()


def call(
    op: str,
    make_plan: Callable[..., Plan],
    tensors: tuple[Tensor | None, ...],
    options: dict[str, Any],
) -> Any:
    """The results of an op: of the plan for calls like this one, if there is one, else of
    `make_plan(*tensors, **options)`.
    """
    if is_traced():
        plan = make_plan(*tensors, **options)
        return plan if plan is NotImplemented else plan(*tensors)
    with _no_torch_functions():
        first = tensors[0]
        if first is not None and first.is_cuda and first.get_device() != _current_device():
            with torch.cuda.device(first.device):
                return _call(op, make_plan, tensors, options)
        return _call(op, make_plan, tensors, options)


def _call(
    op: str,
    make_plan: Callable[..., Plan],
    tensors: tuple[Tensor | None, ...],
    options: dict[str, Any],
) -> Any:
    key = op, environment.BATCH_INVARIANT, assumed(), described(tensors), *options.items()
    plan = _plans.get(key)
    if plan is None:
        plan = make_plan(*tensors, **options)
        _plans.put(key, plan)
    return plan(*tensors)


def described(tensors: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    """Everything about tensors that a plan may depend on: all but values and addresses. Of an
    address it is only how far off it lies from a multiple of 16 bytes.
    """
    return tuple(
        [
            None if x is None else (x.dtype, x.device, x.shape, x.stride(), x.data_ptr() & 15)
            for x in tensors
        ]
    )


def compiled_for(
    kernel: Any, pointers: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...]:
    """What a kernel is compiled for. Triton looks at types, at which addresses are multiples of 16
    bytes, and at numbers: at how many bits they need, and whether they are 1 or multiples of 16
    unless the kernel says `do_not_specialize`.
    """
    varying = {param.name for param in kernel.params if param.do_not_specialize}
    numbers = [(n, _bits(x) if n in varying else _exactly(x)) for n, x in options.items()]
    return kernel, _current_device(), tuple([_kind(x) for x in pointers]), *numbers


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return tuple([_kind(y) for y in x])
    return x if x is None else (x.base.dtype, tuple(x.block_shape), repr(x.layout))


def _exactly(x: Any) -> Any:
    """A number, or a tuple of numbers: 1, 1.0 and True, which are equal, are of other types."""
    return x, tuple(map(type, x)) if isinstance(x, tuple) else type(x)


def _bits(x: Any) -> Any:
    if type(x) is not int:
        return _exactly(x)
    return 32 if -(2**31) <= x < 2**31 else 64 if x < 2**63 else "unsigned"


class Launch:
    """`kernel[grid](*pointers, **options)` on the current device, called with the pointers:
    tensors, None, tensor maps, and tuples of the first two. Once it `is_ready`, addresses may stand
    for tensors.
    """

    __slots__ = ("_constants", "_kernel", "grid", "kernel", "options")

    def __init__(self, kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self.grid = (*grid, 1, 1)[:3]
        self._kernel: ReadyKernel | None = None
        self._constants: tuple[Any, ...] = ()

    @property
    def is_ready(self) -> bool:
        """Whether no launch goes through Triton any more."""
        return self._kernel is not None

    def __call__(self, *pointers: Any) -> None:
        if self._kernel is not None:
            self._kernel(self.grid, pointers, self._constants)
        elif is_traced():
            add_node(self.kernel, self.grid, pointers, self.options)
        elif IS_KNOWN and assumed() is None:
            self._make_ready(pointers)
        else:
            self._through_triton(pointers)

    def _through_triton(self, pointers: tuple[Any, ...]) -> Any:
        return self.kernel[self.grid](*pointers, **self.options)

    def _make_ready(self, pointers: tuple[Any, ...]) -> None:
        names = self.kernel.arg_names[len(pointers) :]
        self._constants = tuple([self.options[name] for name in names])
        key = compiled_for(self.kernel, pointers, self.options)
        ready = _kernels.get(key)
        if ready is not None:
            ready(self.grid, pointers, self._constants)
        elif (ready := ready_kernel(self._through_triton(pointers))) is not None:
            _kernels.put(key, ready)
        self._kernel = ready


class ReadyKernel:
    """Starts a compiled kernel on the current device. `describe_map` makes of a tensor map, and of
    its number among the kernel's, the arguments that the launcher takes for it.
    """

    __slots__ = ("_describe_map", "_device", "_fixed", "_launcher", "_maps")

    def __init__(
        self,
        launcher: Callable[..., None],
        fixed: tuple[Any, ...],
        describe_map: Callable[[Any, int], list[Any]],
    ) -> None:
        self._launcher, self._fixed, self._describe_map = launcher, fixed, describe_map
        self._device = _current_device()
        self._maps = LRU(MOST_MAPS)

    def __call__(
        self, grid: tuple[int, ...], pointers: tuple[Any, ...], constants: tuple[Any, ...]
    ) -> None:
        addresses: list[Any] = []
        maps = 0
        for x in pointers:
            if isinstance(x, tuple):
                addresses.append(tuple([_address(y) for y in x]))
            elif hasattr(x, "block_shape"):
                addresses += self._map_arguments(x, maps)
                maps += 1
            else:
                addresses.append(_address(x))
        stream = current_stream(self._device)
        self._launcher(*grid, stream, *self._fixed, *addresses, *constants)

    def _map_arguments(self, tensor_map: Any, number: int) -> list[Any]:
        # an entry keeps its map alive, so that no other one is found where it was
        key = id(tensor_map), number
        entry = self._maps.get(key)
        if entry is None:
            entry = tensor_map, self._describe_map(tensor_map, number)
            self._maps.put(key, entry)
        return entry[1]


def _address(x: Any) -> Any:
    return x if x is None or x.__class__ is int else x.data_ptr()


def ready_kernel(compiled: Any) -> ReadyKernel | None:
    """A kernel that Triton has compiled and started once, or None where only Triton knows how."""
    from triton.backends.nvidia.driver import CudaLauncher, make_tensordesc_arg

    run = compiled.run
    if type(run) is not CudaLauncher or run.global_scratch_size or run.profile_scratch_size:
        return None
    launcher, descriptions = run.launch, getattr(compiled.metadata, "tensordesc_meta", None)
    if inspect.isfunction(launcher):
        # it would describe every tensor map anew
        launcher = inspect.getclosurevars(launcher).nonlocals["launcher"]
    no_scratch = no_hooks = None, None
    fixed = (
        compiled.function, run.launch_cooperative_grid, run.launch_pdl, *no_scratch,
        compiled.packed_metadata, None, *no_hooks,
    )  # fmt: skip

    def describe_map(tensor_map: Any, number: int) -> list[Any]:
        return make_tensordesc_arg(tensor_map, descriptions[number] if descriptions else None)

    return ReadyKernel(launcher, fixed, describe_map)
