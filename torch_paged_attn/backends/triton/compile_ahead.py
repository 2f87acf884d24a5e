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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.backends.driver import GPUDriver
from triton.runtime.driver import driver

from torch_paged_attn import environment
from torch_paged_attn.backends.triton import BACKEND
from torch_paged_attn.backends.triton.runtime import compiled_launchers, launch_cache
from torch_paged_attn.backends.triton.runtime.compiled import folders_for
from torch_paged_attn.backends.triton.runtime.compiled_folder import (
    MANIFEST,
    Folder,
    Unfit,
    difference,
    made_with,
    sources,
)
from torch_paged_attn.backends.triton.runtime.target import Target, assume, target_of

# what a kernel is loaded from: its description, and NVIDIA's or AMD's machine code
KEPT = ".json", ".cubin", ".hsaco"

# a function of a device that calls operators there, or returns functions that do, with `lines` of
# them if a few of a line show the kernels that all of them take; it can be pickled
Calls = Callable[[torch.device], "Sequence[Callable[[], None]] | None"]


class Answer(NamedTuple):
    """What a process found in a job: the indices of the calls for which it compiled a kernel, how
    many kernels these are, and what their launchers are built for."""

    calls: list[int]
    kernels: int
    launchers: list[Any]


class Failed(ValueError):
    """Processes that compile failed; the message has the first one's reason."""


class Job(NamedTuple):
    """Calls whose kernels are compiled, and what they are for: a text that differs if they do."""

    described: str
    make_calls: Calls


def compile_calls(make_calls: Calls, device: torch.device, num_processes: int) -> list[int]:
    """Compile the kernels of the calls for a device of this machine, by so many processes at once,
    each of which makes a share of the calls that `make_calls` returns. Returns the indices of some
    calls: they take all kernels that any of the calls takes. If a process fails, a warning says
    why, and its share is left to whoever needs it.
    """
    return _indices(_compile_here(make_calls, device, num_processes))


def compile_into(
    out: Path, jobs: list[Job], arch: str, multiprocessors: int, num_processes: int
) -> dict[str, int]:
    """Compile the kernels of the jobs' calls for a GPU that need not be here, into a folder for
    `PAGED_ATTN_KERNELS`. What is in the folder already stays. Returns how many kernels a job has,
    by its description.

    arch: `sm90`, `gfx942`

    Raises:
        compiled_folder.Unfit: the folder has kernels that were compiled with something else.
        Failed: a process failed.
    """
    target, gpu = Target.of_arch(arch, multiprocessors), gpu_of(arch)
    made = made_with(gpu)
    folder = Folder(out, made, {}, {}, [])
    if (out / MANIFEST).exists():
        folder = Folder.read(out)
        if (reason := difference(folder.made_with, made)) is not None:
            raise Unfit(reason)
    with tempfile.TemporaryDirectory() as cache:
        # the process's own cache may hold some of the kernels, but not which of them are needed
        environ = {"TRITON_CACHE_DIR": cache, "TRITON_STORE_BINARY_ONLY": "1"}
        environ["PAGED_ATTN_KERNELS"] = ""
        calls = [job.make_calls for job in jobs]
        answers, failed = _run_processes(calls, target, gpu, num_processes, environ)
        if failed:
            raise Failed(f"{len(failed)} of {num_processes} failed; the first: {failed[0]}")
        for group in Path(cache).glob("*/__grp__*.json"):
            if (key := group.parent.name) not in folder.kernels:
                files = sorted(x for x in group.parent.iterdir() if x != group)
                folder.add(key, [x for x in files if x.suffix in KEPT])
    kernels = {}
    for job, of_job in zip(jobs, zip(*answers, strict=True), strict=True):
        kernels[job.described] = sum(answer.kernels for answer in of_job)
        folder.calls[_digest(job.described, target)] = _indices(of_job)
        for signature in (x for answer in of_job for x in answer.launchers):
            if signature not in folder.launchers:
                folder.launchers.append(signature)
    folder.write()
    return kernels


def gpu_of(arch: str) -> GPUTarget:
    """A GPU by name (`sm90`, `gfx942`), as Triton describes it."""
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, 64 if arch.startswith("gfx9") else 32)
    return GPUTarget("cuda", int(arch[2:]), 32)


def _indices(answers: Sequence[Answer]) -> list[int]:
    return sorted({i for answer in answers for i in answer.calls})


def _compile_here(make_calls: Calls, device: torch.device, num_processes: int) -> list[Answer]:
    with torch.cuda.device(device):
        gpu = driver.active.get_current_target()
    environ = {"PAGED_ATTN_KERNELS": os.pathsep.join(map(str, environment.KERNELS))}
    answers, failed = _run_processes([make_calls], target_of(device), gpu, num_processes, environ)
    if failed:
        warnings.warn(
            f"warmup: {len(failed)} of {num_processes} processes that compile failed; what they"
            f" leave is compiled when it is called. The first said: {failed[0]}",
            stacklevel=4,
        )
    return [answer for (answer,) in answers]


