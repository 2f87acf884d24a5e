"""Backwards for tests of what stands before them."""

import functools
import warnings

import pytest
import torch

from torch_paged_attn import reference
from torch_paged_attn.backends.cpu import Cpu
from torch_paged_attn.ops import _library


@pytest.fixture
def no_backward(monkeypatch):
    """The CPU has no gradients."""
    monkeypatch.setattr(Cpu, "unsupported_backward", lambda self, call: "this test has none")


@pytest.fixture
def reference_backward(monkeypatch):
    """The CPU's gradients are the reference's: their names, in the order of their calls."""
    called = []
    monkeypatch.setattr(Cpu, "unsupported_backward", lambda self, call: None)

    def answer(name):
        def call(*args, **kwargs):
            called.append(name)
            return getattr(reference, name)(*args, **kwargs)

        return call

    with warnings.catch_warnings(), torch.library._scoped_library("paged_attn", "IMPL") as library:
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for name in ("flash_varlen_backward", "blocksparse_backward", "merge_states_backward"):
            answers = _library.GATES[name].wrapped(functools.partial(answer, name))
            library.impl(name, answers, "CPU", allow_override=True)
        yield called
