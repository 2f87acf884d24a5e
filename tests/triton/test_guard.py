"""What the guard and the repeated calls in C refuse, and what they hand to a plan.

No GPU is needed: tensors are on the CPU, plans are functions of the tests, and the operator is one
of the tests'. `test_past_the_dispatcher.py` has the modes of torch, with the package's operators.
"""

import contextlib
import gc
import sys
import weakref

import pytest
import torch
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

from torch_paged_attn import environment
from torch_paged_attn.backends.triton.runtime import target
from torch_paged_attn.backends.triton.runtime.guard import guard_of, narrowed, unsupported
from torch_paged_attn.ops import repeated

pytestmark = pytest.mark.skipif(
    repeated.library() is None, reason="built beside the CPU kernels, where Python's headers are"
)

OPTIONS = {"causal": True, "softmax_scale": 0.5}


def inputs():
    return torch.zeros(3, 4), None, torch.zeros(2, 8), torch.arange(6)


def off_by_four(x):
    return torch.zeros(x.numel() + 1, dtype=x.dtype)[1:].view(x.shape)


class Subclass(torch.Tensor):
    pass


def changed(number, make):
    def change(tensors):
        found = list(tensors)
        found[number] = make(found[number])
        return tuple(found)

    return change


ALIKE = {
    "the same": lambda x: x,
    "values": changed(0, lambda x: x + 1),
    "addresses": changed(3, torch.clone),
    "a view": changed(2, lambda x: x[:]),
}
OTHERS = {
    "dtype": changed(0, torch.Tensor.double),
    "integers": changed(3, torch.Tensor.int),
    "size": changed(3, lambda x: torch.arange(7)),
    "more dimensions": changed(0, lambda x: x[None]),
    "strides": changed(2, lambda x: torch.zeros(8, 2).t()),
    "device": changed(2, lambda x: x.to("meta")),
    "alignment": changed(2, off_by_four),
    "requires grad": changed(0, lambda x: x.clone().requires_grad_()),
    "subclass": changed(0, lambda x: x.as_subclass(Subclass)),
    "conjugate": changed(0, lambda x: torch.zeros(3, 4, dtype=torch.complex64).conj()),
    "no tensor": changed(0, lambda x: 5),
    "a list": changed(0, lambda x: [x]),
    "one missing": changed(2, lambda x: None),
    "one more": changed(1, lambda x: torch.zeros(4)),
    "another place": lambda x: (x[0], x[2], None, x[3]),
    "fewer": lambda x: x[:3],
    "more": lambda x: (*x, None),
    "inference": changed(0, lambda x: of_inference()),
}


def of_inference():
    with torch.inference_mode():
        return torch.zeros(3, 4)


@pytest.mark.parametrize("name", ALIKE)
def test_a_guard_matches_what_differs_in_values_and_addresses(name):
    guard = guard_of(inputs(), OPTIONS)
    tensors = ALIKE[name](inputs())
    given, addresses = guard.match(tensors, dict(OPTIONS))
    expected = [x for x in tensors if x is not None]
    assert type(given) is tuple and len(given) == 3
    assert all(a is b for a, b in zip(given, expected, strict=True))
    assert addresses == [x.data_ptr() for x in expected]


@pytest.mark.parametrize("name", OTHERS)
def test_a_guard_refuses_other_tensors(name):
    guard = guard_of(inputs(), OPTIONS)
    assert guard.match(OTHERS[name](inputs()), OPTIONS) is None
    assert guard.match(inputs(), OPTIONS) is not None


@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, OPTIONS | {"causal": False}, OPTIONS | {"softcap": 1.0}]
)
def test_a_guard_refuses_other_options(options):
    assert guard_of(inputs(), OPTIONS).match(inputs(), options) is None
    assert guard_of(inputs(), options).match(inputs(), OPTIONS) is None


def test_a_guard_refuses_other_surroundings(monkeypatch):
    guard = guard_of(inputs(), {})
    with monkeypatch.context() as patch:
        patch.setattr(environment, "BATCH_INVARIANT", True)
        assert guard.match(inputs(), {}) is None
    with target.assume(target.Target.of_arch("sm90", 132)):
        assert guard.match(inputs(), {}) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert guard.match(inputs(), {}) is None
    assert guard.match(inputs(), {}) is not None


def test_no_guard_is_made_for_what_none_can_match():
    a, _, b, c = inputs()
    assert unsupported((a, None, b, off_by_four(c))) is not None
    assert unsupported((a, None, b, a)) is not None
    assert guard_of((a, None, a), {}) is None and unsupported((a, None, b, c)) is None


def test_a_guard_raises_what_a_check_raises():
    def refuse(*tensors):
        raise KeyError("no")

    make = repeated.library().Guard
    guard = make(refuse, torch.Tensor.data_ptr, (True,), {}, (), None, -1, True, False)
    with pytest.raises(KeyError):
        guard.match((torch.zeros(4),), {})


