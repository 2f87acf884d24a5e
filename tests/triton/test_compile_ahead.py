"""Processes that compile for a GPU without one."""

import contextlib
import functools
import sys
import threading
import types

import pytest
import torch
from triton.backends.compiler import GPUTarget

from torch_paged_attn import merge_states
from torch_paged_attn.backends.triton import compile_ahead
from torch_paged_attn.backends.triton.runtime.target import Target

CPU = torch.device("cpu")


def merge(dtypes, device):
    for dtype in dtypes:
        out = torch.zeros(3, 2, 64, dtype=dtype, device=device)
        lse = torch.zeros(2, 3, device=device)
        merge_states(out, lse, out, lse)


def refuse(device):
    raise ValueError(f"nothing to call on {device}")


@pytest.fixture
def hopper(monkeypatch, tmp_path):
    """This machine has such a GPU, as far as the process is asked that starts others."""
    active = types.SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32))
    monkeypatch.setattr(compile_ahead, "driver", types.SimpleNamespace(active=active))
    monkeypatch.setattr(compile_ahead, "target_of", lambda _: Target.of_arch("sm90", 132))
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def forked(programs, monkeypatch):
    """The processes are forks of one that has imported torch, one after the other: to start others
    takes seconds. test_compiled.py has them started."""

    def run(work, index, count, environ):
        command = [compile_ahead.__name__, str(work), str(index), str(count)]
        code = f"import runpy, sys; sys.argv = {command}; "
        code += f"runpy.run_module({compile_ahead.__name__!r}, run_name='__main__')"
        with at_a_time:
            status, out, errors = programs.end(code, *filter(None, sys.path), **environ)
        last = (errors if status else out).strip().rpartition("\n")[2]
        return (last, "") if status else ("", last)

    at_a_time = threading.Lock()
    monkeypatch.setattr(compile_ahead, "_run_process", run)


def test_each_kernel_once(hopper, forked):
    dtypes = torch.bfloat16, torch.float16, torch.bfloat16
    compile_ahead.compile_calls(functools.partial(merge, dtypes), CPU, 2)
    assert len(list(hopper.rglob("_merge_kernel.cubin"))) == 2


def test_failures_are_reported(hopper, forked):
    with pytest.warns(UserWarning, match=r"1 of 1 processes .* nothing to call on cpu"):
        compile_ahead.compile_calls(refuse, CPU, 1)


def two_calls(device):
    """Calls that take one of two kernels each."""
    return [functools.partial(merge, [x], device) for x in (torch.bfloat16, torch.float16)]


def test_a_call_that_takes_a_new_kernel_is_named(hopper, forked):
    assert compile_ahead.compile_calls(two_calls, CPU, 1) == [0, 1]
    assert len(list(hopper.rglob("_merge_kernel.cubin"))) == 2


def test_a_process_imports_no_compiler_of_torch(hopper, programs):
    """Torch would import it, for seconds, to keep it from a mode."""
    code = (
        "import sys, torch; from torch_paged_attn.backends.triton.compile_ahead import OnGPU\n"
        "with OnGPU(): torch.zeros(3)\n"
        "sys.exit('torch._dynamo.symbolic_convert' in sys.modules)"
    )
    programs.run(code, *filter(None, sys.path))
