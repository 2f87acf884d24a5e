"""What the dispatcher asks of a backend: every one has it, and the first that can run answers."""

from pathlib import Path

import pytest

import torch_paged_attn
from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.ops import backend as protocol
from torch_paged_attn.ops._library import OPS

# ops that a backend has to have
EVERYWHERE = {"flash_varlen", "blocksparse", "merge_states"}
EVERYWHERE |= {"flash_varlen_out", "reshape_and_cache", "reshape_and_cache.split"}
FOLDER = Path(torch_paged_attn.__file__).parent / "backends"


class Fake(protocol.Backend):
    name = "fake"
    dispatch_keys = ("CUDA",)

    def __init__(self, reason):
        self.reason = reason

    def unsupported(self):
        return self.reason


def test_every_folder_is_listed():
    folders = {path.parent.name for path in FOLDER.glob("*/__init__.py")}
    assert folders == set(protocol.FOLDERS)
    assert [backend.name for backend in protocol.backends()] == list(protocol.FOLDERS)


@pytest.mark.parametrize("name", [name for name in protocol.FOLDERS if name != "cpu"])
def test_every_op_has_a_function(name):
    pytest.importorskip({"tpu": "jax", "triton": "triton", "neuron": "numpy"}[name])
    backend = next(backend for backend in protocol.backends() if backend.name == name)
    for op in OPS:
        if backend.has(op):
            assert callable(backend.function(op))
            continue
        assert op not in EVERYWHERE
        assert backend.path_of(op, None).kernel is None
        if op in ("flash_varlen_backward", "blocksparse_backward"):
            call = AttentionCall(op.removesuffix("_backward"), *[None] * 4)
            assert op in backend.unsupported_backward(call)
    assert all(isinstance(note, str) for note in backend.notes())


def test_first_that_can_run_answers(monkeypatch):
    able, unable, other = Fake(None), Fake("no chip"), Fake("no driver")
    monkeypatch.setattr(protocol, "backends", lambda: (unable, able, other))
    assert protocol.serving("CUDA") == (able, "")
    monkeypatch.setattr(protocol, "backends", lambda: (unable, other))
    assert protocol.serving("CUDA") == (None, "no chip; no driver")
    assert protocol.serving("XPU") == (None, "no backend for this device yet")


def test_defaults_are_those_of_one_opaque_node():
    assert not Fake.is_compiled and not Fake.checks_metadata
    assert Fake(None).traceable("flash_varlen") is None and Fake(None).notes() == []
