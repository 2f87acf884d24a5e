"""Results as a picture: every contender's rate as a share of what the machine can do."""

from pathlib import Path
from typing import Any

import report
from matplotlib.figure import Figure

OURS, INK, GRID = "#c2410c", "#1f2937", "#e5e7eb"
STYLES = {
    "ours": (OURS, "*"),
    "base": ("#fdba74", "*"),
    "SDPA": ("#2563eb", "o"),
    "SDPA folded": ("#0891b2", "s"),
    "vLLM p128": ("#4d7c0f", "D"),
    "vLLM p16": ("#7c3aed", "^"),
    "vLLM write": ("#4d7c0f", "D"),
    "SGLang": ("#64748b", "v"),
    "flex": ("#be185d", "P"),
    "dense (ours)": ("#a16207", "X"),
    "index_put": ("#2563eb", "o"),
}
SLOWER_ISA = ("#fdba74", "x")


def draw(document: dict[str, Any], path: Path) -> None:
    """One panel for each ceiling, one line for each problem, at the fewest threads measured."""
    timed = [row for row in document["results"] if row.get("ceiling")]
    fewest = min(row["threads"] for row in timed)
    panels = {
        bound: [row for row in rows if row.get("ceiling") and row["threads"] == fewest]
        for bound, rows in report.sections(document).items()
    }
    panels = {bound: rows for bound, rows in panels.items() if rows}

    heights = [len(rows) + 2.2 for rows in panels.values()]
    figure = Figure(figsize=(9.5, 0.3 * sum(heights) + 1.0), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (bound, rows) in zip(axes, panels.items(), strict=True):
        _panel(ax, rows)
        ax.set_title(report.TITLES[bound], loc="left", fontsize=10.5, fontweight="bold", color=INK)
        ceiling = " or ".join(dict.fromkeys(row["ceiling"]["name"] for row in rows))
        ax.set_xlabel(f"share of {ceiling}", fontsize=8.5, color=INK)
        handles = {h.get_label(): h for h in ax.collections}
        ax.legend(
            handles.values(), handles, loc="center left", bbox_to_anchor=(1.0, 0.5),
            frameon=False, fontsize=8.5, handletextpad=0.2,
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


def _panel(ax: Any, rows: list[dict[str, Any]]) -> None:
    for y, row in enumerate(rows):
        shares = {n: 100 * report.of_ceiling(row, n) for n in ("ours", *report.peers(row))}
        ax.plot([0, shares["ours"]], [y, y], color=OURS, linewidth=2.2, alpha=0.25, zorder=1)
        for name, share in shares.items():
            color, marker = STYLES.get(name, SLOWER_ISA)
            size, order = (150, 4) if name == "ours" else (34, 3)
            ax.scatter(
                share, y, s=size, color=color, marker=marker, label=name, zorder=order,
                edgecolors=None if marker == "x" else "white", linewidths=0.6,
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
