"""Seeded faults in the Neuron backend: each has to make a test fail.

    python tests/helpers/mutants.py [NAME ...]      (make thorough)

A fault (`faults/`) is one replacement in one file of a copy of the package. The tests that are to
see it run first, alone and with all their cases: they have to pass on a copy without faults. Where
they pass with it, every test of the backend runs, and the fault has survived if all do.
"""

import concurrent.futures
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from faults import FAULTS

ROOT = Path(__file__).parents[2]
SURVIVES = "SURVIVES"
EVERYTHING = ("tests/neuron", "tests/backends", "--backend", "neuron")


def passes(folder, tests):
    """Whether tests pass on the package in a folder. None that runs is an error.

    Of a few chosen by name all cases run, also those that a sample leaves out.
    """
    # -P: or the package of the working directory would be found first
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    given = os.environ.get("PYTHONPATH", "").split(":")
    others = [x for x in given if Path(x) not in (ROOT, Path())]
    path = ":".join([str(folder), str(ROOT / "tools"), *others])
    paths = {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    if tests != EVERYTHING:
        paths["HYPOTHESIS_PROFILE"] = "thorough"
    done = subprocess.run(command, cwd=ROOT, env=os.environ | paths, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(tests)}: {done.stdout[-500:]}{done.stderr[-500:]}")
    return done.returncode == 0


@contextlib.contextmanager
def copied():
    """A folder with a copy of the package."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "torch_paged_attn", Path(folder, "torch_paged_attn"))
        yield Path(folder)


def seed(folder, fault):
    """Put a fault into the copy in a folder."""
    file = folder / "torch_paged_attn/backends/neuron" / fault.file
    text = file.read_text()
    if text.count(fault.old) != 1:
        raise SystemExit(f"{fault.name}: {fault.file} has its text {text.count(fault.old)} times")
    file.write_text(text.replace(fault.old, fault.new))


def fate(fault):
    """What comes of a fault: caught by its own tests, by others of the backend's, or by none."""
    with copied() as folder:
        seed(folder, fault)
        if not passes(folder, fault.tests):
            return "caught"
        return SURVIVES if passes(folder, EVERYTHING) else "caught, but not by its own tests"


def passes_unharmed(tests):
    """Whether tests pass on a copy without a fault."""
    with copied() as folder:
        return passes(folder, tests)


def main(names):
    unknown = set(names) - {fault.name for fault in FAULTS}
    if unknown:
        raise SystemExit(f"no such fault: {', '.join(unknown)}")
    chosen = [fault for fault in FAULTS if not names or fault.name in names]
    # each is processes of their own, which the threads wait for
    with concurrent.futures.ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        suites = list(dict.fromkeys(fault.tests for fault in chosen))
        for tests, passed in zip(suites, pool.map(passes_unharmed, suites), strict=True):
            if not passed:
                raise SystemExit(f"{' '.join(tests)}: fails without a fault")
        survivors = 0
        for fault, found in zip(chosen, pool.map(fate, chosen), strict=True):
            print(f"{found}: {fault.name}", flush=True)
            survivors += found == SURVIVES
    sys.exit(survivors > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
