"""Results as a picture: every contender's rate as a share of what the machine can do."""

from pathlib import Path
from typing import Any

import report
from matplotlib.figure import Figure

TITLES = {
    "read": "Decode: share of a plain read of the keys and values",
    "matmul": "Prefill, mixed and block-sparse: share of torch.matmul",
    "copy": "Cache writes: share of a plain copy",
}
OURS, BASE, INK, GRID = "#c2410c", "#fdba74", "#1f2937", "#e5e7eb"
COLORS = ("#2563eb", "#0891b2", "#4d7c0f", "#7c3aed", "#64748b", "#be185d", "#a16207", "#111827")
MARKERS = "osD^vPXd"


def draw(document: dict[str, Any], path: Path) -> None:
    """One panel for each ceiling, one line for each problem, at the fewest threads measured."""
    timed = [row for row in document["results"] if row.get("ceiling")]
    fewest = min(row["threads"] for row in timed)
    timed = [row for row in timed if row["threads"] == fewest]
    panels = {bound: [r for r in timed if r["bound"] == bound] for bound in TITLES}
    panels = {bound: rows for bound, rows in panels.items() if rows}
    styles = _styles(timed)

    heights = [len(rows) + 1.2 for rows in panels.values()]
    figure = Figure(figsize=(9.5, 0.34 * sum(heights) + 1.6), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (bound, rows) in zip(axes, panels.items(), strict=True):
        _panel(ax, rows, styles)
        ax.set_title(TITLES[bound], loc="left", fontsize=10.5, fontweight="bold", color=INK)
    handles = {}
    for ax in axes:
        handles |= {h.get_label(): h for h in ax.collections if h.get_label() in styles}
    figure.legend(
        [handles[name] for name in styles if name in handles],
        [name for name in styles if name in handles],
        loc="outside upper center", ncols=len(handles), frameon=False, fontsize=9,
        handletextpad=0.2, columnspacing=1.2,
    )  # fmt: skip
    machine = document["machine"]
    threads = "1 thread, CPU time" if fewest == 1 else f"{fewest} threads, wall time"
    figure.supxlabel(
        f"{machine['cpu']}, {machine['instruction_set']}, torch {machine['torch']}, {threads},"
        f" commit {machine['commit']}",
        fontsize=8.5,
        color="#6b7280",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _styles(rows: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    names = dict.fromkeys(["ours", *(name for row in rows for name in report.peers(row))])
    others = [name for name in names if name not in ("ours", "base")]
    looks = {n: (COLORS[i % len(COLORS)], MARKERS[i % len(MARKERS)]) for i, n in enumerate(others)}
    looks |= {"ours": (OURS, "*"), "base": (BASE, "*")}
    return {name: looks[name] for name in names}


def _panel(ax: Any, rows: list[dict[str, Any]], styles: dict[str, tuple[str, str]]) -> None:
    for y, row in enumerate(rows):
        shares = {n: 100 * report.of_ceiling(row, n) for n in ("ours", *report.peers(row))}
        ax.plot([0, shares["ours"]], [y, y], color=OURS, linewidth=2.2, alpha=0.25, zorder=1)
        for name, share in shares.items():
            color, marker = styles[name]
            size, order = (150, 4) if name == "ours" else (34, 3)
            ax.scatter(
                share, y, s=size, color=color, marker=marker, label=name, zorder=order,
                edgecolors="white", linewidths=0.6,
            )  # fmt: skip
    ax.axvline(100, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
    ax.set_yticks(range(len(rows)), [row["problem"] for row in rows], fontsize=8.5, color=INK)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.set_xlim(0, max(105, *ax.dataLim.intervalx) * 1.02)
    ax.xaxis.set_major_formatter("{x:.0f} %")
    ax.grid(axis="x", color=GRID, zorder=0)
    ax.tick_params(length=0, labelsize=8.5)
    for side in ax.spines.values():
        side.set_visible(False)
