"""The README's table of six workloads, its picture of bars, and the picture of training speed.

`render.py` writes them from the results; nothing in them is typed by hand.
"""

import statistics
from pathlib import Path
from typing import NamedTuple

from best_peers import RESULTS, Compared, compared, cpu, geometric_mean, projects

OURS, PEERS, INK, GRID = "#c2410c", ("#4d7c0f", "#64748b"), "#1f2937", "#e5e7eb"
H200 = "H200"


class Workload(NamedTuple):
    """One row of the table: rows of a kind, in one file of the results."""

    title: str
    device: str
    results: str
    kind: str

    def rows(self) -> list[Compared]:
        return compared(cpu.read(RESULTS / self.results))[self.kind]


WORKLOADS = (
    Workload("Decode", H200, "cuda/serving.json", "serving: decode"),
    Workload("Mixed prefill and decode", H200, "cuda/serving.json", "serving: mixed"),
    Workload("Prefill", H200, "cuda/h200.json", "prefill"),
    Workload("MLA decode", H200, "cuda/h200.json", "latent decode"),
    Workload(
        "Backward (deterministic; peers are not)", H200, "cuda/h200_gradients.json", "backward"
    ),
    Workload("Decode", "EPYC Zen 5, 2 threads", "cpu/epyc_zen5.json", "decode"),
)


def spread(ratios: list[float]) -> tuple[float, float]:
    """The 10th and the 90th percentile."""
    cuts = statistics.quantiles(ratios, n=10, method="inclusive")
    return cuts[0], cuts[-1]


def table() -> str:
    """Our speed divided by that of the fastest peer of the same run, as markdown."""
    lines = [
        "| workload | device | fastest of | n | geometric mean | 10-90 % | worst |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for workload in WORKLOADS:
        rows = workload.rows()
        ratios = [row.ratio for row in rows]
        low, high = spread(ratios)
        lines.append(
            f"| {workload.title} | {workload.device} | {', '.join(projects(rows))} | {len(rows)} |"
            f" {geometric_mean(ratios):.2f}x | {low:.2f}-{high:.2f} | {min(ratios):.2f} |"
        )
    return "\n".join(lines)


def draw(path: Path) -> None:
    """A bar for each workload with its geometric mean, and a whisker from 10 to 90 %."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.9), layout="constrained")
    axis = figure.subplots()
    for y, workload in enumerate(WORKLOADS):
        rows = workload.rows()
        ratios = [row.ratio for row in rows]
        mean, (low, high) = geometric_mean(ratios), spread(ratios)
        axis.barh(y, mean, height=0.62, color=OURS if mean >= 1 else "#94a3b8", alpha=0.85)
        axis.plot([low, high], [y, y], color=INK, linewidth=1.2, marker="|", markersize=7)
        text = f"{mean:.2f}x  {' / '.join(projects(rows))}, n = {len(rows)}"
        axis.text(max(mean, high) + 0.08, y, text, va="center", fontsize=8, color=INK)
    axis.axvline(1, color=INK, linewidth=1, linestyle=(0, (4, 3)))
    axis.set_yticks(range(len(WORKLOADS)), [f"{x.title}, {x.device}" for x in WORKLOADS])
    axis.set_ylim(len(WORKLOADS) - 0.5, -0.5)
    axis.set_xlim(0, 9)
    axis.set_xticks(range(6), [f"{x}x" for x in range(6)])
    axis.grid(axis="x", color=GRID, linewidth=0.7)
    _finish(axis)
    axis.set_title(
        "Speed divided by the fastest peer's: geometric mean, and 10th to 90th percentile",
        fontsize=9, loc="left", color=INK,
    )  # fmt: skip
    figure.savefig(path, dpi=120)


TRAINING = "cuda/h200_step.json"
SHOWN = {"ours": "torch_paged_attn", "cuDNN": "cuDNN (SDPA)", "FA2": "FlashAttention-2"}


def draw_training(path: Path) -> None:
    """Tokens a second of a whole training step, for each kind of pack and each attention."""
    from matplotlib.figure import Figure

    document = cpu.read(RESULTS / TRAINING)
    rows = document["parts"]["train_step"]
    figure = Figure(figsize=(8, 2.9), layout="constrained")
    axis = figure.subplots()
    for i, (name, label) in enumerate(SHOWN.items()):
        values = [row["figures"].get(name) for row in rows]
        places = [x + 0.26 * (i - 1) for x, value in enumerate(values) if value]
        shown = [value / 1000 for value in values if value]
        axis.bar(places, shown, 0.24, label=label, color=(OURS, *PEERS)[i])
        for x, value in zip(places, shown, strict=True):
            axis.text(x, value + 0.6, f"{value:.1f}", ha="center", fontsize=8, color=INK)
        for x in sorted({*range(len(rows))} - {x for x, value in enumerate(values) if value}):
            axis.text(
                x + 0.26 * (i - 1), 1, f"{label}:\nequal\nlengths only", ha="center", fontsize=7,
                color=INK,
            )  # fmt: skip
    labels = {"24 ragged": "24 documents of 32 to 4,096 tokens"}
    names = [row["problem"].replace(" x ", " documents of ") for row in rows]
    axis.set_xticks(range(len(rows)), [labels.get(name, f"{name} tokens") for name in names])
    axis.set_ylim(0, 78)
    axis.set_ylabel("thousand tokens/s", fontsize=8, color=INK)
    axis.grid(axis="y", color=GRID, linewidth=0.7)
    axis.legend(frameon=False, fontsize=8, ncols=3, loc="upper left")
    _finish(axis)
    axis.set_title(
        f"Training a Llama of a billion parameters on 16,384 packed tokens a step, one"
        f" {document['machine']['gpu']}, bfloat16",
        fontsize=9, loc="left", color=INK,
    )  # fmt: skip
    figure.savefig(path, dpi=120)


def _finish(axis) -> None:
    axis.set_axisbelow(True)
    axis.tick_params(labelsize=8, length=0)
    for side in axis.spines.values():
        side.set_visible(False)
