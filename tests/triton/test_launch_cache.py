"""Which calls share a plan, which launches share a kernel, and what a ready kernel is handed."""

import functools
import types
import weakref

import compiled_calls
import cross_compile
import pytest
import torch
from torch.overrides import TorchFunctionMode

from torch_paged_attn import environment
from torch_paged_attn.backends.triton.runtime import guard, launch_cache, launcher, workspace
from torch_paged_attn.backends.triton.runtime.launch_cache import Launch, call
from torch_paged_attn.backends.triton.runtime.launcher import ReadyKernel
from torch_paged_attn.testing import Problem

STREAM = 7


def inputs():
    return torch.zeros(3, 4), torch.zeros(2, 8), None, torch.zeros(6)


class Plans:
    """Makes plans that answer with their number."""

    def __init__(self):
        self.made = 0

    def __call__(self, *tensors, **options):
        number = self.made = self.made + 1
        return lambda tensors, addresses: number

    def answer(self, tensors, op="op", **options):
        return call(op, self, tensors, options)


def misaligned(x):
    return torch.zeros(x.numel() + 1)[1:].view(x.shape)


OTHERS = {
    "dtype": lambda a, b, c, d: (a.double(), b, c, d),
    "strides": lambda a, b, c, d: (a, torch.zeros(8, 2).t(), c, d),
    "size": lambda a, b, c, d: (a, b, c, torch.zeros(7)),
    "place": lambda a, b, c, d: (a, b, d, c),
    "one more": lambda a, b, c, d: (a, b, torch.zeros(6), d),
    "alignment": lambda a, b, c, d: (a, b, c, misaligned(d)),
    "device": lambda a, b, c, d: (a, b, c, torch.zeros(6, device="meta")),
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("guarded", [True, False])
def test_other_tensors_get_a_plan_of_their_own(other, guarded, monkeypatch):
    if not guarded:
        monkeypatch.setattr(guard, "_TensorGuards", None)
    plans = Plans()
    for _ in range(3):
        assert plans.answer(inputs()) == 1
    for _ in range(3):
        assert plans.answer(OTHERS[other](*inputs())) == 2
        assert plans.answer(inputs()) == 1


def test_another_op_option_or_environment_gets_a_plan_of_its_own(monkeypatch):
    plans = Plans()
    for _ in range(3):
        assert plans.answer(inputs()) == 1
    assert plans.answer(inputs(), op="other") == 2
    assert plans.answer(inputs(), causal=True) == 3
    monkeypatch.setattr(environment, "BATCH_INVARIANT", True)
    assert plans.answer(inputs()) == 4
    monkeypatch.setattr(environment, "BATCH_INVARIANT", False)
    assert plans.answer(inputs()) == 1


def test_values_addresses_and_views_share_a_plan():
    plans, (a, b, c, d) = Plans(), inputs()
    plans.answer((a, b, c, d))
    plans.answer((a + 1, b, c, d))
    plans.answer((torch.nn.Parameter(a), b[:], c, d.clone()))
    assert plans.made == 1


class Watching(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **(kwargs or {}))


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "grad": torch.enable_grad,
    "default_device": lambda: torch.device("cpu"),
    "function_mode": Watching,
}


@pytest.mark.parametrize("mode", MODES)
def test_a_call_in_any_mode_shares_the_plan_and_no_mode_sees_the_look_up(mode):
    plans, tensors = Plans(), inputs()
    for _ in range(3):
        plans.answer(tensors)
    with MODES[mode]() as entered:
        for _ in range(3):
            assert plans.answer(tensors) == 1
    assert not getattr(entered, "seen", [])


def test_a_plan_that_cannot_be_made_leaves_nothing():
    def refuse(*tensors, **options):
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            call("op", refuse, inputs(), {})
    assert Plans().answer(inputs()) == 1


def test_a_plan_keeps_no_tensor_alive(kernels, device):
    out, lse = torch.zeros(5, 2, 64, device=device), torch.zeros(2, 5, device=device)
    key, cache = (torch.zeros(n, 2, 64, device=device) for n in (3, 8))
    cache = cache.view(2, 4, 1, 2, 64)
    cu_seqlens = torch.tensor([0, 3], device=device, dtype=torch.int32)
    for _ in range(3):
        kernels.merge_states(out, lse, out, lse)
        kernels.reshape_and_cache(key[:, :1], key[:, :1], cache, torch.arange(3, device=device))
        kernels.flash_varlen(key, key, key, cu_seqlens, None, 3, 3)
    held = [weakref.ref(x) for x in (out, lse, key, cache, cu_seqlens)]
    del out, lse, key, cache, cu_seqlens
    assert [x() for x in held] == [None] * 5


