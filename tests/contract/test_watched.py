"""`append_and_attend` skips torch's dispatcher in calls that nothing watches, and in no others."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_paged_attn.integrations._kvcache import _has_one_call
from torch_paged_attn.ops import append_and_attend
from torch_paged_attn.ops._watched import is_watched


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def in_a_mode(call):
    with Mode():
        return call()


def in_a_profile(call):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        return call()


def in_vmap(call):
    found = []
    torch.vmap(lambda x: (found.append(call()), x)[1])(torch.zeros(2))
    return found[0]


def in_grad(call):
    found = []
    torch.func.grad(lambda x: (found.append(call()), x.sum())[1])(torch.zeros(2))
    return found[0]


def in_a_trace(call):
    found = []
    torch.jit.trace(lambda x: (found.append(call()), x + 1)[1], torch.zeros(2), check_trace=False)
    return found[0]


WATCHED = in_a_mode, in_a_profile, in_vmap, in_grad, in_a_trace


@pytest.mark.parametrize("watched", WATCHED)
@pytest.mark.filterwarnings("ignore")
def test_watched_calls_are_known(watched):
    assert not is_watched()
    assert watched(is_watched)
    assert not is_watched()


def test_only_calls_that_nothing_watches_skip_the_dispatcher(monkeypatch):
    op = append_and_attend
    monkeypatch.setattr(op, "_on_gpu", lambda *args, **options: "called")
    call = lambda: op.append_and_attend(*[torch.zeros(1)] * 7)  # noqa: E731
    assert call() == "called"
    with pytest.raises(NotImplementedError, match=op.OP):  # the dispatcher's: no kernel for CPUs
        in_a_mode(call)


def test_a_lazily_negated_tensor_takes_the_general_way(monkeypatch):
    """The dispatcher resolves it; memory has the other sign."""
    from torch_paged_attn.integrations import _kvcache

    monkeypatch.setattr(_kvcache, "is_on_gpu", lambda x: True)
    plain = torch.zeros(4)
    negated = torch._neg_view(plain)
    assert _has_one_call((plain, plain)) and _has_one_call((plain,), (None, plain))
    assert not _has_one_call((plain, negated)) and not _has_one_call((plain,), (negated,))
