"""Results as a picture: every contender's rate as a share of what the machine can do."""

from pathlib import Path
from typing import Any

import panels
import report


def draw(document: dict[str, Any], path: Path) -> None:
    """One panel for each ceiling, one line for each problem, at the fewest threads measured."""
    fewest = min(row["threads"] for row in document["results"] if row.get("ceiling"))
    drawn = []
    for bound, rows in report.sections(document).items():
        timed = [row for row in rows if row.get("ceiling") and row["threads"] == fewest]
        shares = {
            row["problem"]: {
                name: report.of_ceiling(row, name) for name in ("ours", *report.peers(row))
            }
            for row in timed
        }
        ceiling = " or ".join(dict.fromkeys(row["ceiling"]["name"] for row in timed))
        if timed:
            drawn.append(panels.Panel(report.TITLES[bound], f"share of {ceiling}", shares))
    machine = document["machine"]
    threads = "1 thread, CPU time" if fewest == 1 else f"{fewest} threads, wall time"
    about = (
        f"{machine['cpu']}, {machine['instruction_set']}, torch {machine['torch']}, {threads},"
        f" commit {machine['commit']}"
    )
    panels.draw(drawn, about, path)