@pytest.mark.parametrize("batch", [0, 2])
def test_a_call_without_queries_has_empty_results(batch, kernels, device):
    q, kv = torch.zeros(0, 4, 64, device=device), torch.zeros(3, 2, 64, device=device)
    bounds = torch.zeros(batch + 1, device=device, dtype=torch.int32)
    for _ in range(2):
        out, lse = kernels.flash_varlen(q, kv, kv, bounds, bounds, 0, 0)
        assert out.shape == (0, 4, 64) and lse.shape == (4, 0)


def test_clear_drops_plans_and_kernels():
    plans = Plans()
    plans.answer(inputs())
    launch_cache.clear()
    assert plans.answer(inputs()) == 2


class Param:
    def __init__(self, name):
        self.name, self.do_not_specialize = name, name == "tokens"
        self.is_constexpr = name.isupper()


class Kernel:
    """Stands for a kernel: notes what is compiled, the launches that go through Triton, and the
    others."""

    arg_names = ("q", "group", "tokens", "heads", "BLOCK")
    params = tuple(map(Param, arg_names))

    def __init__(self):
        self.compiled, self.by_triton, self.by_launcher = [], [], []

    def __getitem__(self, grid):
        def run(*args, **options):
            self.by_triton.append((grid, args, options))
            return self

        return run

    def warmup(self, *args, grid, **options):
        self.compiled.append((grid, args, options))
        return self

    def ready(self, device):
        start = lambda *args: self.by_launcher.append(args)  # noqa: E731
        return ReadyKernel(start, ("fixed",), lambda x, i: [f"map {i} of {x.name}"], device)


@pytest.fixture
def known(monkeypatch):
    """Triton is the known one, and there is a GPU 0."""
    monkeypatch.setattr(launch_cache, "IS_KNOWN", True)
    monkeypatch.setattr(launch_cache, "refuse_host", lambda pointers: None)
    monkeypatch.setattr(launch_cache, "current_device", lambda: 0)
    monkeypatch.setattr(launch_cache, "current_stream", lambda device: STREAM + device)
    monkeypatch.setattr(launch_cache, "ready_kernel", Kernel.ready)


def some(kernel, tokens=5, heads=4, block=64):
    return Launch(kernel, (2, 3), tokens=tokens, heads=heads, BLOCK=block, num_warps=4)


def test_a_launch_is_compiled_by_triton_once_and_hands_over_addresses(known):
    kernel, q, k = Kernel(), torch.zeros(4), torch.zeros(4)
    launch = some(kernel)
    assert not launch.is_ready
    launch(q, (k, None))
    options = {"tokens": 5, "heads": 4, "BLOCK": 64, "num_warps": 4}
    assert kernel.compiled == [((2, 3, 1), (q, (k, None)), options)]
    assert launch.is_ready
    launch(k, (q, None))
    launch.start(11, (q.data_ptr(), None))
    fixed = 2, 3, 1, STREAM, "fixed"
    assert kernel.by_launcher == [
        (*fixed, q.data_ptr(), (k.data_ptr(), None), 5, 4, 64),
        (*fixed, k.data_ptr(), (q.data_ptr(), None), 5, 4, 64),
        (*fixed, 11, (q.data_ptr(), None), 5, 4, 64),
    ]
    assert len(kernel.compiled) == 1 and not kernel.by_triton


def test_a_tensor_of_the_host_is_refused_before_a_launch(known, monkeypatch):
    monkeypatch.undo()  # what lets the other tests give tensors of the host
    monkeypatch.setattr(launch_cache, "IS_KNOWN", True)
    kernel = Kernel()
    with pytest.raises(ValueError, match=r"expected tensors on a GPU, got \(4,\) on cpu"):
        some(kernel)(None, (torch.zeros(4), None))
    assert not kernel.compiled and not kernel.by_launcher
    # such as the flag by which `merge_remote` names a missing rank
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: True)
    launch_cache.refuse_host((None, (torch.zeros(4), None)))


def test_a_new_number_of_tokens_takes_the_kernel_that_is_there(known):
    kernel, q = Kernel(), torch.zeros(4)
    some(kernel)(q, (None,))
    some(kernel, tokens=6)(q, (None,))
    # such as the strides of a cache that is made anew for each token
    some(kernel, heads=7)(q, (None,))
    assert len(kernel.compiled) == 1
    assert [x[-3:] for x in kernel.by_launcher] == [(5, 4, 64), (6, 4, 64), (5, 7, 64)]


def off_by_four():
    return torch.zeros(5)[1:]