def test_a_guard_goes_by_the_current_device():
    for current, is_matched in ((3, True), (2, False)):
        make = repeated.library().Guard
        given = torch.Tensor.data_ptr, (True,), {}, (), lambda at=current: at, 3, True, False
        found = make(lambda *x: True, *given).match((torch.zeros(4),), {})
        assert (found is not None) == is_matched


@pytest.fixture(scope="module")
def operator():
    """An operator with arguments of all kinds, and its library."""
    library = torch.library.Library("guards_of_tests", "FRAGMENT")
    library.define(
        "op(Tensor q, Tensor(a!) k, Tensor lengths, SymInt most_q, SymInt most_k,"
        " Tensor? table=None, Tensor? bias=None, *, float? scale=None, bool causal=False,"
        " SymInt window=-1, ScalarType? dtype=None) -> ()"
    )
    yield torch.ops.guards_of_tests.op.default
    library._destroy()


class Calls:
    """The repeated calls of the operator, whose plans answer with what they get."""

    def __init__(self, operator, written=()):
        self.plans, self.asked = {}, []
        recent = repeated.Recent(self.plans, self.key, ("most_q", "most_k"), "table")
        repeated.remember(operator, recent, written)
        self.call = repeated.REPEATED.pop("guards_of_tests::op")

    def key(self, *given):
        self.asked.append(given)
        return f"of {given[1] // 100}", None

    def add(self, tensors, options=None, key="of 1"):
        plan = lambda given, addresses: (given, addresses)  # noqa: E731
        guard = guard_of(tensors, options or {})
        self.plans[key] = ((guard, plan), *self.plans.get(key, ()))

    def given(self, *args, **options):
        found = self.call(args, options)
        return found if found is NotImplemented else found[0]


Q, K, LENGTHS, TABLE, BIAS = (torch.zeros(n, 4) for n in range(2, 7))
# (arguments by position, by name) -> the tensors and the options of the guard that has to match
FORMS = [
    ((Q, K, LENGTHS, 1, 128), {}, (Q, K, LENGTHS), {}),
    ((Q, K, LENGTHS, 1, 128, None, None), {}, (Q, K, LENGTHS), {}),
    ((Q, K, LENGTHS, 1, 128, None, BIAS), {}, (Q, K, LENGTHS, None, BIAS), {}),
    ((Q, K, LENGTHS, 1, 128), {"bias": BIAS}, (Q, K, LENGTHS, None, BIAS), {}),
    ((Q, K, LENGTHS, 1, 128), {"bias": BIAS, "table": TABLE}, (Q, K, LENGTHS, TABLE, BIAS), {}),
    ((Q, K, LENGTHS, 1, 128, TABLE), {"bias": None}, (Q, K, LENGTHS, TABLE), {}),
    ((Q, K, LENGTHS, 1, 128), {"unknown": None}, (Q, K, LENGTHS), {}),
    ((Q, K, LENGTHS, 1, 128), {"scale": None, "causal": False, "window": -1}, (Q, K, LENGTHS), {}),
    ((Q, K, LENGTHS, 1, 128), {"scale": 2}, (Q, K, LENGTHS), {"scale": 2.0}),
    ((Q, K, LENGTHS, 1, 128), {"causal": True}, (Q, K, LENGTHS), {"causal": True}),
    ((Q, K, LENGTHS, 1, 128), {"dtype": torch.half}, (Q, K, LENGTHS), {"dtype": torch.half}),
]
TO_THE_DISPATCHER = [
    ((Q, K, LENGTHS, 1, 228), {}),  # another key
    ((Q, K, LENGTHS, -1, 128), {}),
    ((Q, K, LENGTHS, True, 128), {}),
    ((Q, K, LENGTHS, 1, 128.0), {}),
    ((Q, K, LENGTHS, 1, None), {}),
    ((Q, K, LENGTHS), {}),
    ((Q, K), {}),
    ((), {}),
    ((Q, K, LENGTHS, 1, 128), {"q": Q}),  # by position, too
    ((Q, K, LENGTHS, 1, 128, TABLE), {"table": TABLE}),
    ((Q, K, LENGTHS, 1, 128), {"unknown": 1}),
    ((Q, K, LENGTHS, 1, 128), {"causal": 1}),
    ((Q, K, LENGTHS, 1, 128), {"window": 5.0}),
    ((Q, K, LENGTHS, 1, 128), {"scale": torch.tensor(1.0)}),
    ((Q, K, LENGTHS, 1, 128), {"scale": 0.5}),
    ((Q, LENGTHS, K, 1, 128), {}),
    ((Q,) * 80, {}),
]


@pytest.mark.parametrize("args, options, tensors, named", FORMS)
def test_arguments_reach_a_plan_as_a_kernel_gets_them(args, options, tensors, named, operator):
    calls = Calls(operator)
    assert calls.given(*args, **options) is NotImplemented
    calls.add(tensors, named)
    given = calls.given(*args, **options)
    expected = [x for x in tensors if x is not None]
    assert len(given) == len(expected)
    assert all(a is b for a, b in zip(given, expected, strict=True))
    assert calls.asked[-1] == (1, 128, len(tensors) > 3 and tensors[3] is not None)


