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
from measure import MIN_ROUNDS, Timing
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
TITLES = {
    "read": "Decode, bound by reading the keys and values",
    "matmul": "Prefill, mixed batches and block-sparse, bound by matrix products",
    "backward": "Training, bound by matrix products",
    "copy": "Cache writes, bound by a copy",
    "call": "Overhead of a call",
}
UNITS = {"read": "GB/s", "copy": "GB/s", "matmul": "GF/s", "backward": "GF/s"}
# what a section's rates are a share of
SHARES = {bound: bound for bound in UNITS} | {"backward": "matmul"}


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


FORCED = " forced (ours)"  # ends the name of a contender: ours on another instruction set
NEVER_SLOWER = 0.97  # the least share of the best instruction set's speed that the default may have


def of_best_isa(row: dict[str, Any]) -> float | None:
    """The default's speed as a share of the fastest instruction set's; None if none was timed.

    All in processes of their own: where memory lies differs from the one with the peers.
    """
    timings = row.get("timings", {})
    times = [timing["seconds"] for name, timing in timings.items() if name.endswith(FORCED)]
    return min(times) / timings[row["isa"] + FORCED]["seconds"] if times else None


def slower_by_default(document: dict[str, Any]) -> list[str]:
    """A line for every row in which another instruction set would have been faster."""
    shares = [(row, of_best_isa(row)) for row in document["results"]]
    return [
        f"{row['problem']}, {row['threads']} threads: {share:.2f} of the best instruction set"
        for row, share in shares
        if share is not None and share < NEVER_SLOWER and not row["timings"]["ours"]["busy"]
    ]


def of_one_thread(row: dict[str, Any], rows: list[dict[str, Any]]) -> float | None:
    """How many times as fast as one thread, both in wall time; None unless both were quiet."""
    for one in rows:
        if one["problem"] == row["problem"] and one.get("threads") == 1 < row.get("threads", 1):
            pair = one["timings"]["ours"], row["timings"]["ours"]
            quiet = all(timing["undisturbed"] >= MIN_ROUNDS for timing in pair)
            return pair[0]["wall"] / pair[1]["wall"] if quiet else None
    return None


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


def sections(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The rows by what bounds them."""
    rows = document["results"]
    grouped = {bound: [row for row in rows if row["bound"] == bound] for bound in TITLES}
    return {bound: rows for bound, rows in grouped.items() if rows}


def columns(rows: list[dict[str, Any]]) -> list[str]:
    """A section's columns; peers in order of first appearance."""
    names = dict.fromkeys(name for row in rows if "timings" in row for name in peers(row))
    bound = rows[0]["bound"]
    share = ["rate", f"of {SHARES[bound]}"] if bound in UNITS else []
    if any(of_one_thread(row, rows) for row in rows):
        share.append("of one thread")
    if any(of_best_isa(row) for row in rows):
        share.append("of best ISA")
    return ["problem", "threads", "time", *share, *names]


def cells(rows: list[dict[str, Any]]) -> Iterator[list[str]]:
    """A section's rows as text; what was measured on a busy machine stays out of ratios."""
    header = columns(rows)
    for row in rows:
        if "refused" in row:
            yield [row["problem"], "", "refused", *("" for _ in header[3:])]
            continue
        timings, ceiling = row["timings"], row["ceiling"] and row["ceiling"]["name"]
        texts = {"problem": row["problem"], "threads": str(row["threads"]), "time": duration(row)}
        quiet = {name for name, timing in timings.items() if not timing["busy"]}
        if "ours" in quiet:
            texts |= {name: f"{speedup(row, name):.2f}x" for name in quiet}
            if ceiling in quiet:
                texts["rate"] = f"{rate(row) / 1e9:.3g} {UNITS[row['bound']]}"
                texts[f"of {SHARES[row['bound']]}"] = f"{of_ceiling(row):.0%}"
        if scaling := of_one_thread(row, rows):
            texts["of one thread"] = f"{scaling:.2f}x"
        if share := of_best_isa(row):
            texts["of best ISA"] = f"{share:.2f}x"
        yield [texts.get(column, "") for column in header]


LEGEND = (
    "Peers: how many times as long they take. Time: with one thread the smallest CPU time of"
    " interleaved samples; with more the median wall time, ~ if others used the cores. read, matmul"
    " and copy are plain torch operations on as many bytes or of the same dtype, in the same run."
    " Of one thread: how many times as fast, median wall times both. Of best ISA: our speed by that"
    " of the fastest instruction set that was forced; below 0.97 the report fails."
)


def print_tables(console: Console, document: dict[str, Any]) -> None:
    machine = document["machine"]
    about = f"{machine['cpu']}, {machine['instruction_set']}, torch {machine['torch']}"
    console.print(f"\n{about}, commit {machine['commit']}")
    for bound, rows in sections(document).items():
        table = Table(title=TITLES[bound], title_justify="left", title_style="bold")
        for i, column in enumerate(columns(rows)):
            table.add_column(column, justify="right" if i else "left", no_wrap=i != 1)
        for row in cells(rows):
            table.add_row(*row)
        console.print(table)
        for row in rows:
            if "refused" in row:
                console.print(f"{row['problem']} is not timed: {row['refused']}", style="red")
    console.print(LEGEND, style="dim")


def markdown(document: dict[str, Any]) -> str:
    """The tables as they stand on the page beside the results."""
    lines = []
    for bound, rows in sections(document).items():
        header = columns(rows)
        table = [header, ["---", *["---:"] * (len(header) - 1)], *cells(rows)]
        lines += [f"**{TITLES[bound]}**", ""]
        lines += ["| " + " | ".join(line) + " |" for line in table] + [""]
    return "\n".join([*lines, LEGEND])
