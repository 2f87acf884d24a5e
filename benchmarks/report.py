"""Results as a table on the terminal, as markdown and as JSON, with the machine they are from."""

import dataclasses
import datetime
import json
import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import Timing
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
UNITS = {"read": "GB/s", "copy": "GB/s", "matmul": "GF/s"}


def git(*command: str) -> str:
    return subprocess.run(
        ["git", "-C", str(ROOT), *command], capture_output=True, text=True
    ).stdout.strip()


def describe_machine() -> dict[str, Any]:
    """What the figures depend on, and what a stranger would ask first."""
    cpu = {}
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        cpu = {
            key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)
        }
    flags = set(cpu.get("flags", "").split())
    notable = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16")
    return {
        "cpu": cpu.get("model name", platform.processor()),
        "family_model_stepping": [cpu.get(k) for k in ("cpu family", "model", "stepping")],
        "cores": os.cpu_count(),
        "flags": [flag for flag in notable if flag in flags],
        "instruction_set": torch.ops.paged_attn.cpu_isa(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "huge_pages": os.environ.get("THP_MEM_ALLOC_ENABLE", "0") == "1",
        "load_before": round(os.getloadavg()[0], 1),
        "date": datetime.date.today().isoformat(),
        "commit": git("rev-parse", "--short=12", "HEAD"),
        "modified": bool(
            git("status", "--porcelain", "--", "csrc", "torch_paged_attn", "setup.py")
        ),
    }


def new_document(base: str | None) -> dict[str, Any]:
    """What is written, shown and drawn; no results yet."""
    commit = base and git("rev-parse", "--short=12", base)
    return {"machine": describe_machine(), "base": commit, "results": []}


def extend(document: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Add the rows of one problem."""
    document["results"] += rows
    document["machine"]["load_after"] = round(os.getloadavg()[0], 1)


def plain(timing: Timing) -> dict[str, Any]:
    """A timing as JSON, to four digits."""
    exact = dataclasses.asdict(timing) | {"seconds": timing.seconds, "busy": timing.busy}
    return {
        key: float(f"{value:.4g}") if isinstance(value, float) else value
        for key, value in exact.items()
    }


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def write(path: Path, document: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1) + "\n")


def rate(row: dict[str, Any], contender: str = "ours") -> float:
    """Work per second; a ceiling's own work for the ceiling."""
    ceiling = row["ceiling"]
    work = ceiling["work"] if ceiling and ceiling["name"] == contender else row["work"]
    return work / row["timings"][contender]["seconds"]


def peers(row: dict[str, Any]) -> list[str]:
    """Contenders that are neither us nor the ceiling."""
    ceiling = row["ceiling"] and row["ceiling"]["name"]
    return [name for name in row["timings"] if name not in ("ours", ceiling)]


def speedup(row: dict[str, Any], peer: str) -> float:
    """How many times as long the peer takes."""
    return row["timings"][peer]["seconds"] / row["timings"]["ours"]["seconds"]


def of_ceiling(row: dict[str, Any], contender: str = "ours") -> float | None:
    """Share of the ceiling's rate in the same run; None without a ceiling."""
    return rate(row, contender) / rate(row, row["ceiling"]["name"]) if row["ceiling"] else None


def one_line(rows: list[dict[str, Any]]) -> list[str]:
    """What is worth saying as soon as a problem has been measured."""
    if "refused" in rows[0]:
        return [rows[0]["problem"], "refused:", rows[0]["refused"]]
    times = (f"{row['threads']}T {duration(row)}" for row in rows)
    return [rows[0]["problem"], *times]


def duration(row: dict[str, Any]) -> str:
    """Our time; ~ when somebody else used the cores."""
    ours = row["timings"]["ours"]
    seconds, mark = ours["seconds"], "~" if ours["busy"] else ""
    return mark + (f"{seconds * 1e6:.3g} µs" if seconds < 1e-4 else f"{seconds * 1e3:.3g} ms")


def columns(document: dict[str, Any]) -> list[str]:
    """The table's columns; peers in order of first appearance."""
    rows = [row for row in document["results"] if "timings" in row]
    names = dict.fromkeys(name for row in rows for name in peers(row))
    return ["problem", "threads", "time", "rate", "of ceiling", *names]


def cells(document: dict[str, Any]) -> Iterator[list[str]]:
    """The table's rows as text; what was measured on a busy machine stays out of ratios."""
    names = columns(document)[5:]
    for row in document["results"]:
        if "refused" in row:
            yield [row["problem"], "", "not timed", *("" for _ in names), "", ""]
            continue
        timings, threads = row["timings"], str(row["threads"])
        if timings["ours"]["busy"]:
            yield [row["problem"], threads, duration(row), *("" for _ in names), "", ""]
            continue
        ceiling = row["ceiling"] and row["ceiling"]["name"]
        quiet = {name for name, timing in timings.items() if not timing["busy"]}
        yield [
            row["problem"],
            threads,
            duration(row),
            f"{rate(row) / 1e9:.3g} {UNITS[row['bound']]}" if ceiling else "",
            f"{of_ceiling(row):.0%}" if ceiling in quiet else "",
            *(f"{speedup(row, name):.2f}x" if name in quiet else "" for name in names),
        ]


LEGEND = (
    "Peers: how many times as long they take. Time: with one thread the smallest CPU time of"
    " interleaved samples; with more the median wall time, ~ if others used the cores. Ceilings, of"
    " the same run: a plain read of the keys and values, torch.matmul, a plain copy."
)


def print_table(console: Console, document: dict[str, Any]) -> None:
    machine = document["machine"]
    title = f"{machine['cpu']}, {machine['instruction_set']}, torch {machine['torch']}"
    table = Table(title=f"{title}, {machine['commit']}", caption=LEGEND)
    for i, column in enumerate(columns(document)):
        table.add_column(column, justify="right" if i else "left", no_wrap=i != 1)
    for row in cells(document):
        table.add_row(*row)
    console.print(table)
    for row in document["results"]:
        if "refused" in row:
            console.print(f"{row['problem']}: not timed, {row['refused']}", style="red")


def markdown(document: dict[str, Any]) -> str:
    """The table as it stands in the README."""
    header = columns(document)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *cells(document)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n\n" + LEGEND
