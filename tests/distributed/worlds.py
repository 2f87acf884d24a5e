"""Worlds of processes that run every case: `python worlds.py SIZES [NAME ...]`, as in `2,4 writes`.

One process imports everything and forks the others, which is most of what a world costs. They meet
by gloo. A case is a function `case_...(world)` of the modules in CASES; it asserts on every rank.
"""

import dataclasses
import datetime
import functools
import importlib
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.tensor
from torch import Tensor

CASES = (
    *("context_parallel_cases", "decode_cases", "selected_cases"),
    *("sharding_cases", "training_cases"),
)
SECONDS = 90
IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"


@dataclasses.dataclass(frozen=True)
class World:
    """This process among the others."""

    rank: int
    size: int

    def randn(self, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
        """The same numbers on every rank."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)

    def refuses(self, call: Callable[[], Any], error: type[Exception], *words: str) -> None:
        """All ranks raise `error`, whose text has the words, and go on."""
        try:
            call()
        except error as found:
            for word in words:
                assert word in str(found), f"no {word!r} in {found}"
        else:
            raise AssertionError(f"rank {self.rank} did not raise {error.__name__}")
        dist.barrier()


def cases_of(modules: list[Any], size: int, is_every: bool) -> dict[str, Callable[[World], None]]:
    """Cases by name; one may say `only_of(size)`, the others are there if `is_every`."""
    found = {}
    for module in modules:
        for name, case in vars(module).items():
            is_wanted = getattr(case, "size", size if is_every else None) == size
            if name.startswith("case_") and is_wanted:
                found[f"{module.__name__}.{name}"] = case
    return found


def only_of(size: int) -> Callable[[Any], Any]:
    """A case of worlds of one size."""

    def mark(case: Any) -> Any:
        case.size = size
        return case

    return mark


def run(rank: int, size: int, store: str, cases: dict[str, Callable[[World], None]]) -> int:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=SECONDS)
    init = functools.partial(dist.init_process_group, "gloo", init_method=f"file://{store}")
    init(rank=rank, world_size=size, timeout=timeout)
    for name, case in cases.items():
        start = time.perf_counter()
        try:
            case(World(rank, size))
        except BaseException:
            print(f"{name} failed on rank {rank} of {size}\n{traceback.format_exc()}", flush=True)
            return 1  # the others then fail as well
        if rank == 0:
            print(f"{time.perf_counter() - start:6.2f} s  {name}", flush=True)
    dist.destroy_process_group()
    return 0


def spawn(size: int, cases: dict[str, Callable[[World], None]]) -> list[int]:
    """The exit codes of a world that ran the cases."""
    children = []
    with tempfile.TemporaryDirectory() as folder:
        for rank in range(size):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = run(rank, size, f"{folder}/store", cases)
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            children.append(child)
        return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main() -> int:
    sizes, *wanted = sys.argv[1:]
    modules = [importlib.import_module(name) for name in CASES]
    failed = False
    sizes = [int(size) for size in sizes.split(",")]
    for size in sizes:
        # what a world of two would find is found by one of four, unless it says so
        is_every = IS_THOROUGH or bool(wanted) or size == max(sizes)
        cases = cases_of(modules, size, is_every)
        if wanted:
            cases = {name: x for name, x in cases.items() if any(w in name for w in wanted)}
        codes = spawn(size, cases)
        failed |= any(codes)
        said = codes if any(codes) else "all right"
        print(f"{len(cases)} cases on {size} processes: {said}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    sys.exit(main())
