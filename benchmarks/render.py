"""Writes the tables of benchmarks/results/*/README.md, docs/*.md and README.md, and docs' pictures.

A table stands between `<!-- table: FILE.json -->` (in README.md `<!-- table: headline -->`, in docs
`<!-- table: FOLDER/FILE.json -->`) and `<!-- end -->`; the words around it are written by hand. A
test renders them again and compares.

    python benchmarks/render.py            rewrite the tables, draw docs/*.png
    python benchmarks/render.py --check    exit status 1 if a table is not that of its results
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

import headline
from best_peers import (
    RESULTS,
    ROOT,
    compared,
    cpu,
    geometric_mean,
    gpu,
    is_drawn,
    is_gpu,
    serving,
)

TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

# rows that were chosen by hand: in the large picture, drawn steps take their place
CHOSEN = ("prefill", "decode")


def markdown(document: dict[str, Any]) -> str:
    if is_drawn(document):
        return serving.markdown(document)
    return gpu.markdown(document) if is_gpu(document) else cpu.markdown(document)


def rendered(page: Path) -> str:
    """A page with its tables printed from the results beside it, or in docs from any results.

    Pages of docs do not say on which day a figure was measured.
    """
    is_result = RESULTS in page.parents

    def table(match: re.Match[str]) -> str:
        if match[2] == "headline":
            text = headline.table()
        else:
            document = cpu.read((page.parent if is_result else RESULTS) / match[2])
            text = markdown(document)
            if not is_result:
                text = text.replace(f", {document['machine']['date']}", "", 1)
        return f"{match[1]}\n{text}\n\n{match[3]}"

    return TABLE.sub(table, page.read_text())


def over_best_peer_of(names: tuple[str, ...]) -> dict[str, list[float]]:
    """Kind of problem -> our speed by the fastest peer's for each row, in several results."""
    kinds: dict[str, list[float]] = {}
    for name in names:
        document = cpu.read(RESULTS / name)
        for kind, rows in compared(document).items():
            if not (is_gpu(document) and kind in CHOSEN):
                kinds.setdefault(kind, []).extend(row.ratio for row in rows)
    return kinds


FASTER, SLOWER, INK = "#c2410c", "#475569", "#1f2937"


def draw(kinds: dict[str, dict[str, list[float]]], path: Path) -> None:
    """A panel for each machine, a line for each kind of problem, a dot for each problem."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FixedLocator, NullLocator

    heights = [len(rows) for rows in kinds.values()]
    figure = Figure(figsize=(9, 1.5 + 0.27 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(kinds), height_ratios=heights)
    for axis, (title, rows) in zip(axes, kinds.items(), strict=True):
        for y, values in enumerate(rows.values()):
            colors = [FASTER if value >= 1 else SLOWER for value in values]
            axis.scatter(values, [y] * len(values), s=20, c=colors, alpha=0.5, linewidths=0)
            axis.plot([geometric_mean(values)], [y], marker="|", color=INK, markersize=12)
        axis.axvline(1, color=INK, linewidth=1)
        names = [f"{kind} (n = {len(values)})" for kind, values in rows.items()]
        axis.set_yticks(range(len(rows)), names)
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xscale("log")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_locator(FixedLocator([0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20]))
        axis.xaxis.set_major_formatter("{x:g}x")
        least, most = (end(x for of in rows.values() for x in of) for end in (min, max))
        axis.set_xlim(min(0.65, 0.95 * least), max(2.1, 1.08 * most))
        axis.set_title(title, fontsize=9, loc="left", color=INK)
        axis.grid(axis="x", color="#e5e7eb", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 5}
    handles = [
        Line2D(
            [], [], color=FASTER, label="a problem: as fast as the fastest peer, or faster", **dot
        ),
        Line2D([], [], color=SLOWER, label="a problem: slower than the fastest peer", **dot),
        Line2D([], [], color=INK, linestyle="", marker="|", markersize=10, label="geometric mean"),
    ]
    figure.legend(
        handles=handles, loc="outside lower left", ncols=3, frameon=False, fontsize=8,
    )  # fmt: skip
    figure.suptitle(
        "Our speed divided by that of the fastest peer of the same run",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    figure.savefig(path, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args()
    written = ROOT / "README.md", *RESULTS.glob("*/README.md"), *(ROOT / "docs").glob("*.md")
    pages = {page: rendered(page) for page in sorted(written)}
    stale = [page for page, text in pages.items() if page.read_text() != text]
    if options.check:
        for page in stale:
            print(f"{page.relative_to(ROOT)}: a table is not that of its results")
        return int(bool(stale))
    for page in stale:
        page.write_text(pages[page])
    machines = {
        "NVIDIA H200": (
            *("cuda/serving.json", "cuda/h200.json"),
            *("cuda/h200_step.json", "cuda/h200_others.json"),
            *("cuda/h200_gradients.json", "cuda/h200_float8.json"),
        ),
        "NVIDIA H100": ("cuda/serving_h100.json", "cuda/h100.json", "cuda/h100_gradients.json"),
        "AMD EPYC (Zen 5), 2 threads": ("cpu/epyc_zen5.json",),
        "Intel Xeon with AMX, 2 threads": ("cpu/xeon_emerald_rapids.json",),
    }
    pictures = ROOT / "docs"
    draw(
        {title: over_best_peer_of(names) for title, names in machines.items()},
        pictures / "peers.png",
    )
    headline.draw(pictures / "speed.png")
    headline.draw_training(pictures / "training.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
