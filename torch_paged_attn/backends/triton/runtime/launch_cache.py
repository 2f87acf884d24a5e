"""Caches of what the host works out for a call and for a launch, for later calls that are alike.

This module is below the dispatcher, which has dealt with modes, subclasses and gradients. There are
three caches, each with an explicit key and a bound:

- A *plan* is a function that runs a call. `make_plan` makes it: it checks the call and chooses
  tiles, grids and numbers, which depend on no value and no address, once for all layers of a step.
  Its key is the tensors' shapes, strides and dtypes (`described`), the options, and the environment
  variables that plans depend on. A guard finds the plans of the last calls without making a key.
  Plans of one *family*, whose calls differ in numbers of tokens and sequences alone, are made
  without checks.
- A *kind* is the part of a plan that calls share which differ in sizes alone.
- A *kernel* is a compiled one that is ready to start (`launcher.py`). Its key is what the kernel is
  compiled for (`compiled_for`). Numbers of tokens, sequences and pages are not in it, so the first
  layer of a step of a new size makes a plan, but looks up no kernel in Triton.

Plans hold no tensors. Kernels are kept for NVIDIA's chips, with the versions of Triton whose
launchers are known. Elsewhere, and for kernels that need Triton's scratch memory, every launch is
`kernel[grid](...)`.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_paged_attn import attention_call, environment
from torch_paged_attn.attention_call import AttentionCall, option_names
from torch_paged_attn.backends.triton.runtime import workspace
from torch_paged_attn.backends.triton.runtime.cache_key import settle_key
from torch_paged_attn.backends.triton.runtime.compiled import compiled_first
from torch_paged_attn.backends.triton.runtime.guard import current_device, guard_of, narrowed
from torch_paged_attn.backends.triton.runtime.launch import add_node, is_traced
from torch_paged_attn.backends.triton.runtime.launcher import (
    HAS_KNOWN_MAPS,
    ReadyKernel,
    ready_kernel,
)
from torch_paged_attn.backends.triton.runtime.target import INTERPRETED, assumed
from torch_paged_attn.backends.triton.runtime.vector_flags import without_vector_flags
from torch_paged_attn.backends.triton.runtime.workspace import current_stream
from torch_paged_attn.lru import LRU
from torch_paged_attn.ops.repeated import Recent

# how many of an op's last plans a call tries first, and then families: layers may alternate, and so
# may prefill and decode
MOST_RECENT = 4
MOST_PLANS = 1024
MOST_KINDS = 256
MOST_KERNELS = 512

# tensors whose first dimension is a number of tokens, sequences or pages
SIZED = frozenset((*attention_call.sizes_of_tensors(), "out")) - {"block_table"}

# scales of these may have as many rows as the cache
BY_TOKEN = "k_descale", "v_descale"

# A function that returns a call's results. It takes the tensors that are not None, of the call that
# it was planned for or of one like it, and their addresses (None while a graph is traced)
Plan = Callable[[tuple[Any, ...], Any], Any]

# whether launches go through the launcher that `launcher.py` knows
IS_KNOWN = HAS_KNOWN_MAPS and torch.version.cuda is not None and not INTERPRETED

# how many modes such as torch.set_default_device's are on: each attribute of a tensor that is read
# calls them
_function_modes: Any = getattr(torch._C, "_len_torch_function_stack", lambda: 1)
_without_function_modes: Any = getattr(torch._C, "DisableTorchFunction", contextlib.nullcontext)

_plans = LRU(MOST_PLANS)
_kinds = LRU(MOST_KINDS)
_kernels = LRU(MOST_KERNELS)
# what is told of launches that start nothing (`noting`)
_note: Callable[[Any], bool] | None = None
# op -> the plans of its last calls, the latest first, then families
_recent: dict[str, tuple[tuple[Any, Plan], ...]] = {}


def clear() -> None:
    """Drop all plans and kernels, and the memory that streams hold."""
    _recent.clear()
    _plans.clear()
    _kinds.clear()
    _kernels.clear()
    workspace.clear()


@contextlib.contextmanager
def noting(note: Callable[[Any], bool]) -> Iterator[None]:
    """While kernels are compiled for a GPU that is not here: `note` gets what the kernel of each
    launch is compiled for, and says whether Triton has to see the launch.
    """
    global _note
    _note = note
    try:
        yield
    finally:
        _note = None


class Resizable(NamedTuple):
    """What `make_plan` may return: a plan, and what plans calls that differ in sizes alone."""

    plan: Plan
    sizes: tuple[str | None, ...]
    """For each given tensor the name of the number that its first dimension follows from; None if
    that is the same in all calls."""
    resize: Callable[[tuple[Tensor, ...]], Plan]
    """Takes the given tensors, and keeps none."""


# takes an op's tensors, and options by name
MakePlan = Callable[..., Plan | Resizable]


class Planned:
    """A plan, and a guard that checks faster than a key whether a call fits the plan."""

    __slots__ = ("guard", "plan")

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.guard: Any = None


def call(
    op: str,
    make_plan: MakePlan,
    tensors: tuple[Tensor | None, ...],
    options: dict[str, Any],
) -> Any:
    """The results of an op. The plan is the one kept for calls like this one, or
    `make_plan(*tensors, **options)`, which is kept from now on.
    """
    if _function_modes() and not is_traced():
        with _without_function_modes():
            return _call(op, make_plan, tensors, options)
    return _call(op, make_plan, tensors, options)


def _call(
    op: str,
    make_plan: MakePlan,
    tensors: tuple[Tensor | None, ...],
    options: dict[str, Any],
) -> Any:
    # no guard matches while a graph is traced: its tensors have other types
    for guard, plan in _recent.get(op, ()):
        if (found := guard.match(tensors, options)) is not None:
            return plan(*found)
    if is_traced():
        made = make_plan(*tensors, **options)
        plan = made.plan if isinstance(made, Resizable) else made
        return plan if plan is NotImplemented else plan(given(tensors), None)
    first = tensors[0]
    if first is not None and first.is_cuda and first.get_device() != current_device():
        with torch.cuda.device(first.device):
            return _call(op, make_plan, tensors, options)
    key = op, environment.BATCH_INVARIANT, assumed(), *described(tensors), *options.items()
    planned = _plans.get(key)
    if planned is None:
        made = make_plan(*tensors, **options)
        if isinstance(made, Resizable):
            Family(op, make_plan, tensors, options, made).put()
            made = made.plan
        planned = Planned(made)
        _plans.put(key, planned)
    _guard(op, planned, tensors, options)
    present = given(tensors)
    return planned.plan(present, [x.data_ptr() for x in present])


class Family:
    """The plan of calls that differ in numbers of tokens and sequences alone. A call is as valid as
    another one that has been checked if the first dimensions of its tensors are as far apart, so it
    gets a plan for which less is to be worked out.
    """

    def __init__(
        self,
        op: str,
        make_plan: MakePlan,
        tensors: tuple[Tensor | None, ...],
        options: dict[str, Any],
        made: Resizable,
    ) -> None:
        self._op, self._make_plan, self._options = op, make_plan, options
        self._are_given = [x is not None for x in tensors]
        self._sized = [i for i, name in enumerate(made.sizes) if name is not None]
        names = [made.sizes[i] for i in self._sized]
        self._firsts = [names.index(name) for name in names]
        # first dimensions -> guard and plan; how far they are apart -> `resize`
        self._plans, self._resizes = LRU(MOST_PLANS), LRU(MOST_KINDS)
        self._keep(self._sizes(given(tensors)), made)
        self._guard = guard_of(tensors, options, frozenset(self._sized))

    def put(self) -> None:
        """Have calls try this family after the last plans."""
        if self._guard is not None:
            _put_first(self._op, self._guard, self)

    def _sizes(self, tensors: tuple[Tensor, ...]) -> tuple[int, ...]:
        return tuple([tensors[i].shape[0] for i in self._sized])

    def _distances(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Of first dimensions that follow from the same number."""
        firsts = zip(sizes, self._firsts, strict=True)
        return tuple([size - sizes[first] for size, first in firsts])

    def _keep(self, sizes: tuple[int, ...], made: Resizable) -> None:
        if 0 not in sizes:
            self._resizes.put(self._distances(sizes), made.resize)

    def _plan(self, tensors: tuple[Tensor, ...], sizes: tuple[int, ...]) -> Plan:
        resize = self._resizes.get(self._distances(sizes))
        if resize is not None and 0 not in sizes:
            return resize(tensors)
        rest = iter(tensors)
        every = [next(rest) if is_given else None for is_given in self._are_given]
        made = self._make_plan(*every, **self._options)
        if not isinstance(made, Resizable):
            return made
        self._keep(sizes, made)
        return made.plan

    def __call__(self, tensors: tuple[Any, ...], addresses: Any) -> Any:
        found = self._plans.get(sizes := self._sizes(tensors))
        if found is None:
            plan = self._plan(tensors, sizes)
            found = narrowed(self._guard, tensors), plan
            self._plans.put(sizes, found)
        _put_first(self._op, *found)
        return found[1](tensors, addresses)


