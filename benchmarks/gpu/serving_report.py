"""What serving.py measured: the ratios to the best peer, in words and as a plot; needs no GPU.

python benchmarks/gpu/serving_report.py benchmarks/results/cuda/serving.json --plot OUT.png

`benchmarks/render.py` puts the table on the page beside the results, and the draws in the README's
picture.
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

Row = dict[str, Any]

# shares of draws below this are said; so many of the worst are named
BELOW = 0.95
# none is to be below this
LEAST = 0.85
WORST = 10
# by kind
COLOURS = {
    "decode": "#2563eb",
    "speculation": "#7c3aed",
    "chunk": "#c2410c",
    "mixed": "#4d7c0f",
    "encoder": "#64748b",
}


def ratio(row: Row) -> float | None:
    """How many times as fast as the best peer; None where none took part."""
    figures = row.get("figures", {})
    best = min((value for name, value in figures.items() if name != "ours"), default=None)
    return None if best is None else best / figures["ours"]


def line(row: Row) -> str:
    """A row in short."""
    if "figures" not in row:
        return f"  --  {row['problem']}: {row['refused']}"
    found = ratio(row)
    figures = " ".join(f"{name} {value:.1f}" for name, value in row["figures"].items())
    refused = "".join(f" [{name}: {why}]" for name, why in row["refused peers"].items())
    start = " --- " if found is None else f"{found:5.2f}"
    return f"{start} {row['problem']}: {figures} us ({row['kernel']}){refused}"


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def statistics_of(rows: list[Row]) -> str:
    """Geometric mean, smallest, and the share below the bar."""
    ratios = [found for row in rows if (found := ratio(row)) is not None]
    if not ratios:
        return "no draw has a peer"
    below = sum(found < BELOW for found in ratios)
    return (
        f"{len(ratios):3} draws, geometric mean {geometric_mean(ratios):.3f},"
        f" least {min(ratios):.2f}, {below / len(ratios):.0%} below {BELOW}"
    )


def summary(document: dict[str, Any]) -> str:
    """All draws, those of each kind, and the worst by name."""
    rows = document["rows"]
    lines = [f"seed {document['seed']}, of the best peer", f"{'all':12} {statistics_of(rows)}"]
    for kind in dict.fromkeys(row["kind"] for row in rows):
        lines.append(f"{kind:12} {statistics_of([row for row in rows if row['kind'] == kind])}")
    refused = sum("figures" not in row for row in rows)
    alone = sum("figures" in row and ratio(row) is None for row in rows)
    lines.append(f"{refused} refused, {alone} without a peer; the worst:")
    compared = sorted((row for row in rows if ratio(row) is not None), key=ratio)
    return "\n".join([*lines, *map(line, compared[:WORST])])


def ratios_by_kind(document: dict[str, Any]) -> dict[str, list[float]]:
    """Kind of step -> the ratios of its draws."""
    kinds: dict[str, list[float]] = {kind: [] for kind in COLOURS}
    for row in document["rows"]:
        if (found := ratio(row)) is not None:
            kinds[row["kind"]].append(found)
    return {kind: ratios for kind, ratios in kinds.items() if ratios}


def markdown(document: dict[str, Any]) -> str:
    """The tables as they stand on the page beside the results: by kind, and the worst draws."""
    machine, kinds = document["machine"], ratios_by_kind(document)
    lines = [
        f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']},"
        f" {machine['date']}, seed {document['seed']}",
        "",
        f"| serving steps | draws | geometric mean | least | at least {BELOW} | below {LEAST} |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for kind, ratios in ({"all": [x for of in kinds.values() for x in of]} | kinds).items():
        share = sum(found >= BELOW for found in ratios) / len(ratios)
        low = sum(found < LEAST for found in ratios)
        lines.append(
            f"| {kind} | {len(ratios)} | {geometric_mean(ratios):.3f} | {min(ratios):.2f} |"
            f" {share:.0%} | {low} |"
        )
    refused = [row["problem"] for row in document["rows"] if "figures" not in row]
    lines += ["", f"Without a figure of ours: {', '.join(refused) or 'none'}."]
    lines += ["", "| the worst | ours / best | µs | kernel |", "|---|---:|---|---|"]
    compared = sorted((row for row in document["rows"] if ratio(row) is not None), key=ratio)
    for row in compared[:WORST]:
        figures = ", ".join(f"{name} {value:.1f}" for name, value in row["figures"].items())
        lines.append(f"| {row['problem']} | {ratio(row):.2f} | {figures} | {row['kernel']} |")
    return "\n".join(lines)


def compact(document: dict[str, Any]) -> str:
    """The document as JSON, a line to each draw."""
    rows = ",\n".join(json.dumps(row) for row in document["rows"])
    head = json.dumps({name: value for name, value in document.items() if name != "rows"})
    return f'{head[:-1]}, "rows": [\n{rows}\n]}}\n'


def draw(document: dict[str, Any], path: Path) -> None:
    """Every draw's ratio, from the smallest to the largest."""
    from matplotlib.figure import Figure

    rows = sorted((row for row in document["rows"] if ratio(row) is not None), key=ratio)
    figure = Figure(figsize=(9.5, 4.2), layout="constrained")
    ax = figure.subplots()
    for kind, colour in COLOURS.items():
        points = [(i, ratio(row)) for i, row in enumerate(rows) if row["kind"] == kind]
        if points:
            ax.scatter(*zip(*points, strict=True), s=14, color=colour, label=kind, zorder=3)
    ax.axhline(1, color="#1f2937", linewidth=1, linestyle=(0, (4, 3)), zorder=2)
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter("{x:g}x")
    ax.grid(axis="y", color="#e5e7eb", zorder=0)
    ax.set_ylabel("times as fast as the best peer")
    ax.set_xlabel("draws, the worst first")
    for side in ax.spines.values():
        side.set_visible(False)
    ax.legend(frameon=False, fontsize=8.5)
    machine = document["machine"]
    about = (
        f"{machine['gpu']}, torch {machine['torch']}, Triton {machine['triton']},"
        f" {machine['date']}, commit {machine['commit']}; seed {document['seed']}:"
        f" {statistics_of(rows)}"
    )
    figure.suptitle(about, fontsize=8.5, color="#6b7280")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path, help="what serving.py wrote")
    parser.add_argument("--plot", metavar="OUT", type=Path, help="draw them")
    options = parser.parse_args()
    document = json.loads(options.results.read_text())
    if options.plot:
        draw(document, options.plot)
    print(summary(document))


if __name__ == "__main__":
    main()
