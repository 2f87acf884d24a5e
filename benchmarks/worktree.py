"""Another commit, built beside this one, and a process that times its calls for us.

Two versions of one operator library cannot live in one process. The other commit is checked out
into a temporary worktree and built there. `python worktree.py NAME THREADS` runs with that
checkout's package and this one's benchmark, and takes a sample for every line on its input.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from measure import Sample, Sampler, sampler

ROOT = Path(__file__).parents[1]


@contextlib.contextmanager
def built(ref: str) -> Iterator[Path]:
    """A checkout of `ref` with its CPU kernels built; gone afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "base"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--quiet", "--detach", str(checkout), ref], check=True)
        try:
            subprocess.run(
                [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"],
                cwd=checkout,
                env={**os.environ, "PAGED_ATTN_BUILD_CPP": "1"},
                check=True,
                stdout=subprocess.DEVNULL,
            )
            yield checkout
        finally:
            subprocess.run([*git, "remove", "--force", str(checkout)], check=True)


@contextlib.contextmanager
def remote_sampler(
    checkout: Path, name: str, threads: int, isa: str | None = None
) -> Iterator[Sampler]:
    """A sampler of benchmark `name` at `checkout`, on its best instruction set or on `isa`."""
    env = {key: value for key, value in os.environ.items() if key != "PAGED_ATTN_LIBRARY"}
    if isa is not None:
        env["PAGED_ATTN_CPU_ISA"] = isa
    command = [sys.executable, __file__, name, str(threads)]
    with subprocess.Popen(
        command,
        env={**env, "PYTHONPATH": str(checkout)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def sample(number: int) -> Sample:
            print(number, file=process.stdin, flush=True)
            return Sample(**json.loads(process.stdout.readline()))

        yield sample
        process.stdin.close()  # the worker ends with its input


def work(name: str, threads: int) -> None:
    """Answer every number on standard input with a sample of that many calls."""
    import torch
    from problems import BENCHMARKS
    from workloads import make

    torch.set_num_threads(threads)
    with torch.inference_mode():
        sample = sampler(make(BENCHMARKS[name]).run)
        for line in sys.stdin:
            taken = sample(int(line))
            print(json.dumps({"wall": taken.wall, "cpu": taken.cpu}), flush=True)


if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))