def _run_processes(
    jobs: list[Calls], target: Target, gpu: GPUTarget, num_processes: int, environ: dict[str, str]
) -> tuple[list[list[Answer]], list[str]]:
    """What each process found in each job, and the last lines of the errors of failed ones."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.pt"
        torch.save((jobs, target, gpu), work)
        with ThreadPoolExecutor(num_processes) as pool:
            shares = [
                pool.submit(_run_process, work, index, num_processes, environ)
                for index in range(num_processes)
            ]
        results = [share.result() for share in shares]
    failed = [reason for reason, _ in results if reason]
    answers = [json.loads(answer) for reason, answer in results if not reason]
    return [[Answer(*of_job) for of_job in answer] for answer in answers], failed


def _run_process(work: Path, index: int, count: int, environ: dict[str, str]) -> tuple[str, str]:
    """The last line of a process's error if it failed, and of what it printed if not."""
    paths = os.pathsep.join(x for x in sys.path if x)
    changed = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    changed["OMP_NUM_THREADS"] = "1"  # threads of so many processes would wait for each other
    command = [sys.executable, "-m", __name__, str(work), str(index), str(count)]
    done = subprocess.run(
        command, env=os.environ | changed | environ, capture_output=True, text=True
    )
    if done.returncode == 0:
        return "", done.stdout.strip().rpartition("\n")[2]
    return done.stderr.strip().rpartition("\n")[2] or f"exit status {done.returncode}", ""


@dataclasses.dataclass
class Known:
    """The indices that `compile_calls` returned; None: it has not been called yet."""

    calls: list[int] | None


def _digest(described: str, target: Target) -> str:
    """A hash of what a warm-up is for, and of this very code."""
    told = sources(), described, str(target), triton.__version__, environment.BATCH_INVARIANT
    return hashlib.sha256(repr(told).encode()).hexdigest()


def compiled_elsewhere(described: str, device: torch.device) -> list[int] | None:
    """The indices that `compile_calls` would return for calls of this description, if a folder of
    compiled kernels has them and all kernels that they take; else None.
    """
    if not environment.KERNELS:
        return None
    with torch.cuda.device(device):
        gpu = driver.active.get_current_target()
    digest = _digest(described, target_of(device))
    return next((x.calls[digest] for x in folders_for(gpu) if digest in x.calls), None)


@contextlib.contextmanager
def remembered(described: str, device: torch.device) -> Iterator[Known]:
    """What was found for calls of this description by this very code, kept in Triton's cache or in
    a folder of compiled kernels."""
    if (calls := compiled_elsewhere(described, device)) is not None:
        yield Known(calls)
        return
    digest = _digest(described, target_of(device))
    path = Path(triton.knobs.cache.dir) / f"torch_paged_attn-{digest}.json"
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
        self.launchers: list[Any] = []
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
            compiled = compile_fn()
            if compiled_launchers.IS_NEEDED:
                self.launchers.append(compiled_launchers.signature_of(compiled))

    def note(self, what: Any) -> bool:
        """For `launch_cache.noting`: Triton has to see the first launch of a kernel alone."""
        is_new = what not in self._noted
        self.of_call.append(self._noted.setdefault(what, len(self._noted)))
        return is_new


def sample(line: range, taken: Callable[[int], Any]) -> None:
    """Make as many calls of a line as show all kernels that its calls take. `taken(i)` makes call i
    and returns what kernels that took. Where the ends of a part and its quarters take the same
    ones, the calls between are taken to do so, too.
    """
    found = functools.cache(taken)
    parts = [(line[0], line[-1])]
    while parts:
        first, last = parts.pop()
        middle = (first + last) // 2
        looked_at = first, (first + middle) // 2, middle, (middle + last) // 2, last
        if any(found(i) != found(first) for i in looked_at) and last - first > 1:
            parts += (first, middle), (middle, last)


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
) -> Answer:
    """Compile one process's share of the kernels. Of a list of calls it samples each `count`-th
    line."""
    driver.set_active(NoDriver(gpu))
    needed = []
    with assume(target), OnGPU(), Share(folder) as share:
        calls = make_calls(torch.device("cpu")) or []
        lines = getattr(calls, "lines", None) or [range(i, i + 1) for i in range(len(calls))]

        def taken(i: int) -> list[int]:
            before, share.of_call = share.taken, []
            calls[i]()
            if share.taken > before:
                needed.append(i)
            return share.of_call

        with torch.inference_mode(), launch_cache.noting(share.note):
            for line in lines[index::count]:
                sample(line, taken)
    return Answer(needed, share.taken, share.launchers)


if __name__ == "__main__":
    file, index, count = sys.argv[1:]
    jobs, target, gpu = torch.load(file, map_location="cpu", weights_only=False)
    answers = []
    for number, make_calls in enumerate(jobs):
        folder = Path(file).with_name(f"taken-{number}")
        folder.mkdir(exist_ok=True)
        share = compile_share(make_calls, target, gpu, folder, int(index), int(count))
        answers.append(share)
    print(json.dumps(answers))
