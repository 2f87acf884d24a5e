"""Schedules as text and as a picture."""

from pathlib import Path
from typing import Any

from generations import Generation
from matplotlib.figure import Figure

COLOURS = {
    "ours": "#c2410c",
    "ours, with the write": "#fdba74",
    "ours, queries of whole lanes": "#fdba74",
    "RPA v3": "#2563eb",
    "MLA": "#0891b2",
    "splash": "#7c3aed",
    "seed": "#64748b",
}
CONTENDERS = tuple(COLOURS)


def lines(row: dict[str, Any], generation: Generation) -> str:
    """One problem: a line for each contender."""
    floor = row["live_bytes"] / generation.hbm_bytes_per_second * 1e6
    text = [f"{generation.name} {row['problem']}: live bytes take {floor:.0f} us (model)"]
    for contender in CONTENDERS:
        found = row.get(contender)
        if found is None:
            continue
        if "missing" in found:
            text.append(f"  {contender:28} {found['missing']}")
            continue
        around, operations = found.get("around_cycles", 0), found.get("operations", 0)
        text.append(
            f"  {contender:28} {found['bundles']:>10,} bundles and {around:>9,} around them in"
            f" {operations} operations, {found.get('unestimated', 0)} without an estimate,"
            f" {found['dmas']:>7,} DMAs, {found['hbm_bytes'] / 2**20:8.1f} MiB of HBM,"
            f" {found['vmem_bytes'] / 2**20:5.1f} MiB of VMEM,"
            f" {found['microseconds']:7.0f} us (model)"
        )
    return "\n".join(text)


def draw(document: dict[str, Any], path: Path) -> None:
    """Cycles of each contender's program, and its kernels' modelled time over what the live bytes
    take.
    """
    rows = document["results"]
    figure = Figure(figsize=(11, 1.2 + 0.9 * len(rows)), layout="constrained")
    axes = figure.subplots(1, 2, sharey=True)
    bandwidth = document["generation"]["hbm_bytes_per_second"]
    for ax, title in zip(
        axes, ("bundles + cycles around", "kernels' time / HBM floor (model)"), strict=True
    ):
        for i, row in enumerate(rows):
            found = [c for c in CONTENDERS if "bundles" in row.get(c, {})]
            for j, contender in enumerate(found):
                result = row[contender]
                value = result["bundles"] + result.get("around_cycles", 0)
                if ax is axes[1]:
                    value = result["microseconds"] / (row["live_bytes"] / bandwidth * 1e6)
                height = 0.8 / len(found)
                bar = ax.barh(
                    i - 0.4 + (j + 0.5) * height, value, height, color=COLOURS[contender],
                    label=contender,
                )  # fmt: skip
                ax.bar_label(bar, fmt="{:,.2f}" if ax is axes[1] else "{:,.0f}", fontsize=7)
        ax.set_xscale("log")
        ax.set_title(title, loc="left", fontsize=10)
        ax.set_yticks(range(len(rows)), [row["problem"] for row in rows], fontsize=8)
        ax.margins(x=0.2)
    axes[0].invert_yaxis()
    handles = dict(zip(*axes[0].get_legend_handles_labels()[::-1], strict=True))
    axes[1].legend(handles.values(), handles, fontsize=8, frameon=False)
    packages = ", ".join(f"{name} {version}" for name, version in document["packages"].items())
    name = document["generation"]["name"]
    figure.suptitle(f"{name}: schedules compiled by {packages}; never run on a TPU", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
