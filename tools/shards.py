"""Run pytest in several processes at once: `python tools/shards.py [--processes N] ARGUMENTS...`

Every test that compiles a kernel waits for a compiler, so that one process takes minutes where
several take one. Needs pytest only. The tests are collected once and dealt out; at the end it says
what passed, what was skipped and why, and what failed, and fails if anything did, or if a test that
was collected has no result. A test that hangs costs the tests that its process had left, and shows
where each of its threads stands.
"""

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from xml.etree import ElementTree

# seconds; pytest then prints where the threads of a test are, and lets it go on
HANGS_AFTER = 150


def collect(arguments: list[str]) -> list[str]:
    """The tests that pytest finds with these arguments."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "--quiet", *arguments]
    found = subprocess.run(command, capture_output=True, text=True)
    if found.returncode != 0:
        raise SystemExit(found.stdout + found.stderr)
    lines = found.stdout.splitlines()
    print(lines[-1], flush=True)
    return [line for line in lines if "::" in line]


def results(report: Path, log: str) -> dict[str, list[str]]:
    """How the tests of one process ended: passed, skipped or failed, and the messages. A process
    that was stopped has left no report, but a line for each test that had ended.
    """
    ended = collections.defaultdict(list)
    if not report.exists():
        for name, outcome in re.findall(r"^(\S+::.+) (PASSED|SKIPPED|FAILED|ERROR)", log, re.M):
            ended["failed" if outcome == "ERROR" else outcome.lower()].append(name)
        return ended
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = next((x for x in case if x.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            ended["passed"].append(name)
        elif outcome.tag == "skipped":
            ended["skipped"].append(outcome.get("message", ""))
        else:
            message = outcome.get("message", "").splitlines() or [""]
            ended["failed"].append(f"{name}: {message[0][:200]}")
    return ended


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=max(1, (os.cpu_count() or 1) - 2))
    parser.add_argument("--seconds", type=float, default=1200, help="what runs longer has hung")
    options, arguments = parser.parse_known_args()
    deadline = time.monotonic() + options.seconds
    tests = collect(arguments)
    processes = min(options.processes, len(tests))
    ended: dict[str, list[str]] = collections.defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for i in range(processes):
            log, report = Path(folder, f"{i}.log"), Path(folder, f"{i}.xml")
            command = [sys.executable, "-u", "-m", "pytest", "--verbose", f"--junitxml={report}"]
            command += ["-o", f"faulthandler_timeout={HANGS_AFTER}", "-p", "no:cacheprovider"]
            command += ["--disable-warnings", *tests[i::processes]]
            with log.open("w") as output:
                process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            running.append((process, log, report))
        for process, log, report in running:
            try:
                status = process.wait(max(0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                status = process.wait()
            said = log.read_text()
            for outcome, names in results(report, said).items():
                ended[outcome] += names
            if status != 0:
                # without a report, the last test that it names had not ended
                print(said[-20000:], flush=True)
    for reason, count in collections.Counter(ended["skipped"]).most_common():
        print(f"skipped {count}: {reason}")
    for failure in ended["failed"]:
        print(f"failed {failure}")
    lost = len(tests) - sum(map(len, ended.values()))
    counts = {outcome: len(ended[outcome]) for outcome in ("passed", "skipped", "failed")}
    print(", ".join(f"{n} {what}" for what, n in (counts | {"without a result": lost}).items()))
    raise SystemExit(bool(ended["failed"] or lost))


if __name__ == "__main__":
    main()