@pytest.mark.parametrize("args, options", TO_THE_DISPATCHER)
def test_other_calls_are_left_to_the_dispatcher(args, options, operator):
    calls = Calls(operator)
    calls.add((Q, K, LENGTHS))
    assert calls.given(*args, **options) is NotImplemented
    assert calls.given(Q, K, LENGTHS, 1, 128) is not NotImplemented


class Mode(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


MODES = {
    "forward AD": forward_ad.dual_level,
    "profiler": torch.autograd.profiler.profile,
    "function mode": Mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_that_sees_calls_leaves_them_to_the_dispatcher(mode, operator):
    calls = Calls(operator)
    calls.add((Q, K, LENGTHS))
    with MODES[mode]():
        assert calls.given(Q, K, LENGTHS, 1, 128) is NotImplemented
    for plain in (torch.no_grad, torch.enable_grad, contextlib.nullcontext):
        with plain():
            assert calls.given(Q, K, LENGTHS, 1, 128) is not NotImplemented


def test_a_call_that_autograd_records_is_left_to_the_dispatcher(operator):
    calls, q = Calls(operator), Q.clone().requires_grad_()
    calls.add((q, K, LENGTHS))
    assert calls.given(q, K, LENGTHS, 1, 128) is NotImplemented
    with torch.no_grad():
        assert calls.given(q, K, LENGTHS, 1, 128) is not NotImplemented


def test_a_subclass_is_left_to_the_dispatcher(operator):
    calls, q = Calls(operator), Q.as_subclass(Subclass)
    calls.add((q, K, LENGTHS))
    assert calls.given(q, K, LENGTHS, 1, 128) is NotImplemented
    parameter = torch.nn.Parameter(Q, requires_grad=False)
    calls.add((parameter, K, LENGTHS))
    assert calls.given(parameter, K, LENGTHS, 1, 128) is not NotImplemented


def test_the_latest_plan_is_tried_first_and_all_are(operator):
    calls = Calls(operator)
    for tensors in ((Q, K, LENGTHS), (Q, K, LENGTHS, None, BIAS), (K, Q, LENGTHS)):
        calls.add(tensors)
    for tensors in ((Q, K), (K, Q)):
        given = calls.given(*tensors, LENGTHS, 1, 128)
        assert given[0] is tensors[0] and given[1] is tensors[1]


def test_a_write_counts_a_version_unless_the_tensor_has_none(operator):
    calls, k = Calls(operator, (1,)), K.clone()
    calls.add((Q, k, LENGTHS))
    before = k._version
    for _ in range(2):
        assert calls.given(Q, k, LENGTHS, 1, 128) is not NotImplemented
    assert k._version == before + 2
    assert calls.given(Q, K, Q, 1, 128) is NotImplemented and k._version == before + 2
    with torch.inference_mode():
        tensors = Q.clone(), K.clone(), LENGTHS.clone()
        calls.add(tensors)
        assert calls.given(*tensors, 1, 128) is not NotImplemented


def test_what_a_plan_or_a_key_raises_is_raised(operator):
    def refuse(*given):
        raise ValueError("no")

    calls = Calls(operator)
    calls.plans["of 1"] = ((guard_of((Q, K, LENGTHS), {}), refuse),)
    recent = repeated.Recent(calls.plans, refuse, ("most_q", "most_k"))
    repeated.remember(operator, recent)
    for call in (calls.call, repeated.REPEATED.pop("guards_of_tests::op")):
        with pytest.raises(ValueError, match="no"):
            call((Q, K, LENGTHS, 1, 128), {})


def test_a_call_keeps_nothing_alive(operator):
    calls = Calls(operator, (1,))
    tensors = tuple(torch.zeros(n, 4) for n in (2, 3, 4))
    calls.add(tensors)
    for _ in range(50):
        calls.given(*tensors, 1, 128, scale=None)
        calls.given(*tensors, 1, 128, scale=0.5)
        calls.given(*tensors, 1, 228)
        calls.given(*tensors[::-1], 1, 128)
    # the tuple, the name of the loop, and the argument of getrefcount
    counts = [sys.getrefcount(x) for x in tensors]
    assert max(counts) <= 4
    held = [weakref.ref(x) for x in tensors]
    del tensors
    gc.collect()
    assert [x() for x in held] == [None] * 3


def test_a_guard_of_a_family_lets_first_dimensions_differ():
    tensors, sizes = inputs(), frozenset((0, 2))
    family = guard_of(tensors, OPTIONS, sizes)
    others = torch.zeros(5, 4), None, tensors[2], torch.arange(9)
    given, _ = family.match(others, OPTIONS)
    assert len(given) == 3 and given[0] is others[0]
    assert family.match(changed(2, lambda x: torch.zeros(3, 8))(others), OPTIONS) is None
    assert family.match(changed(0, lambda x: torch.zeros(5, 3))(others), OPTIONS) is None
    narrow = narrowed(family, given)
    assert narrow.match(others, OPTIONS) is not None and narrow.match(others, {}) is None
    assert narrow.match(tensors, OPTIONS) is None
    del family  # what it holds is the other's, too
    assert narrow.match(others, OPTIONS) is not None
