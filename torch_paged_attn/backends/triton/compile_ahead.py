"""Kernels are compiled by processes of their own, which fill Triton's cache on the disk.

Triton compiles in Python, so threads of one process wait for each other, and steps that an engine
serves meanwhile wait for them. A process that is started here has no GPU and takes none of its
memory: it makes the calls with tensors on the CPU, starts nothing, and compiles its share of the
kernels for the GPU that it is told of. Who makes the calls afterwards finds these in the cache.
"""

import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.runtime.driver import driver

from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.runtime.target import Target, assume, target_of

# a function of a device that calls operators there; it can be pickled
Calls = Callable[[torch.device], None]


def compile_ahead(make_calls: Calls, device: torch.device, num_processes: int) -> None:
    """Compile the kernels of the calls for a device of this machine, by so many processes at once.
    If a process fails, a warning says why, and its share is left to whoever needs it.
    """
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.pt"
        with torch.cuda.device(device):
            gpu = driver.active.get_current_target()
        torch.save((make_calls, target_of(device), gpu), work)
        with ThreadPoolExecutor(num_processes) as pool:
            shares = [
                pool.submit(_run_process, work, index, num_processes)
                for index in range(num_processes)
            ]
        failed = [reason for share in shares if (reason := share.result())]
    if failed:
        warnings.warn(
            f"warmup: {len(failed)} of {num_processes} processes that compile failed; what they"
            f" leave is compiled when it is called. The first said: {failed[0]}",
            stacklevel=3,
        )


def _run_process(work: Path, index: int, count: int) -> str:
    """The last line that a process said which failed; else nothing."""
    paths = os.pathsep.join(x for x in sys.path if x)
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    command = [sys.executable, "-m", __name__, str(work), str(index), str(count)]
    done = subprocess.run(command, env=os.environ | hidden, capture_output=True, text=True)
    if done.returncode == 0:
        return ""
    return done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}"


class Share(triton.AsyncCompileMode):
    """In this context Triton starts no kernel, and compiles the one at `index` of each `count`."""

    def __init__(self, index: int, count: int) -> None:
        super().__init__(executor=None)
        self.index, self.count = index, count
        self.found: set[str] = set()

    def submit(self, key: str, compile_fn: Callable[[], Any], finalize_fn: Any) -> None:
        """Triton calls it for each launch of a kernel that it would compile. All processes make the
        same calls, so they count alike.
        """
        if key not in self.found:
            self.found.add(key)
            if len(self.found) % self.count == self.index:
                compile_fn()


class OnGPU(TorchDispatchMode):
    """In this context the package's operators take the kernels of GPUs, wherever tensors are."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "paged_attn":
            func = BACKEND.function(func.name().partition("::")[2])
        return func(*args, **kwargs or {})


class NoDriver(GPUDriver):
    """Triton's driver of a GPU that is not there, which is asked for no more than its name."""

    def __init__(self, gpu: GPUTarget) -> None:
        self.get_current_target = lambda: gpu
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device: 0

    is_active: Any = None
    map_python_to_cpp_type: Any = None
    get_current_target: Any = None
    get_active_torch_device: Any = None
    get_benchmarker: Any = None


def compile_share(
    make_calls: Calls, target: Target, gpu: GPUTarget, index: int, count: int
) -> set[str]:
    """Compile one process's share of the kernels; the keys of all of them in Triton's cache."""
    driver.set_active(NoDriver(gpu))
    with assume(target), OnGPU(), Share(index, count) as share:
        make_calls(torch.device("cpu"))
    return share.found


if __name__ == "__main__":
    file, *numbers = sys.argv[1:]
    work = torch.load(file, map_location="cpu", weights_only=False)
    compile_share(*work, *map(int, numbers))
