"""Calls made again from what was noted of one like them: which ones, and with what they launch."""

import types

import pytest
import torch
from torch._C._dynamo import guards
from torch.utils._python_dispatch import TorchDispatchMode

from torch_paged_attn.backends.triton.runtime import launch as launch_module
from torch_paged_attn.backends.triton.runtime import playback, recipes
from torch_paged_attn.backends.triton.runtime.launch import Launch, Tape
from torch_paged_attn.backends.triton.runtime.recipes import UNKNOWN, play

STREAM = 7
COUNTERS, ROOM = torch.zeros(16), torch.zeros(128)


@pytest.fixture(autouse=True)
def cpu_for_gpu(monkeypatch):
    recipes.forget()
    driver = types.SimpleNamespace(
        active=types.SimpleNamespace(get_current_stream=lambda _: STREAM)
    )
    monkeypatch.setattr(playback, "driver", driver)
    monkeypatch.setattr(playback, "_start_of", lambda kernel: (kernel, (11,), lambda x, i: [x]))
    monkeypatch.setattr(playback, "shared_memory", lambda *_: (COUNTERS, ROOM))
    monkeypatch.setattr(guards, "_empty_strided_cuda", guards._empty_strided_cpu)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: None, raising=False)


class Kernel:
    """Stands for a compiled kernel: remembers what it was launched with."""

    arg_names = ("a", "b", "part", "work", "out", "none", "counters", "n", "BLOCK")

    def __init__(self):
        self.launches = []

    def __call__(self, *args):
        self.launches.append(args)


def call(tensors, kernel, part=None, launches=1, options=None):
    """Write a recipe for an op that reads a, b and the second half of b."""
    a, b = tensors[:2]
    out, work = torch.empty(3, 4), torch.empty(5)
    part = b[1] if part is None else part
    args = (a, b, part, work, out, None, COUNTERS, a.shape[0])
    tape = Tape([Launch(kernel, kernel, (2, 3), args, {"BLOCK": 64})] * launches, [work], COUNTERS)
    recipe = playback.write_out(tape, tensors, (out,))
    if recipe is not None:
        key = recipes._key("op", tensors, options or {})
        recipes._recipes.setdefault(key, []).insert(0, recipe)
    return recipe


def inputs():
    return torch.zeros(3, 4), torch.zeros(2, 8), None, torch.zeros(6)


@pytest.mark.parametrize("launches", [1, 2])
def test_launches_with_the_new_tensors_and_with_memory_of_its_own(launches):
    kernel, tensors = Kernel(), inputs()
    call(inputs(), kernel, launches=launches)
    (out,) = play("op", tensors, {})
    assert out.shape == (3, 4) and out.dtype == torch.float32
    assert len(kernel.launches) == launches
    for *front, a, b, part, work, result, nothing, counters, n, block in kernel.launches:
        assert front == [2, 3, 1, STREAM, 11]
        assert (a, b, part) == tuple(x.data_ptr() for x in (tensors[0], tensors[1], tensors[1][1]))
        # what must last from launch to launch is nobody else's
        assert (work == ROOM.data_ptr()) == (launches == 1)
        assert (result, counters) == (out.data_ptr(), COUNTERS.data_ptr())
        assert nothing is None and (n, block) == (3, 64)


def misaligned(x):
    return torch.zeros(x.numel() + 1)[1:].view(x.shape)


