"""A picture of results: panels of problems, a line for each, with a marker for each contender."""

import dataclasses
from pathlib import Path
from typing import Any

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
    "FA3": ("#2563eb", "o"),
    "cuDNN": ("#4d7c0f", "D"),
    "FA2": ("#64748b", "v"),
    "FA4": ("#2563eb", "o"),
    "vLLM": ("#7c3aed", "^"),
    "packed": ("#a16207", "X"),
}
OTHER = ("#fdba74", "x")


@dataclasses.dataclass(frozen=True)
class Panel:
    """Problems' contenders as numbers, of which 1 is marked."""

    title: str
    label: str  # what the numbers are
    rows: dict[str, dict[str, float]]


def draw(
    panels: list[Panel], about: str, path: Path, ticks: str = "{x:.0%}", start: float = 0
) -> None:
    """Write a picture, `about` on top; axes begin at `start`, or before it."""
    heights = [len(panel.rows) + 2.2 for panel in panels]
    figure = Figure(figsize=(9.5, 0.3 * sum(heights) + 1.0), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ax, panel in zip(axes, panels, strict=True):
        _draw(ax, panel)
        low, high = ax.dataLim.intervalx
        ax.set_xlim(min(start, low * 0.98), max(1.05, high) * 1.02)
        ax.xaxis.set_major_formatter(ticks)
    figure.suptitle(about, fontsize=8.5, color="#6b7280")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160)


def _draw(ax: Any, panel: Panel) -> None:
    for y, contenders in enumerate(panel.rows.values()):
        if "ours" in contenders:
            ours = contenders["ours"]
            ax.plot([0, ours], [y, y], color=OURS, linewidth=2.2, alpha=0.25, zorder=1)
        for name, number in contenders.items():
            color, marker = STYLES.get(name, OTHER)
            size, order = (150, 4) if name == "ours" else (34, 3)
            ax.scatter(
                number, y, s=size, color=color, marker=marker, label=name, zorder=order,
                edgecolors=None if marker == "x" else "white", linewidths=0.6,
            )  # fmt: skip
    ax.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)), zorder=2)
    ax.set_yticks(range(len(panel.rows)), list(panel.rows), fontsize=8.5, color=INK)
    ax.set_ylim(len(panel.rows) - 0.4, -0.6)
    ax.grid(axis="x", color=GRID, zorder=0)
    ax.tick_params(length=0, labelsize=8.5)
    for side in ax.spines.values():
        side.set_visible(False)
    ax.set_title(panel.title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
    ax.set_xlabel(panel.label, fontsize=8.5, color=INK)
    handles = {h.get_label(): h for h in ax.collections}
    ax.legend(
        handles.values(), handles, loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False,
        fontsize=8.5, handletextpad=0.2,
    )  # fmt: skip
