"""Which calls a repeat answers: those for which the dispatcher has nothing else to do."""

import contextlib

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from torch_paged_attn import environment, flash_varlen, merge_states, reshape_and_cache
from torch_paged_attn.ops import _repeat
from torch_paged_attn.ops._repeat import REPEATS, Repeat, repeatable

REPEATED = "by the repeat"


def states(tokens=3):
    return [
        torch.zeros(shape) for shape in ((tokens, 2, 4), (2, tokens), (tokens, 2, 4), (2, tokens))
    ]


def leave(op, tensors, options=None, result=REPEATED):
    """Leave what a GPU's backend would leave; its runs are noted."""
    runs = []

    def run(given, addresses):
        assert addresses == [x.data_ptr() for x in given]
        runs.append(given)
        return result

    assert repeatable(tensors)
    REPEATS.leave(op, Repeat(tensors, options or {}, run))
    return runs


@pytest.fixture(autouse=True)
def on_this_device(monkeypatch):
    """CPU tensors are where repeats are looked for."""
    monkeypatch.setattr(_repeat, "current_device", lambda: -1)
    yield
    REPEATS.clear()


def is_repeated(tensors):
    return merge_states(*tensors) is REPEATED


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_call_is_repeated_in_the_mode_it_was_left_in(mode):
    with mode():
        tensors = states()
        assert not is_repeated(tensors)
        runs = leave("merge_states", tuple(tensors))
        assert is_repeated(tensors) and is_repeated([x + 1 for x in tensors])
    assert len(runs) == 2 and torch.equal(runs[1][0], tensors[0] + 1)


class Subclass(torch.Tensor):
    pass


def misaligned(x):
    return torch.zeros(x.numel() + 1)[1:].view(x.shape)


OTHERS = {
    "size": lambda a, b, c, d: states(4),
    "dtype": lambda a, b, c, d: (a.bfloat16(), b, c.bfloat16(), d),
    "strides": lambda a, b, c, d: (a, b, torch.zeros(2, 3, 4).transpose(0, 1), d),
    "alignment": lambda a, b, c, d: (a, b, misaligned(c), d),
    "twice": lambda a, b, c, d: (a, b, a, d),
    "subclass": lambda a, b, c, d: (a.as_subclass(Subclass), b, c, d),
    "parameter": lambda a, b, c, d: (torch.nn.Parameter(a, requires_grad=False), b, c, d),
}


@pytest.mark.parametrize("other", OTHERS)
def test_other_tensors_go_to_the_dispatcher(other):
    tensors = states()
    leave("merge_states", tuple(tensors))
    if other != "twice":
        assert not is_repeated(OTHERS[other](*tensors))
    assert not repeatable(OTHERS["twice"](*tensors)) and not repeatable(
        (misaligned(tensors[0]), tensors[1])
    )
    assert is_repeated(tensors)


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


class Overriding(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@contextlib.contextmanager
def checked():
    environment.CHECK = True
    try:
        yield
    finally:
        environment.CHECK = False


MODES = {
    "dispatch mode": Watching,
    "function mode": Overriding,
    "default device": lambda: torch.device("cpu"),
    "forward-mode AD": forward_ad.dual_level,
    "profiler": lambda: torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]),
    "autocast": lambda: torch.autocast("cpu"),
    "another mode of autograd": torch.inference_mode,
    "PAGED_ATTN_CHECK": checked,
}


@pytest.mark.parametrize("mode", MODES)
def test_who_watches_or_changes_calls_sees_all_of_them(mode):
    tensors = states()
    leave("merge_states", tuple(tensors))
    with MODES[mode]():
        assert not is_repeated(tensors)
    assert is_repeated(tensors)


def test_transforms_see_all_calls():
    tensors = states()
    leave("merge_states", tuple(tensors))
    batched = torch.func.vmap(lambda a: merge_states(a, *tensors[1:])[0])(tensors[0][None])
    assert batched.shape == (1, 3, 2, 4)
    seen = []
    torch.func.functionalize(lambda *x: seen.append(is_repeated(x)))(*tensors)
    assert seen == [False]


def test_what_needs_a_gradient_is_neither_left_nor_repeated():
    tensors = states()
    leave("merge_states", tuple(tensors))
    tensors[0].requires_grad_()
    assert not repeatable(tuple(tensors))
    with torch.no_grad():
        assert not is_repeated(tensors)
    tensors[0].requires_grad_(False)
    assert is_repeated(tensors)


def test_a_compiled_graph_holds_the_op():
    tensors = states()
    leave("merge_states", tuple(tensors))
    compiled = torch.compile(lambda *x: merge_states(*x), backend="eager", fullgraph=True)
    assert compiled(*tensors)[0].shape == tensors[0].shape


def test_without_torch_compiles_guard_nothing_is_repeatable(monkeypatch):
    monkeypatch.setattr(_repeat, "_TensorGuards", None)
    assert not repeatable(tuple(states()))


def attention(**changes):
    q, kv, bounds = torch.zeros(3, 2, 8), torch.zeros(3, 1, 8), torch.tensor([0, 3]).int()
    return [q, kv, kv.clone(), bounds], {"causal": True} | changes


def test_attention_is_told_apart_by_options_and_tensors_by_name():
    args, options = attention()
    sinks = torch.zeros(2)
    given = *args, *(None,) * 5, sinks
    leave("flash_varlen", given, options)
    assert flash_varlen(*args, sinks=sinks, **options) is REPEATED
    assert flash_varlen(*args, max_seqlen_q=3, sinks=sinks, **options) is REPEATED
    for changed in ({"causal": False}, {"window_size_left": 1}):
        assert flash_varlen(*args, sinks=sinks, **options | changed) is not REPEATED
    assert flash_varlen(*args, **options) is not REPEATED
    with pytest.raises(ValueError, match="max_seqlen_q"):
        flash_varlen(*args, max_seqlen_q=-1, sinks=sinks, **options)


@pytest.mark.parametrize("is_pair", [False, True])
def test_a_repeated_write_counts_as_one(is_pair):
    new, slots = torch.zeros(2, 1, 8), torch.arange(2)
    cache, half = torch.zeros(2, 4, 1, 4, 8), torch.zeros(4, 1, 4, 8)
    kv_cache, op = (
        ((half, half.clone()), "reshape_and_cache.split")
        if is_pair
        else (cache, "reshape_and_cache")
    )
    caches = kv_cache if is_pair else (cache,)
    runs = leave(op, (new, new.clone(), *caches, slots), result=None)
    before = [x._version for x in caches]
    reshape_and_cache(new, new.clone(), kv_cache, slots)
    assert len(runs) == 1 and [x._version for x in caches] == [n + 1 for n in before]


def test_only_so_many_repeats_are_kept():
    several = [states(n) for n in range(1, _repeat.MOST + 2)]
    for tensors in several:
        leave("merge_states", tuple(tensors))
    assert [is_repeated(x) for x in several] == [False, *[True] * _repeat.MOST]
    REPEATS.clear()
    assert not is_repeated(several[-1])


def test_a_run_may_decline():
    tensors = states()
    leave("merge_states", tuple(tensors), result=NotImplemented)
    assert merge_states(*tensors)[0].shape == (3, 2, 4)
