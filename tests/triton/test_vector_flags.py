"""Kernels are right although LLVM pairs numbers of which one overflows: see `vector_flags.py`."""

import contextlib
import tempfile
import threading
import types
from unittest import mock

import cross_compile
import pytest
import torch
import triton
import triton.language as tl
from compiled_calls import attention

from torch_paged_attn.backends.triton.portable import key_loop
from torch_paged_attn.backends.triton.portable.attention_kernel import _attention_fwd_kernel
from torch_paged_attn.backends.triton.runtime import vector_flags
from torch_paged_attn.backends.triton.runtime.cache_key import settle_key
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


@triton.jit
def load_tail_by_columns(tail_rows, exists, j, keys, strides):
    """`load_tail` as it was: LLVM pairs the columns."""
    column = j - keys.tail_start
    has_column = exists & (column >= 0) & (j < keys.key_len) & (column < strides.tail_width)
    at = column.to(tl.int64) * strides.tail_key
    return (column < 0) | (tl.load(tail_rows + at, mask=has_column, other=0) != 0)


def compile_paired(keeps_flags, by_columns):
    """Whether its kernel for Hopper mixes lanes, compiled with the flags on vectors or without."""
    settle_key(_attention_fwd_kernel)  # by what it calls otherwise
    changes = [mock.patch.dict(cross_compile.CALLS, paired=lambda: attention(PAIRED))]
    if keeps_flags:
        changes.append(
            mock.patch.object(vector_flags, "drop_vector_flags", lambda llvm_ir: llvm_ir)
        )
    if by_columns:
        changes.append(mock.patch.object(key_loop, "load_tail", load_tail_by_columns))
    cache = knobs.cache.dir
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        knobs.cache.dir = stack.enter_context(tempfile.TemporaryDirectory())
        _attention_fwd_kernel.device_caches.clear()
        try:
            (kernel,) = cross_compile.compile_call("sm90", "paired")
        finally:
            knobs.cache.dir = cache
            _attention_fwd_kernel.device_caches.clear()
    return kernel.mixes_lanes


@pytest.mark.skipif(not cross_compile.IS_FITTED, reason="other LLVMs pair other numbers")
@pytest.mark.parametrize(
    "keeps_flags, by_columns, mixes",
    [
        pytest.param(True, True, True, marks=pytest.mark.device_suite),
        (False, True, False),
        pytest.param(True, False, False, marks=pytest.mark.device_suite),
    ],
)
def test_lanes_stay_apart_without_flags_or_columns(keeps_flags, by_columns, mixes, compiler):
    """Each of the two is enough."""
    assert compiler.submit(compile_paired, keeps_flags, by_columns).result() == mixes


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
