"""A repeated call goes past the dispatcher only where that would run the backend's kernel at once.

The GPU is one that is not there (benchmarks/gpu/no_gpu.py): results are whatever memory held.
"""

import contextlib
import functools
import sys
from pathlib import Path

import cross_compile
import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import torch_paged_attn
from torch_paged_attn.ops import repeated

# the benchmarks are scripts: they import one another as top-level modules
sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "gpu"))

import no_gpu

BF16 = torch.bfloat16
OP = "paged_attn::flash_varlen"


class Hits:
    """Calls in this process, and how many of them went past the dispatcher."""

    def __init__(self):
        no_gpu.pretend()
        self.count = 0
        self.q = torch.zeros(3, 4, 64, dtype=BF16)
        self.kv = torch.zeros(2, 24, 2, 16, 64, dtype=BF16)
        self.cu_seqlens = torch.arange(4, dtype=torch.int32)
        self.table = torch.arange(24, dtype=torch.int32).view(3, 8)
        self.used = torch.full((3,), 90, dtype=torch.int32)
        self.new = torch.zeros(2, 5, 2, 64, dtype=BF16)
        self.slots = torch.arange(5)
        self.cache = torch.zeros(2, 4, 2, 16, 64, dtype=BF16)
        self.attend()
        self.write()
        for name, found in repeated.REPEATED.items():
            repeated.REPEATED[name] = functools.partial(self._counted, found)

    def _counted(self, found, *given):
        results = found(*given)
        self.count += results is not NotImplemented
        return results

    def attend(self, q=None, **options):
        lengths = {"seqused_k": self.used, "block_table": self.table}
        q = self.q if q is None else q
        call = q, *self.kv, self.cu_seqlens, None, 1, 128
        return torch_paged_attn.flash_varlen(*call, **{"causal": True} | lengths | options)

    def write(self):
        torch_paged_attn.reshape_and_cache(*self.new, self.cache, self.slots)

    def of(self, call, *args, **options):
        """How many of two calls went past the dispatcher."""
        self.count = 0
        for _ in range(2):
            call(*args, **options)
        return self.count


class Seen(TorchDispatchMode):
    """Notes the operators that are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._schema.name)
        return function(*args, **kwargs or {})


class Subclass(torch.Tensor):
    """A tensor whose functions are its own, and notes how often they are called."""

    count = 0

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.count += "flash_varlen" in str(function)
        return super().__torch_function__(function, types, args, kwargs or {})


class Modes(TorchFunctionMode):
    """A function mode that changes nothing."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **kwargs or {})


def plain():
    """Modes in which the second call goes past the dispatcher, and those in which it does not."""
    hits = Hits()
    found = {}
    for mode in (torch.inference_mode, torch.no_grad, torch.enable_grad):
        with mode():
            hits.of(hits.attend)  # the guard is of this mode
            found[mode.__name__] = hits.of(hits.attend)
    found["defaults by name"] = hits.of(hits.attend, softcap=0, attn_bias=None, dropout_p=0.0)
    found["a number"] = hits.of(hits.attend, softmax_scale=0.5)
    found["other number"] = hits.of(hits.attend, softmax_scale=0.25)
    found["a tensor by name"] = hits.of(hits.attend, sinks=torch.zeros(4))
    with torch.no_grad():
        hits.attend()
        q = hits.q.clone().requires_grad_()
        hits.attend(q)
        found["requires grad, no_grad"] = hits.of(hits.attend, q)
    parameter = torch.nn.Parameter(hits.q.clone(), requires_grad=False)
    hits.attend(parameter)
    found["a parameter"] = hits.of(hits.attend, parameter)
    version = hits.cache._version
    found["write"] = hits.of(hits.write)
    found["versions of the cache"] = hits.cache._version - version
    return found