OTHER_LAUNCHES = {
    "one head": (lambda k: some(k, heads=1), lambda: torch.zeros(4)),
    "multiple of 16": (lambda k: some(k, heads=32), lambda: torch.zeros(4)),
    "block": (lambda k: some(k, block=32), lambda: torch.zeros(4)),
    "long": (lambda k: some(k, tokens=2**31), lambda: torch.zeros(4)),
    "dtype": (some, lambda: torch.zeros(4).half()),
    "alignment": (some, off_by_four),
    "none": (some, lambda: None),
    "device": (some, lambda: torch.zeros(4)),
}


@pytest.mark.parametrize("name", OTHER_LAUNCHES)
def test_what_a_kernel_is_compiled_for_is_the_key(name, known, monkeypatch):
    kernel = Kernel()
    some(kernel)(torch.zeros(4), (None,))
    if name == "device":
        monkeypatch.setattr(launch_cache, "current_device", lambda: 1)
    make, pointer = OTHER_LAUNCHES[name]
    make(kernel)(pointer(), (None,))
    assert len(kernel.compiled) == 2


@pytest.mark.parametrize("why", ["another Triton", "scratch memory"])
def test_every_launch_goes_through_triton_where_only_triton_knows_how(why, known, monkeypatch):
    if why == "another Triton":
        monkeypatch.setattr(launch_cache, "IS_KNOWN", False)
    monkeypatch.setattr(launch_cache, "ready_kernel", lambda compiled, device: None)
    kernel = Kernel()
    launch = some(kernel)
    for _ in range(3):
        launch(torch.zeros(4), (None,))
    assert len(kernel.by_triton) == 3 and not launch.is_ready


class Maps:
    def __init__(self, name):
        self.name = name

    def at(self, address):
        return f"{self.name} at {address}"


def test_a_tensor_map_is_described_once_and_only_so_many_are_kept(known, monkeypatch):
    monkeypatch.setattr(launcher, "MOST_MAPS", 2)
    described, a, b = [], Maps("a"), Maps("b")
    ready = ReadyKernel(print, (), lambda x, i: described.append((x, i)) or [x, i], 0)
    for number, boxes, address in ((0, a, 16), (1, b, 16), (0, a, 16), (0, a, 32), (1, b, 16)):
        found = ready.map_arguments(number, boxes, address)
        assert found == [f"{boxes.name} at {address}", number]
    assert described == [("a at 16", 0), ("b at 16", 1), ("a at 32", 0), ("b at 16", 1)]


def test_pointers_become_addresses_and_tensor_maps_arguments(known):
    x = torch.zeros(1)
    tensor_map = types.SimpleNamespace(base=x, block_shape=[8, 8], layout="swizzled")
    ready = ReadyKernel(print, (), lambda x, i: [f"map {i}"], 0)
    found = ready.addresses((tensor_map, None, x, (x, (None, x)), tensor_map))
    at = x.data_ptr()
    assert found == ["map 0", None, at, (at, (None, at)), "map 1"]


def test_a_tensor_map_fills_less_than_triton_knows():
    """Triton's own boxes, of powers of two, are loaded by columns."""
    tensor_map, description = types.SimpleNamespace(), {"block_size": [1, 64, 1, 64], "swizzle": 3}
    assert launcher.as_filled(description, tensor_map) is description
    launcher.fill_less(tensor_map, (1, 12, 5, 128))
    found = launcher.as_filled(description, tensor_map)
    assert found == {"block_size": [1, 12, 5, 64], "swizzle": 3}


def test_a_launch_of_other_sizes_is_ready_if_numbers_are_as_short(known):
    kernel, q = Kernel(), torch.zeros(4)
    launch = some(kernel)
    assert not launch.resized((4,), tokens=6).is_ready
    launch(q, (None,))
    resized = launch.resized((4,), tokens=6)
    resized.start(q.data_ptr(), (None,))
    started = (4, 1, 1, STREAM, "fixed", q.data_ptr(), (None,), 6, 4, 64)
    assert len(kernel.by_launcher) == 2 and kernel.by_launcher[1] == started
    assert not launch.resized((4,), tokens=2**31).is_ready


@pytest.mark.parametrize("shape", [(), (3,), (2, 0, 4), (5, 2, 8)])
def test_an_allocation_is_contiguous(shape):
    allocation = workspace.Allocation(shape, torch.bfloat16, torch.device("cpu"))
    assert allocation.strides == torch.empty(shape).stride()
    made = allocation()
    assert made.shape == shape and made.dtype == torch.bfloat16 and made.is_contiguous()
    assert made.isnan().all()  # filled: algorithms are deterministic in these tests