@pytest.mark.parametrize(
    "change",
    [
        lambda a, b, c, d: (a.double(), b, c, d),
        lambda a, b, c, d: (a, torch.zeros(8, 2).t(), c, d),
        lambda a, b, c, d: (a, b, c, torch.zeros(7)),
        lambda a, b, c, d: (a, b, d, c),
        lambda a, b, c, d: (a, b, torch.zeros(6), d),
        lambda a, b, c, d: (a, b, c, misaligned(d)),
        lambda a, b, c, d: (torch.nn.Parameter(a), b, c, d),
        lambda a, b, c, d: (a, b, c, d.requires_grad_()),
    ],
    ids=["dtype", "strides", "shape", "place", "one more", "alignment", "type", "requires_grad"],
)
def test_a_call_of_another_description_is_unknown(change):
    kernel = Kernel()
    call(inputs(), kernel)
    assert play("op", change(*inputs()), {}) is UNKNOWN
    assert play("op", inputs(), {"causal": True}) is UNKNOWN
    assert play("other", inputs(), {}) is UNKNOWN
    assert not kernel.launches
    assert play("op", inputs(), {}) is not UNKNOWN


def test_calls_that_take_turns_get_their_own_launches():
    kinds = [
        (inputs(), {}),
        (inputs(), {"causal": True}),
        ((torch.zeros(4, 4), *inputs()[1:]), {}),
        ((inputs()[0].double(), *inputs()[1:]), {}),
    ]
    kernels = [Kernel() for _ in kinds]
    for (tensors, options), kernel in zip(kinds, kernels, strict=True):
        call(tensors, kernel, options=options)
    for round in range(3):
        for (tensors, options), kernel in zip(kinds, kernels, strict=True):
            assert play("op", tensors, dict(options)) is not UNKNOWN
            assert play("op", tensors, dict(options)) is not UNKNOWN
            assert len(kernel.launches) == 2 * round + 2


def test_tensors_that_were_one_must_be_one_and_others_not():
    a, b = torch.zeros(3, 4), torch.zeros(2, 8)
    kernel = Kernel()
    call((a, b, b), kernel)
    assert play("op", (a, b, b.clone()), {}) is UNKNOWN
    assert play("op", (a, b, b), {}) is not UNKNOWN
    recipes.forget()
    call((a, b, b.clone()), kernel)
    assert play("op", (a, b, b), {}) is UNKNOWN


def test_tensors_at_one_address_must_stay_at_one():
    a = torch.zeros(3, 4)
    whole, other = torch.zeros(2, 16), torch.zeros(2, 16)
    kernel = Kernel()
    # a launch's pointer to the first is one to the third as well
    call((a, whole[:, :8], whole[:, :8].view(2, 8)), kernel, part=a)
    assert play("op", (a, whole[:, :8], other[:, :8]), {}) is UNKNOWN
    assert play("op", (a, other[:, :8], other[:, :8].view(2, 8)), {}) is not UNKNOWN


def test_a_pointer_of_unknown_origin_makes_no_recipe():
    assert call(inputs(), Kernel(), part=torch.zeros(9)) is None


def test_calls_under_a_mode_go_through_the_dispatcher():
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    call(inputs(), Kernel())
    tensors = inputs()
    with Watch():
        assert play("op", tensors, {}) is UNKNOWN
    with torch.autocast("cpu", torch.bfloat16):
        assert play("op", tensors, {}) is UNKNOWN
    seen = []
    torch.vmap(lambda x: seen.append(play("op", (x, *tensors[1:]), {})) or x)(torch.zeros(2, 3, 4))
    assert seen == [UNKNOWN]


def test_a_recipe_is_written_for_the_second_call_and_only_so_many_are_kept(monkeypatch):
    written = []
    monkeypatch.setattr(recipes, "MOST_ALIKE", 2)
    monkeypatch.setattr(recipes, "MOST_RECIPES", 6)
    monkeypatch.setattr(recipes, "write_out", lambda *args: written.append(args) or len)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def plan():
        launch_module.current_tape() and launch_module.current_tape().launches.append(None)

    tensors = inputs()
    for n in range(5):
        recipes.make(plan, "op", tensors, {})
        assert len(written) == n
    assert [len(alike) for alike in recipes._recipes.values()] == [2]
    recipes.make(plan, "op", tensors, {"causal": True})
    assert len(recipes._recipes) == 2
    recipes.make(plan, "other", tensors, {})
    assert len(recipes._recipes) == 1
