"""What the TPU compiler makes of the kernels: bundles passed, DMAs and bytes; ours beside peers'.

    python benchmarks/tpu/run.py                               every problem, v5e, v6e and tpu7x
    python benchmarks/tpu/run.py --generations v6e --problems 'decode_*,mixed_*'
    python benchmarks/tpu/run.py --contenders 'RPA*'            some of those beside each other
    python benchmarks/tpu/run.py --write                       and JSON and plots under results/
    python benchmarks/tpu/run.py --budget                      and a new budget for tests/schedules

No TPU is needed: libtpu compiles ahead of time, and the schedules are executed by `emulator.py`,
which says what of this is exact and what is a model.
"""

import argparse
import dataclasses
import fnmatch
import importlib.metadata
import json
import subprocess
from pathlib import Path
from typing import Any

import jax
import picture
from contenders import BUDGET, BUDGETED, PROBLEMS, measure_best
from generations import GENERATIONS
from peers import Missing

RESULTS = Path(__file__).parents[1] / "results"
PACKAGES = ("jax", "jaxlib", "libtpu")


def _commit() -> str:
    """What is counted: the commit, "-dirty" if more differs from it than what a run writes."""

    def git(*command: str) -> str:
        run = subprocess.run(["git", *command], capture_output=True, text=True, cwd=RESULTS)
        run.check_returncode()
        return run.stdout.strip()

    code = ":/", ":(top,exclude)benchmarks/results", f":(exclude){BUDGET}"
    changed = git("status", "--porcelain", "--untracked-files=no", "--", *code)
    return git("rev-parse", "--short", "HEAD") + ("-dirty" if changed else "")


def _is_named(name: str, patterns: list[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--generations", default="v5e,v6e,tpu7x", help=", ".join(GENERATIONS))
    parser.add_argument("--problems", default="*", help="patterns of names, by commas")
    parser.add_argument("--contenders", default="*", help="patterns of names, by semicolons")
    parser.add_argument("--write", action="store_true", help="write results/tpu-<generation>/")
    parser.add_argument("--budget", action="store_true", help="what is counted is the new budget")
    options = parser.parse_args()
    commit = _commit()
    budget = json.loads(BUDGET.read_text()) if BUDGET.exists() else {}
    for generation in (GENERATIONS[name] for name in options.generations.split(",")):
        document: dict[str, Any] = {
            "generation": dataclasses.asdict(generation),
            "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
            "exact": "bundles, issued, dmas, hbm_bytes, dma_bytes, units, vmem_bytes",
            "modelled": "microseconds, hbm_microseconds",
        }
        rows = {}
        path = RESULTS / f"tpu-{generation.name}" / "schedules.json"
        if path.exists():
            rows = {row["problem"]: row for row in json.loads(path.read_text())["results"]}
            for row in rows.values():  # what is not run now stays as it was, with its commit
                of_row = row.pop("commit", None)
                for counts in row.values():
                    if isinstance(counts, dict) and of_row is not None:
                        counts.setdefault("commit", of_row)
        for problem in PROBLEMS:
            if not _is_named(problem.name, options.problems.split(",")):
                continue
            row: dict[str, Any] = rows.setdefault(problem.name, {})
            row |= {"problem": problem.name, "live_bytes": problem.live_bytes}
            for contender, builds in problem.contenders.items():
                if not _is_named(contender, options.contenders.split(";")):
                    continue
                try:
                    row[contender] = measure_best(builds, generation, problem.kernels)
                except Missing as reason:
                    row[contender] = {"missing": str(reason)}
                except jax.errors.JaxRuntimeError as error:
                    if contender.startswith("ours"):
                        raise
                    row[contender] = {"missing": str(error).splitlines()[0]}
                row[contender]["commit"] = commit
                if contender == "ours":
                    counted = {count: row["ours"][count] for count in BUDGETED}
                    budget.setdefault(generation.name, {})[problem.name] = counted
            print(picture.lines(row, generation), flush=True)
            if options.write:  # at once: a run takes long
                document["results"] = [rows[x.name] for x in PROBLEMS if x.name in rows]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(_compact(document))
        if options.write:
            picture.draw(json.loads(path.read_text()), path.with_suffix(".png"))
    if options.budget:
        BUDGET.write_text(json.dumps(budget, indent=1) + "\n")


def _compact(document: dict[str, Any]) -> str:
    """The document as JSON, a line to each problem."""
    rows = ",\n".join(json.dumps(row) for row in document["results"])
    head = json.dumps({name: value for name, value in document.items() if name != "results"})
    return f'{head[:-1]}, "results": [\n{rows}\n]}}\n'


if __name__ == "__main__":
    main()
