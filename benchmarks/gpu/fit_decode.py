"""Fit the model of decode's tiles to what decode_sweep.py measured; needs no GPU.

    python benchmarks/gpu/fit_decode.py benchmarks/results/cuda/decode_sweep.json [--write sm90]

The model is `tuning/decode.py`'s: five numbers for each tile. They are fitted to three quarters of
the shapes first; of the others it is said how far the prediction is off, and how much slower the
tiles are that the model chooses than the best that were measured, with what was chosen when the
sweep ran beside it. What is written is fitted to all.
"""

import argparse
import json
import math
import random
import statistics
from pathlib import Path
from typing import Any

import torch

from torch_paged_attn.backends.triton.tuning import decode
from torch_paged_attn.backends.triton.tuning.portable import TABLES

Row = dict[str, Any]
Choice = tuple[decode.Tile, int]

MULTIPROCESSORS = 132
WIDTH = 131072


def parse(name: str) -> Choice | None:
    """Tile and least keys of a piece, from a figure's name; None for other contenders."""
    parts = name.split()
    if len(parts) != 5:
        return None
    block_n, warps, stages, resident, least = (int(part[1:]) for part in parts)
    return decode.Tile(block_n, warps, stages, resident), least


def shape_of(row: Row) -> decode.Shape:
    _, num_kv_heads, head_dim = row["heads"]
    return decode.Shape(row["batch"], num_kv_heads, 4 * head_dim)


def samples(rows: list[Row]) -> dict[decode.Tile, list[tuple[decode.Work, float]]]:
    """By tile: the work of launches, and their microseconds."""
    found: dict[decode.Tile, list[tuple[decode.Work, float]]] = {}
    for row in rows:
        for name, us in row["figures"].items():
            if (parsed := parse(name)) is not None:
                work = decode.work_of(shape_of(row), row["keys"], *parsed, MULTIPROCESSORS)
                found.setdefault(parsed[0], []).append((work, us))
    return found


def fit(measured: list[tuple[decode.Work, float]], steps: int = 800) -> decode.Costs:
    """Numbers that make the mean relative error small."""
    columns = zip(*(work for work, _ in measured), strict=True)
    work = decode.Work(*(torch.tensor(x, dtype=torch.float64) for x in columns))
    logs = torch.tensor([us for _, us in measured], dtype=torch.float64).log()
    numbers = torch.tensor([6.0, 0.5, 0.03, 1.0, 0.2], dtype=torch.float64).log()
    numbers.requires_grad_()
    optimizer = torch.optim.Adam([numbers], lr=0.04)
    for _ in range(steps):
        optimizer.zero_grad()
        predicted = decode.microseconds(work, decode.Costs(*numbers.exp()))
        (predicted.log() - logs).abs().mean().backward()
        optimizer.step()
    return decode.Costs(*(round(x, 4) for x in numbers.exp().tolist()))


def fit_all(rows: list[Row]) -> dict[decode.Tile, decode.Costs]:
    return {tile: fit(measured) for tile, measured in samples(rows).items()}


def choices(rows: list[Row]) -> list[Choice]:
    """Every tile and least piece that all shapes were measured with."""
    names = set.intersection(*(set(row["figures"]) for row in rows))
    return sorted(parsed for name in names if (parsed := parse(name)) is not None)


def name_of(choice: Choice) -> str:
    tile, least = choice
    return f"n{tile.block_n} w{tile.warps} s{tile.stages} r{tile.resident} k{least}"


def judge(rows: list[Row], costs: dict[decode.Tile, decode.Costs], offered: list[Choice]) -> str:
    """How far predictions are off, and what the chosen tiles lose; for the length as it is (a
    table that says it), and for one that nobody knows.
    """
    errors, losses, unknown, now, peer = [], [], [], [], []
    for row in rows:
        figures = row["figures"]
        best = min(us for name, us in figures.items() if parse(name) is not None)

        def predicted(choice: Choice, keys: int, row: Row = row) -> float:
            work = decode.work_of(shape_of(row), keys, *choice, MULTIPROCESSORS)
            return decode.microseconds(work, costs[choice[0]])

        known = min(offered, key=lambda c: predicted(c, row["keys"]))
        average = decode.choose(
            {c: costs[c[0]] for c in offered}, shape_of(row), WIDTH, MULTIPROCESSORS
        )
        errors += [abs(predicted(c, row["keys"]) / figures[name_of(c)] - 1) for c in offered]
        losses.append(figures[name_of(known)] / best)
        unknown.append(figures[name_of(average)] / best)
        now.append(figures["ours"] / best)
        peer.append(figures.get("FA3", math.nan) / figures[name_of(average)])
    return (
        f"{len(rows)} shapes: off by {statistics.median(errors):.1%} (median);"
        f" of the best tiles' time: {mean(losses):.3f} where the length is known,"
        f" {mean(unknown):.3f} where not (most {max(unknown):.2f}), as it was {mean(now):.3f}"
        f" (most {max(now):.2f}); of FA3 {mean(peer):.3f}"
    )


def mean(ratios: list[float]) -> float:
    return math.exp(statistics.mean(math.log(x) for x in ratios))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", type=Path)
    parser.add_argument("--write", metavar="ARCH", help="write the chip's model")
    parser.add_argument("--only-write", action="store_true", help="and say nothing")
    options = parser.parse_args()
    rows = json.loads(options.sweep.read_text())["rows"]
    offered = choices(rows)
    if options.only_write:
        write(options.write, offered, fit_all(rows))
        return
    mixed = random.Random(1).sample(rows, len(rows))
    kept, held_out = mixed[: len(rows) * 3 // 4], mixed[len(rows) * 3 // 4 :]
    costs = fit_all(kept)
    print("fitted to  ", judge(kept, costs, offered))
    print("not fitted:", judge(held_out, costs, offered))
    costs = fit_all(rows)
    print("all:       ", judge(rows, costs, offered))
    if options.write:
        write(options.write, offered, costs)


def write(arch: str, offered: list[Choice], costs: dict[decode.Tile, decode.Costs]) -> None:
    """The chip's model."""
    listed = [
        {"tile": list(tile), "least": [n for t, n in offered if t == tile],
         "costs": costs[tile]._asdict()}
        for tile in sorted({tile for tile, _ in offered})
    ]  # fmt: skip
    text = "[\n" + ",\n".join("  " + json.dumps(x) for x in listed) + "\n]\n"
    (TABLES / f"{arch}_decode.json").write_text(text)


if __name__ == "__main__":
    main()