def launches(problems):
    """Of every launch on sm90 that is compiled ahead in tests, and of those of `problems`: our key
    and Triton's.
    """
    from triton.runtime.jit import JITFunction, compute_cache_key

    found = []
    run = JITFunction.run

    def note(kernel, *args, grid, warmup, **kwargs):
        *_, cache, _, _, bind = kernel.device_caches["sm90"]
        _, specialization, options = bind(*args, **kwargs, debug=False, instrumentation_mode="")
        own = launch_cache.compiled_for(kernel, args, kwargs)[1:]
        theirs = compute_cache_key(cache, specialization, options)
        found.append(((kernel.__name__, *own), theirs))

    JITFunction.run = note
    launch_cache.current_device = lambda: 0
    try:
        with cross_compile.elsewhere("sm90"):
            calls = [call() for call in compiled_calls.CALLS.values()]
            for call in (*calls, *map(compiled_calls.attention, problems)):
                call()
    finally:
        JITFunction.run = run
    return found


def test_launches_that_share_a_kernel_share_it_in_triton_and_sizes_share_one():
    """Lengths, pages and spare pages differ; decode is the portable kernel, prefill Hopper's."""
    model = functools.partial(Problem, "model", num_heads=8, num_kv_heads=2, head_dim=64)
    model = functools.partial(model, dtype=torch.bfloat16, page_size=16)
    decode = [
        model(((1, n), (1, n // 3), (1, 2)), spare_pages=spare)
        for n, spare in ((300, 0), (301, 1), (16 * 29, 16), (16 * 30 - 1, 1))
    ]
    prefill = [model(((n, 16000), (n, 0))) for n in (700, 701, 16 * 44)]
    with cross_compile.workers(1) as pool:
        found = pool.submit(launches, [*decode, *prefill]).result()
    theirs = {}
    for own, other in found:
        assert theirs.setdefault(own, other) == other, own[0]
    of_model = found[-len(decode) - 2 * len(prefill) :]
    assert len({own for own, _ in of_model}) == 3


class Resizing(Plans):
    """The same with a family: the first dimensions of all tensors follow from one number."""

    def __init__(self):
        super().__init__()
        self.resized = []

    def __call__(self, *tensors, **options):
        first = super().__call__(*tensors, **options)
        sizes = ("rows",) * sum(x is not None for x in tensors)
        return launch_cache.Resizable(first, sizes, self.resize)

    def resize(self, tensors):
        self.resized.append([len(x) for x in tensors])
        number = -len(self.resized)
        return lambda tensors, addresses: number


def rows(count, more=0):
    return torch.zeros(count, 4), None, torch.zeros(count + 1 + more, dtype=torch.int32)


needs_guards = pytest.mark.skipif(
    guard.library() is None, reason="families are found by guards in C"
)


@needs_guards
def test_a_size_of_a_family_is_planned_once():
    plans = Resizing()
    assert [plans.answer(rows(n)) for n in (3, 5, 5, 3, 6, 7, 8, 9, 5)] == [
        *(1, -1, -1, 1, -2, -3, -4, -5, -1)
    ]
    assert plans.resized == [[n, n + 1] for n in (5, 6, 7, 8, 9)] and plans.made == 1


APART = {
    "another distance": lambda: rows(5, more=1),
    "no rows": lambda: rows(0),
    "another width": lambda: (torch.zeros(5, 3), *rows(5)[1:]),
    "another dtype": lambda: (rows(5)[0].double(), *rows(5)[1:]),
    "another place": lambda: (rows(5)[0], rows(5)[2], None),
    "another alignment": lambda: (misaligned(rows(5)[0]), *rows(5)[1:]),
}


@needs_guards
@pytest.mark.parametrize("apart", APART)
def test_a_call_out_of_the_family_is_checked(apart):
    plans = Resizing()
    assert plans.answer(rows(3)) == 1
    assert plans.answer(APART[apart]()) == 2 and not plans.resized
    assert plans.answer(rows(4)) == -1
    assert plans.answer(rows(4), causal=True) == 3


@needs_guards
def test_an_invalid_call_of_other_sizes_raises_as_the_first_does(kernels, device):
    def attend(tokens, bounds, sequences):
        q, k = torch.zeros(tokens, 4, 64), torch.zeros(6, 2, 16, 64)
        bounds, used = torch.arange(bounds), torch.ones(sequences, dtype=torch.int32)
        table = torch.zeros(sequences, 3, dtype=torch.int32)
        given = [x.to(device) for x in (q, k, k.clone(), bounds.int())]
        return kernels.flash_varlen(*given, None, 1, 9, used.to(device), table.to(device))

    for n in (3, 4, 6):
        assert attend(n, n + 1, n)[0].shape == (n, 4, 64)
    with pytest.raises(ValueError, match=r"expected seqused_k to be \(batch\) = \(7,\)"):
        attend(7, 8, 5)
    assert attend(0, 1, 0)[0].shape == (0, 4, 64)
