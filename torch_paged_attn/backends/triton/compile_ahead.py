"""Kernels are compiled by processes of their own, which fill Triton's cache on the disk.

Triton compiles in Python, so threads of one process wait for each other, and steps that an engine
serves meanwhile wait for them. A process that is started here has no GPU and takes none of its
memory: it makes the calls with tensors on the CPU, starts nothing, and compiles its share of the
kernels for the GPU that it is told of. Who makes the calls afterwards finds these in the cache.
"""

import contextlib
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.runtime.driver import driver

from torch_paged_attn import environment
from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.runtime import launch_cache
from torch_paged_attn.backends.triton.runtime.target import Target, assume, target_of

# a function of a device that calls operators there, or returns lines of calls that do
# (`_serving.Line`); it can be pickled
Calls = Callable[[torch.device], "list[Any] | None"]
# the numbers of a line and of a call in it
Place = tuple[int, int]


def compile_ahead(make_calls: Calls, device: torch.device, num_processes: int) -> None:
    """Compile the kernels of the calls for a device of this machine, by so many processes at once.
    If a process fails, a warning says why, and its share is left to whoever needs it.
    """
    _run_processes(make_calls, device, num_processes)


def compile_calls(make_calls: Calls, device: torch.device, num_processes: int) -> list[Place]:
    """The same for a function that returns lines of calls, of which each process samples a share.
    Returns the places of some calls: they take all kernels that any of the calls takes.
    """
    answers = _run_processes(make_calls, device, num_processes)
    return sorted({tuple(x) for answer in answers for x in json.loads(answer or "[]")})


def _run_processes(make_calls: Calls, device: torch.device, num_processes: int) -> list[str]:
    """The last lines that the processes printed."""
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
        results = [share.result() for share in shares]
    failed = [reason for reason, _ in results if reason]
    if failed:
        warnings.warn(
            f"warmup: {len(failed)} of {num_processes} processes that compile failed; what they"
            f" leave is compiled when it is called. The first said: {failed[0]}",
            stacklevel=4,
        )
    return [answer for _, answer in results]


def _run_process(work: Path, index: int, count: int) -> tuple[str, str]:
    """The last line of a process's error if it failed, and of what it printed if not."""
    paths = os.pathsep.join(x for x in sys.path if x)
    changed = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    changed["OMP_NUM_THREADS"] = "1"  # threads of so many processes would wait for each other
    command = [sys.executable, "-m", __name__, str(work), str(index), str(count)]
    done = subprocess.run(command, env=os.environ | changed, capture_output=True, text=True)
    if done.returncode == 0:
        return "", done.stdout.strip().rpartition("\n")[2]
    return done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}", ""


@dataclasses.dataclass
class Known:
    """The places that `compile_calls` returned; None: it has not been called yet."""

    calls: list[Place] | None


@contextlib.contextmanager
def remembered(described: str, device: torch.device) -> Iterator[Known]:
    """What was found for calls of this description by this very code, kept in Triton's cache."""
    code = hashlib.sha256()
    for file in sorted(Path(__file__).parent.rglob("*.[pj]*[yn]")):  # Python and JSON
        code.update(file.read_bytes())
    told = described, str(target_of(device)), triton.__version__, environment.BATCH_INVARIANT
    code.update(repr(told).encode())
    path = Path(triton.knobs.cache.dir) / f"torch_paged_attn-{code.hexdigest()}.json"
    known = Known(json.loads(path.read_text()) if path.exists() else None)
    is_new = known.calls is None
    yield known
    if is_new and known.calls:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(f".{os.getpid()}")
        beside.write_text(json.dumps(known.calls))
        beside.replace(path)


class Share(triton.AsyncCompileMode):
    """In this context Triton starts no kernel, and compiles those that no other process has taken:
    who takes one leaves a file in the folder that all of them share.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(executor=None)
        self.folder = folder
        self.found: set[str] = set()
        self.taken = 0
        # what kernels are compiled for, and those of a call
        self._noted: dict[Any, int] = {}
        self.of_call: list[int] = []

    def submit(self, key: str, compile_fn: Callable[[], Any], *_: Any) -> None:
        """Triton calls it for each launch of a kernel that it would compile, with functions for
        afterwards: one until Triton 3.8, then two."""
        if key not in self.found:
            self.found.add(key)
            try:
                (self.folder / hashlib.sha256(key.encode()).hexdigest()).touch(exist_ok=False)
            except FileExistsError:
                return
            self.taken += 1
            compile_fn()

    def note(self, what: Any) -> bool:
        """For `launch_cache.noting`: Triton has to see the first launch of a kernel alone."""
        is_new = what not in self._noted
        self.of_call.append(self._noted.setdefault(what, len(self._noted)))
        return is_new


class OnGPU(TorchDispatchMode):
    """In this context the package's operators take the kernels of GPUs, wherever tensors are."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # torch would import its compiler, which takes seconds, to keep it from this mode
        return False

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
    make_calls: Calls, target: Target, gpu: GPUTarget, folder: Path, index: int, count: int
) -> list[Place]:
    """Compile one process's share of the kernels. Of a list of lines it samples each `count`-th,
    and returns the places of the calls for which it compiled.
    """
    driver.set_active(NoDriver(gpu))
    needed = []
    with assume(target), OnGPU(), Share(folder) as share:
        lines = make_calls(torch.device("cpu")) or []

        def taken(line: int, i: int) -> list[int]:
            before, share.of_call = share.taken, []
            lines[line].call(lines[line].arguments[i])
            if share.taken > before:
                needed.append((line, i))
            return share.of_call

        with torch.inference_mode(), launch_cache.noting(share.note):
            for line in range(index, len(lines), count):
                lines[line].sampled(functools.partial(taken, line))
    return needed


if __name__ == "__main__":
    file, index, count = sys.argv[1:]
    calls, target, gpu = torch.load(file, map_location="cpu", weights_only=False)
    print(json.dumps(compile_share(calls, target, gpu, Path(file).parent, int(index), int(count))))