def by_the_dispatcher():
    """What a repeated call's mode, or its tensor, saw of the call; and how often it missed it."""
    hits = Hits()
    hits.of(hits.attend)
    found = {}

    def try_in(name, context, call=hits.attend):
        hits.count = 0
        with context:
            try:
                call()
                said = ""
            except Exception as error:
                said = type(error).__name__
        found[name] = hits.count, said

    seen = Seen()
    try_in("dispatch mode", seen)
    found["seen by the dispatch mode"] = OP in seen.names
    try_in("function mode", Modes())
    try_in("autocast", torch.autocast("cpu", BF16))
    own = hits.q.as_subclass(Subclass)
    for number in range(1, 4):
        try_in(f"subclass, call {number}", contextlib.nullcontext(), lambda: hits.attend(own))
    found["seen by the subclass"] = Subclass.count == 3
    q = hits.q.clone().requires_grad_()
    with torch.no_grad():
        hits.of(hits.attend, q)
    try_in("requires grad", contextlib.nullcontext(), lambda: hits.attend(q))
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(hits.q, torch.ones_like(hits.q))
        try_in("tangent", contextlib.nullcontext(), lambda: hits.attend(dual))
    batch = torch.stack([hits.q] * 2)
    vmapped = torch.func.vmap(lambda x: hits.attend(x)[0])
    try_in("vmap", contextlib.nullcontext(), lambda: vmapped(batch))
    try_in("grad", contextlib.nullcontext(), lambda: torch.func.vjp(hits.attend, hits.q))
    with torch.profiler.profile() as profile:
        try_in("profiler", contextlib.nullcontext())
    found["in the profile"] = any(OP in event.key for event in profile.key_averages())
    traced = torch.jit.trace(lambda x: hits.attend(x)[0], hits.q, check_trace=False)
    found["in the trace"] = OP in str(traced.graph)
    graphs = []

    def keep(graph, inputs):
        graphs.append(str(graph.code))
        return graph.forward

    compiled = torch.compile(lambda x: hits.attend(x)[0], backend=keep, fullgraph=True)
    try_in("compiled", contextlib.nullcontext(), lambda: compiled(hits.q))
    found["in the graph"] = len(graphs) == 1 and "flash_varlen" in graphs[0]
    try_in("unknown name", contextlib.nullcontext(), lambda: hits.attend(causl=True))
    try_in("negative hint", contextlib.nullcontext(), lambda: negative(hits))
    try_in("other heads", contextlib.nullcontext(), lambda: hits.attend(hits.q[:, :3]))
    return found


def negative(hits):
    call = hits.q, *hits.kv, hits.cu_seqlens, None, -1, 128
    torch_paged_attn.flash_varlen(*call, seqused_k=hits.used, block_table=hits.table, causal=True)


@pytest.fixture(scope="module")
def processes():
    """For each test one that no other has told of a GPU."""
    with cross_compile.workers(1) as process:
        yield process


def test_a_repeated_call_goes_past_the_dispatcher(processes):
    found = processes.submit(plain).result()
    wanted = dict.fromkeys(("inference_mode", "no_grad", "enable_grad", "defaults by name"), 2)
    wanted |= {"a number": 1, "other number": 1, "a tensor by name": 1, "a parameter": 2}
    assert found == wanted | {"requires grad, no_grad": 2, "write": 2, "versions of the cache": 2}


def test_modes_and_gradients_see_a_repeated_call(processes):
    found = processes.submit(by_the_dispatcher).result()
    for name, said in found.items():
        if isinstance(said, tuple):
            assert said[0] == 0, f"{name}: went past the dispatcher"
        else:
            assert said, name
    errors = {name: said[1] for name, said in found.items() if isinstance(said, tuple)}
    refused = {"tangent": "NotImplementedError", "unknown name": "TypeError"}
    refused |= dict.fromkeys(("negative hint", "other heads"), "ValueError")
    # there is no gradient of paged keys
    refused |= dict.fromkeys(("requires grad", "grad"), "NotImplementedError")
    assert {name: error for name, error in errors.items() if error} == refused
