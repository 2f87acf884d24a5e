"""Writes the tables of benchmarks/results/*/README.md and the README's picture from the results.

A table stands between `<!-- table: FILE.json -->` and `<!-- end -->`; the words around it are
written by hand. A test renders them again and compares.

    python benchmarks/render.py            rewrite the tables, draw docs/speed.png
    python benchmarks/render.py --check    exit status 1 if a table is not that of its results
"""

import argparse
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "speed.png"
TABLE = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]


def _load(name: str, path: Path) -> Any:
    """A module by path: benchmarks/report.py and benchmarks/gpu/report.py share a name."""
    import importlib.util

    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


cpu = _load("report", ROOT / "benchmarks" / "report.py")
gpu = _load("gpu_report", ROOT / "benchmarks" / "gpu" / "report.py")
serving = _load("serving_report", ROOT / "benchmarks" / "gpu" / "serving_report.py")

# of chosen rows: in the picture, draws stand in their place
CHOSEN = ("prefill", "decode")


def is_gpu(document: dict[str, Any]) -> bool:
    return "gpu" in document["machine"]


def is_drawn(document: dict[str, Any]) -> bool:
    """Whether it is of drawn serving steps."""
    return "seed" in document


def markdown(document: dict[str, Any]) -> str:
    if is_drawn(document):
        return serving.markdown(document)
    return gpu.markdown(document) if is_gpu(document) else cpu.markdown(document)


def rendered(page: Path) -> str:
    """A page with its tables printed from the results beside it."""

    def table(match: re.Match[str]) -> str:
        document = cpu.read(page.parent / match[2])
        return f"{match[1]}\n{markdown(document)}\n\n{match[3]}"

    return TABLE.sub(table, page.read_text())


def over_best_peer(document: dict[str, Any]) -> dict[str, list[float]]:
    """Kind of problem -> how many times as fast as the fastest peer of the same run, each row."""
    kinds: dict[str, list[float]] = {}
    if is_drawn(document):
        return {
            f"serving: {kind}": ratios for kind, ratios in serving.ratios_by_kind(document).items()
        }
    if is_gpu(document):
        for table in gpu.tables(document["ceilings"]["read TB/s"]):
            if table.title.split(",")[0] in CHOSEN:
                continue
            peers = [peer for peer in table.peers if peer not in ("packed", "dense")]
            for row in table.rows(document).values():
                over = [gpu.speedup(row, peer, table.ours) for peer in peers]
                if over := [ratio for ratio in over if ratio]:
                    kinds.setdefault(table.title.split(",")[0], []).append(min(over))
        return kinds
    most = max(row.get("threads", 0) for row in document["results"])
    for row in document["results"]:
        timings = row.get("timings", {})
        if row.get("threads") != most or not timings or timings["ours"]["busy"]:
            continue
        peers = [name for name in cpu.peers(row) if "(ours)" not in name]
        over = [cpu.speedup(row, name) for name in peers if not timings[name]["busy"]]
        if over:
            kind = row["problem"].removeprefix("llama3_8b/").replace("_", " ").split()[0]
            kind = {"blocksparse": "block-sparse", "reshape": "cache write"}.get(kind, kind)
            kinds.setdefault(kind.split("/")[0], []).append(min(over))
    return kinds


def over_best_peer_of(names: tuple[str, ...]) -> dict[str, list[float]]:
    """The same of several results of a machine."""
    kinds: dict[str, list[float]] = {}
    for name in names:
        for kind, ratios in over_best_peer(cpu.read(RESULTS / name)).items():
            kinds.setdefault(kind, []).extend(ratios)
    return kinds


def draw(kinds: dict[str, dict[str, list[float]]], path: Path) -> None:
    """A line for each kind of problem on each machine, a dot for each problem of the tables."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator

    heights = [len(rows) for rows in kinds.values()]
    least = min(x for rows in kinds.values() for values in rows.values() for x in values)
    figure = Figure(figsize=(9, 1.1 + 0.24 * sum(heights)), layout="constrained")
    axes = figure.subplots(len(kinds), sharex=True, height_ratios=heights)
    for axis, (title, rows) in zip(axes, kinds.items(), strict=True):
        for y, values in enumerate(rows.values()):
            colors = ["#c2410c" if value >= 1 else "#475569" for value in values]
            axis.scatter(values, [y] * len(values), s=22, c=colors, alpha=0.75, linewidths=0)
        axis.axvline(1, color="#1f2937", linewidth=1)
        axis.set_yticks(range(len(rows)), list(rows))
        axis.set_ylim(len(rows) - 0.5, -0.5)
        axis.set_xscale("log")
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_locator(
            FixedLocator([0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20])
        )
        axis.xaxis.set_major_formatter("{x:g}x")
        axis.set_xlim(min(0.65, 0.95 * least), 25)
        axis.set_title(title, fontsize=9, loc="left", color="#1f2937")
        axis.grid(axis="x", color="#e5e7eb", linewidth=0.7)
        axis.set_axisbelow(True)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        "Speed over the best peer of its run; a dot is a problem of the tables, or a drawn step",
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
    pages = {page: rendered(page) for page in sorted(RESULTS.glob("*/README.md"))}
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
    draw({title: over_best_peer_of(names) for title, names in machines.items()}, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
