"""Kernels are right although LLVM pairs numbers of which one overflows: see `vector_flags.py`."""

import threading
import types

import cross_compile
import pytest
import torch
import triton

from torch_paged_attn.backends.triton.runtime import vector_flags
from torch_paged_attn.backends.triton.runtime.vector_flags import (
    drop_vector_flags,
    without_vector_flags,
)
from torch_paged_attn.testing import Problem, assert_accurate, build

knobs = triton.knobs

# found by fuzz.py on an H200: keys 0, 2, 4, 6 of each 64 were hidden from most rows
PAIRED = Problem(
    "paired",
    ((107, 0), (42, 0)),
    4,
    2,
    206,
    dtype=torch.bfloat16,
    alibi="heads",
    causal=False,
    tail=True,
)


def test_a_kernel_whose_columns_llvm_pairs(run, device):
    call = build(PAIRED)
    assert_accurate(*run(call.to(device)), call.truth())


def test_what_mixes_lanes():
    product = "mul.wide.u32 \t%rd1, %r9, 2147483648;"
    longer = "cvt.u64.u32 \t%rd1, %r8;"
    joined = "shl.b64 \t%rd2, %rd9, 33;\n\tor.b64 \t%rd3, %rd1, %rd2;\n\tmov.b64 \t{_, %r1}, %rd3;"
    assert cross_compile.mixes_lanes(f"\t{product}\n\t{joined}")
    assert not cross_compile.mixes_lanes(f"\t{longer}\n\t{joined}")


def test_flags_of_vectors_are_dropped_and_no_others():
    kept = """
  %1 = shl nuw nsw i32 %0, 1
  %2 = or disjoint i32 %1, 4, !dbg !7
  %3 = fadd fast <2 x float> %a, %b
  %4 = getelementptr inbounds nuw i8, ptr %p, i64 16
  %5 = icmp samesign ult i32 %1, 4
"""
    assert drop_vector_flags(kept) == kept
    flagged = {
        "  %1 = shl nuw nsw <2 x i32> %0, <i32 31, i32 1>": "shl <2 x i32> %0, <i32 31, i32 1>",
        "  %1 = or disjoint <4 x i32> %0, %2, !dbg !7": "or <4 x i32> %0, %2, !dbg !7",
        "  %1 = zext nneg <2 x i32> %0 to <2 x i64>": "zext <2 x i32> %0 to <2 x i64>",
        "  %1 = icmp samesign ult <2 x i32> %0, %2": "icmp ult <2 x i32> %0, %2",
    }
    for text, bare in flagged.items():
        assert drop_vector_flags(text) == f"  %1 = {bare}"


@pytest.fixture
def hook(monkeypatch):
    """Triton's hook as a user may have set it: it notes its calls."""
    calls = []

    def note(*arguments):
        calls.append(arguments)
        return None if arguments else ("the user's key", "the user's hash")

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", note)
    return types.SimpleNamespace(calls=calls, note=note)


def stages_for(maker):
    return {"llir": lambda source, metadata: f"  %1 = shl nuw <2 x i32> {source}", maker: None}


def test_the_hook_of_a_user_stays(hook):
    stages = stages_for("ptx")
    with without_vector_flags, without_vector_flags:
        ours = knobs.runtime.add_stages_inspection_hook
        ours(None, stages, None, None, None)
        key, _ = ours()
        assert "the user's key" in key and vector_flags.__name__ in key
    assert knobs.runtime.add_stages_inspection_hook is hook.note
    assert hook.calls == [(None, stages, None, None, None), ()]
    assert stages["llir"]("%0", {}) == "  %1 = shl <2 x i32> %0"


def test_code_for_amd_is_left_alone():
    stages = stages_for("amdgcn")
    with without_vector_flags:
        knobs.runtime.add_stages_inspection_hook(None, stages, None, None, None)
    assert stages["llir"]("%0", {}) == "  %1 = shl nuw <2 x i32> %0"


def test_threads_that_compile_at_the_same_time(hook):
    entered, may_leave = threading.Event(), threading.Event()

    def compile_slowly():
        with without_vector_flags:
            entered.set()
            may_leave.wait(30)

    other = threading.Thread(target=compile_slowly)
    with without_vector_flags:
        other.start()
        assert entered.wait(30)
    assert knobs.runtime.add_stages_inspection_hook is not hook.note
    may_leave.set()
    other.join(30)
    assert knobs.runtime.add_stages_inspection_hook is hook.note
