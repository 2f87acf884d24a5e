"""The pictures of the examples, drawn into examples/out/."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import torch
from matplotlib import pyplot as plt

OUT = Path(__file__).parent / "out"
OURS, THEIRS, PALE = "#d1495b", "#30638e", "#a9bcd0"

plt.rcParams.update(
    {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "figure.dpi": 150,
    }
)


def save(figure, name):
    OUT.mkdir(exist_ok=True)
    figure.savefig(OUT / name, bbox_inches="tight")
    plt.close(figure)


def panels():
    """A figure with two small axes on the left and a large one on the right."""
    figure = plt.figure(figsize=(12, 6))
    grid = figure.add_gridspec(2, 2, width_ratios=(1, 1.2), hspace=0.45, wspace=0.25)
    return figure, *(figure.add_subplot(cell) for cell in (grid[0, 0], grid[1, 0], grid[:, 1]))


def bars(axes, values, labels, colors, title):
    """Horizontal bars with their values written at the end."""
    drawn = axes.barh(range(len(values)), values, color=colors, height=0.6)
    axes.bar_label(drawn, [f"{value:,.0f}" for value in values], padding=4)
    axes.set_yticks(range(len(values)), labels)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.set_xlim(0, 1.15 * max(values))
    axes.set_title(title)


def draw_embeddings(methods, passages, rows):
    """Speed, the lengths that make padding expensive, and a map of the embedded library."""
    figure, speed, below, right = panels()
    labels = [method.name.replace(", ", "\n", 1) for method in methods]
    speeds = [method.speed for method in methods]
    bars(speed, speeds, labels, (OURS, THEIRS, PALE), "Passages per second")

    below.hist([len(row) for row in rows], bins=64, color=OURS)
    below.set_title("Most passages are short, some are long")
    below.set_xlabel("tokens in a passage")
    below.set_ylabel("passages")

    _draw_map(right, methods[0].embeddings, passages)
    save(figure, "embed.png")


def draw_serving(runs, prompts):
    """Speed, new tokens over time, and when each prompt got its tokens from us."""
    figure, speed, below, right = panels()
    runs = runs[::-1]
    colors = (OURS, THEIRS, PALE)
    labels = [run.name.replace(", ", "\n", 1) for run in runs]
    bars(speed, [run.speed for run in runs], labels, colors, "New tokens per second")

    for run, color in zip(runs, colors, strict=True):
        times = sorted(t for answer in run.times for t in answer)
        below.plot(times, range(1, len(times) + 1), color=color, linewidth=2)
    below.set_title("New tokens so far")
    below.set_xlabel("seconds")

    _draw_timeline(right, runs[0].times, prompts)
    save(figure, "serve.png")


def draw_training(ways, variations, batches):
    """Speed of every way, their losses step by step, and the losses over the seconds they took."""
    figure, speed, below, right = panels()
    colors = (OURS, PALE, THEIRS)
    labels = [way.name.replace(", ", "\n", 1) for way in ways]
    bars(speed, [way.speed(batches) for way in ways], labels, colors, "Bytes trained on per second")

    for width, way, color in zip((5, 3, 1), ways, colors, strict=True):
        below.plot(way.losses, color=color, linewidth=width)
    for run in variations:
        below.plot(run.losses, color="black", linewidth=0.5)
    below.set_title("Loss, step by step: one curve")
    below.set_xlabel("steps (thin: compiled, checkpointed, accumulated, autocast)")

    for way, color in zip(ways, colors, strict=True):
        seconds = torch.tensor(way.seconds).cumsum(0)
        right.plot(seconds, way.losses, color=color, linewidth=2, label=way.name)
    right.set_title("Loss over seconds of training")
    right.set_xlabel("seconds")
    right.legend(frameon=False)
    save(figure, "train.png")


def _draw_timeline(axes, times, prompts):
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for row, i in enumerate(order):
        axes.plot(times[i], [row] * len(times[i]), color=OURS, linewidth=1, alpha=0.4)
        axes.scatter(times[i], [row] * len(times[i]), color=OURS, s=3, linewidths=0)
    ticks = range(0, len(order), max(1, len(order) // 8))
    axes.set_yticks(ticks, [f"{len(prompts[order[row]]):,}" for row in ticks])
    axes.set_ylabel("bytes in the prompt")
    axes.set_xlabel("seconds")
    axes.set_xlim(left=0)
    axes.set_title("torch_paged_attn: a row is a prompt, a dot a new token")


def _draw_map(axes, embeddings, passages, packages=8):
    """The plane that best parts the largest packages' mean embeddings."""
    package = [passage.name.split(".")[0] for passage in passages]
    largest = sorted(set(package), key=package.count)[-packages:]
    members = {name: embeddings[[p == name for p in package]] for name in sorted(largest)}
    means = torch.stack([points.mean(0) for points in members.values()])
    plane = torch.linalg.svd(means - means.mean(0)).Vh[:2].T
    for color, (name, points) in zip(plt.cm.Dark2.colors, members.items(), strict=True):
        x, y = (points @ plane).T
        axes.scatter(x, y, s=12, color=color, alpha=0.6, linewidths=0, label=name.lstrip("_"))
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 0), ncols=4, frameon=False, markerscale=2)
    axes.set_title("The library's largest packages, as embedded")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