class PlannedOp:
    """An operator whose arguments by position are tensors: `make_plan` takes them and the options
    by name.
    """

    def __init__(self, name: str, make_plan: MakePlan) -> None:
        self._name, self._make_plan = name, make_plan

    def __call__(self, *args: Any, **options: Any) -> Any:
        return call(self._name, self._make_plan, args, options)

    def recent(self) -> Recent:
        """Where the plans of its last calls are."""
        return Recent(_recent, self._name)


def _guard(
    op: str, planned: Planned, tensors: tuple[Tensor | None, ...], options: dict[str, Any]
) -> None:
    """Make this plan the first that the next call of the op tries."""
    guard = planned.guard
    if guard is None or guard.match(tensors, options) is None:
        guard = planned.guard = guard_of(tensors, options)
        if guard is None:
            return
    _put_first(op, guard, planned.plan)


def _put_first(op: str, guard: Any, plan: Plan) -> None:
    """Make this plan, or family, the first of them that the next call of the op tries."""
    recent = [(guard, plan), *[x for x in _recent.get(op, ()) if x[1] is not plan]]
    plans = [x for x in recent if type(x[1]) is not Family]
    families = [x for x in recent if type(x[1]) is Family]
    # another thread may be reading the tuple, so it is replaced and not changed
    _recent[op] = (*plans[:MOST_RECENT], *families[:MOST_RECENT])


