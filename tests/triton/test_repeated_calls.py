"""What launches are handed does not depend on the calls before: not when a call comes again, whose
plan has addresses alone, nor after a call of other sizes, with which it shares what it can.

The problems run on a Hopper GPU that is not there, nor is any other: instead of a launch, the
launcher's arguments are noted.
"""

import dataclasses

import compiled_calls
import cross_compile
import pytest
import torch
from covering import every_other
from dispatched import dispatched

from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.testing import EXTENDED, PROBLEMS, Problem, build

OP = "reshape_and_cache"

# numbers beyond it are addresses: the heap of some machines begins below 2**29
LEAST_ADDRESS = 1 << 26


class Launches:
    """Notes the launches of a process, of kernels that are never compiled."""

    def __init__(self):
        from triton.runtime.jit import JITFunction

        from torch_paged_attn.backends.triton.runtime import launch_cache, target

        self.noted = []
        chip = target.Target.of_arch("sm90", 132)
        target._of_gpu = lambda index: chip
        torch.cuda.current_device = lambda: 0
        launch_cache.IS_KNOWN = True
        launch_cache.refuse_host = lambda pointers: None  # they stay on the CPU
        launch_cache.current_device = lambda: 0
        launch_cache.current_stream = lambda device: 0
        launch_cache.ready_kernel = self.ready_kernel
        self.clear = launch_cache.clear
        JITFunction.warmup = lambda kernel, *args, grid, **options: kernel

    def ready_kernel(self, kernel, device):
        from torch_paged_attn.backends.triton.runtime.launcher import ReadyKernel

        def start(*args):
            self.noted.append((kernel.__name__, args))

        def describe_map(x, number):
            return [x.base.data_ptr(), number, *x.shape, *x.strides, *x.block_shape, str(x.layout)]

        return ReadyKernel(start, (), describe_map, device)

    def of(self, function, args, options):
        """What the launches of a call are handed, with addresses by the names of tensors."""
        self.noted.clear()
        results = function(*args, **options) or ()
        tensors = [x for x in args if isinstance(x, torch.Tensor)]
        halves = [x[1] for x in tensors if x.dim() == 5]
        names = {x.data_ptr(): f"tensor {i}" for i, x in enumerate((*tensors, *halves))}
        names |= {x.data_ptr(): f"result {i}" for i, x in enumerate(results)}
        return [(name, _named(handed, names)) for name, handed in self.noted]


def _named(x, names):
    if isinstance(x, tuple | list):
        return [_named(y, names) for y in x]
    if type(x) is int and x >= LEAST_ADDRESS:
        return names.get(x, "other memory")
    return repr(x)


def attention(problem):
    """The function that a problem calls, and what with."""
    from torch_paged_attn.backends.triton import BACKEND

    call = build(problem)
    return BACKEND.function(call.op), *dispatched(call.op, call.args)


def cache_write(write):
    """The same of a write into a cache, whose halves may come one by one."""
    from torch_paged_attn.backends.triton import BACKEND

    tokens, halves, scales = write
    key, value = torch.zeros(2, tokens, 2, 64, dtype=torch.bfloat16)
    cache = torch.zeros(2, 80, 2, 16, 64, dtype=torch.float8_e5m2 if scales else key.dtype)
    op, caches = ("reshape_and_cache.split", tuple(cache)) if halves else (OP, (cache,))
    args = key, value, *caches, torch.arange(tokens), *torch.ones(scales)
    return BACKEND.function(op), args, {}


def differences(make, pairs):
    """What differs, in words, for pairs of calls, in a process where Triton does not interpret: the
    first of a pair comes twice, and after the second. Each is made by `make` of what is given.
    """
    launches, found = Launches(), []
    for given, other in pairs:
        call = make(given)
        launches.clear()
        first, again = launches.of(*call), launches.of(*call)
        if not first or again != first:
            found.append(f"{given}, again: {again} after {first}")
        launches.clear()
        launches.of(*make(other))
        if (after := launches.of(*call)) != first:
            found.append(f"{given}, after another size: {after} instead of {first}")
    return found


def larger(problem):
    """The problem with one or two sequences more."""
    more = {"seqs": (*problem.seqs, *problem.seqs[:2])}
    if (at := problem.q_positions) is not None:
        more["q_positions"] = *at, *at[:2]
    return dataclasses.replace(problem, **more)


def model(*seqs, heads=4, **options):
    return Problem("model", seqs, heads, 2, 128, dtype=torch.bfloat16, **options)


# sizes that decide whether tiles are cut, in which order they come, and which form a launch has
MODELS = [
    (model((3000, 0)), model((1000, 0), (1000, 0), (1000, 0))),
    (model((3000, 0)), model((6000, 0))),
    (model((700, 2000), page_size=16), model((700, 0), page_size=16)),
    (model(*[(9, 600)] * 30, page_size=16), model(*[(9, 30)] * 30, page_size=16)),
    (model(*[(1, 600)] * 9, heads=8, page_size=16), model(*[(1, 600)] * 99, heads=8, page_size=16)),
    (model((300, 0), *[(1, 900)] * 9, page_size=16), model((300, 0), *[(1, 9)] * 99, page_size=16)),
]


# tokens of a write: of one launch, and of two; halves of a cache, and scales
WRITES = [
    ((tokens, halves, scales), (more, halves, scales))
    for tokens, more in ((8, 9), (8, 1200), (1200, 1250), (1200, 8))
    for halves in (False, True)
    for scales in (0, 1, 2)
]


@pytest.fixture(scope="module")
def faults():
    """`differences`, in one process for all tests: its start takes seconds."""
    with pytest.MonkeyPatch.context() as patch, cross_compile.workers(1) as process:
        patch.setenv("CUDA_VISIBLE_DEVICES", "")
        yield lambda make, pairs: process.submit(differences, make, pairs).result()


@pytest.mark.parametrize("part", every_other(range(4)))
def test_what_launches_are_handed_does_not_depend_on_the_calls_before(part, faults):
    everything = (PROBLEMS | compiled_calls.MORE | EXTENDED).values()
    problems = [x for x in everything if x.optional.isdisjoint(BACKEND.lacks)][part::4]
    assert faults(attention, [(x, larger(x)) for x in problems]) == []


def test_sizes_that_decide_have_launches_of_their_own(faults):
    assert faults(attention, [*MODELS, *[(b, a) for a, b in MODELS]]) == []


def test_cache_writes(faults):
    assert faults(cache_write, WRITES) == []