def recent(
    key: Callable[..., tuple[Any, ...]], hints: tuple[str, ...], beside: str | None = None
) -> Recent:
    """Where the plans are of the last calls of an operator whose key depends on its hints."""
    return Recent(_recent, key, hints, beside)


def given(tensors: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """The tensors, without those that are None."""
    return tuple([x for x in tensors if x is not None])


def kind_of(call: AttentionCall, make_kind: Callable[[AttentionCall], Any]) -> Any:
    """`make_kind(call)`, kept for all calls that differ from this one only in sizes: in numbers of
    queries, keys, sequences and pages, and in hints. The result must depend on none of these, and
    hold no tensor.
    """
    if is_traced():
        return make_kind(call)
    environs = environment.BATCH_INVARIANT, assumed()
    kinds = call.derived.get(environs)
    if kinds is None:
        kinds = call.derived[environs] = _kinds_like(call, environs)
    if make_kind not in kinds:
        kinds[make_kind] = make_kind(call)
    return kinds[make_kind]


def _kinds_like(call: AttentionCall, environs: tuple[Any, ...]) -> dict[Any, Any]:
    """`make_kind` -> what it returned, for calls that differ from this one only in sizes."""
    tensors = [_kind_of_tensor(name, x, call.batch) for name, x in call.given_tensors().items()]
    options = [getattr(call, name) for name in option_names("flash_varlen")]
    if (layout := call.layout) is not None:
        options += layout.q_block_size, layout.k_block_size
    key = *environs, call.q.device, *tensors, *options
    kinds = _kinds.get(key)
    if kinds is None:
        kinds = {}
        _kinds.put(key, kinds)
    return kinds


def _kind_of_tensor(name: str, x: Tensor, batch: int) -> tuple[Any, ...]:
    offset = x.data_ptr() & 15
    if name == "block_table":
        # of one column, kernels are their own: see `page_sizes.py`
        return name, offset, x.stride(1), x.shape[1] == 1
    is_by_token = name in BY_TOKEN and attention_call.is_by_token(x, batch)
    shape = x.shape[1:] if name in SIZED or is_by_token else x.shape
    return name, offset, x.dtype, shape, x.stride(), is_by_token


def described(tensors: tuple[Any, ...]) -> list[Any]:
    """Everything about tensors that a plan may depend on: all but values and addresses. Of an
    address, a plan may only depend on its distance from the last multiple of 16 bytes.
    """
    return [
        None if x is None else (x.dtype, x.device, x.shape, x.stride(), x.data_ptr() & 15)
        for x in tensors
    ]


def compiled_for(
    kernel: Any, pointers: tuple[Any, ...], options: dict[str, Any]
) -> tuple[Any, ...]:
    """What a kernel is compiled for. Triton looks at types, at which addresses are multiples of 16
    bytes, and at numbers: at how many bits they need, and whether they are 1 or multiples of 16
    unless the kernel says `do_not_specialize`.
    """
    varying = {param.name for param in kernel.params if param.do_not_specialize}
    given = {param.name for param in kernel.params if not param.is_constexpr} - varying
    numbers = [
        (n, _bits(x) if n in varying else _divisors(x) if n in given else _exactly(x))
        for n, x in options.items()
    ]
    return kernel, tuple([_kind(x) for x in pointers]), *numbers


def _kind(x: Any) -> Any:
    if isinstance(x, Tensor):
        return x.dtype, x.data_ptr() % 16 == 0
    if isinstance(x, tuple):
        return tuple([_kind(y) for y in x])
    return x if x is None else (x.base.dtype, tuple(x.block_shape), repr(x.layout))


def refuse_host(pointers: tuple[Any, ...]) -> None:
    """Raise for a tensor that no GPU can read, as Triton's own launcher does: the driver would read
    its address, after which no call of the process works. A GPU reads pinned memory of the host.
    """
    for x in pointers:
        if isinstance(x, tuple):
            refuse_host(x)
        elif isinstance(x, Tensor) and not (x.is_cuda or x.is_pinned()):
            raise ValueError(
                f"a kernel's launch: expected tensors on a GPU, got {tuple(x.shape)} on {x.device}"
            )


def _exactly(x: Any) -> Any:
    """A number or a tuple of numbers, with their types: 1, 1.0 and True are equal in Python, but
    kernels are compiled for each of them.
    """
    return x, tuple(map(type, x)) if isinstance(x, tuple) else type(x)


def _divisors(x: Any) -> Any:
    """What Triton compiles a kernel for of a number, or of the numbers of a group."""
    if isinstance(x, tuple):
        return tuple([_divisors(y) for y in x])
    return (_bits(x), x == 1, x % 16 == 0) if type(x) is int else type(x)


def _bits(x: Any) -> Any:
    if type(x) is not int:
        return _exactly(x)
    return 32 if -(2**31) <= x < 2**31 else 64 if x < 2**63 else "unsigned"


def _are_short(numbers: Iterable[int | None]) -> bool:
    """Whether all numbers have 32 bits."""
    given = [x for x in numbers if x is not None]
    return min(given) >= -(2**31) and max(given) < 2**31


class Launch:
    """`kernel[grid](*pointers, **options)` on the current device, as an object that is called with
    the pointers: tensors, None, tensor maps, and groups (nested tuples) of tensors and None. Once
    `is_ready`, `start` takes addresses in place of tensors, and nothing is looked up.
    """

    __slots__ = (
        *("_constants", "_device", "_noted", "_ready", "_start"),
        *("grid", "is_ready", "kernel", "options"),
    )

    def __init__(self, kernel: Any, grid: tuple[int, ...], **options: Any) -> None:
        self.kernel, self.options = kernel, options
        self.grid = (*grid, 1, 1)[:3]
        self.is_ready = False
        self._ready: ReadyKernel | None = None
        self._noted: Any = None  # what `note` gets
        self._constants: tuple[Any, ...] = ()
        self._start: Any = None

    def start(self, *addresses: Any) -> None:
        """Launch with addresses, None, and tuples of those."""
        self._start(current_stream(self._device), *addresses)

    @property
    def map_arguments(self) -> Callable[[int, Any, int], list[Any]]:
        """A function that returns what `start` takes for a tensor map: from the map's number among
        the kernel's, its boxes, and its address.
        """
        ready: Any = self._ready
        return ready.map_arguments

    def __call__(self, *pointers: Any) -> None:
        if self._ready is not None:
            self.start(*self._ready.addresses(pointers))
        elif is_traced():
            add_node(self.kernel, self.grid, pointers, self.options)
        elif IS_KNOWN and assumed() is None:
            self._make_ready(pointers)
        elif _note is None or _note(self._what_to_note(pointers)):
            self._through_triton(pointers)

    def _what_to_note(self, pointers: tuple[Any, ...]) -> Any:
        if self._noted is None:
            settle_key(self.kernel)  # before it is hashed: see `_make_ready`
            self._noted = compiled_for(self.kernel, pointers, self.options)
        return self._noted

    def resized(self, grid: tuple[int, ...], **sizes: Any) -> "Launch":
        """The same launch with another grid and other sizes, for whose values no kernel is
        compiled: it is ready if this one is. None for a size means that it stays the same.
        """
        launch = Launch(self.kernel, grid, **self.options | sizes)
        before = [self.options[name] for name in sizes]
        if (self.is_ready or self._noted) and _are_short(before) and _are_short(sizes.values()):
            launch._noted = self._noted
            if self.is_ready:
                launch._take(self._ready, len(self.kernel.arg_names) - len(self._constants))
        return launch

    def _take(self, ready: Any, num_pointers: int) -> None:
        names = self.kernel.arg_names[num_pointers:]
        self._constants = tuple([self.options[name] for name in names])
        self._start, self._device = ready.starter(self.grid, self._constants), ready.device
        # in this order, because another thread may be reading
        self._ready = ready
        self.is_ready = True

    def _through_triton(self, pointers: tuple[Any, ...]) -> Any:
        settle_key(self.kernel)
        with without_vector_flags, compiled_first():
            return self.kernel[self.grid](*pointers, **self.options)

    def _make_ready(self, pointers: tuple[Any, ...]) -> None:
        """Take a kernel from the cache, or let Triton find or compile one, and launch it."""
        refuse_host(pointers)
        settle_key(self.kernel)  # before it is hashed: a kernel's hash is that of its key
        key = current_device(), compiled_for(self.kernel, pointers, self.options)
        ready = _kernels.get(key)
        if ready is None:
            # a launch by Triton would need tensor maps that Triton has made
            with without_vector_flags, compiled_first():
                compiled = self.kernel.warmup(*pointers, grid=self.grid, **self.options)
            ready = ready_kernel(compiled, current_device())
            if ready is None:
                self._through_triton(pointers)
                return
            _kernels.put(key, ready)
        self._take(ready, len(pointers))
        self(*pointers)
