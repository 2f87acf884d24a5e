"""Fit the model of decode's tiles to what decode_sweep.py measured; needs no GPU.

    python benchmarks/gpu/fit_decode.py benchmarks/results/cuda/decode_sweep.json --write sm90

The model is `tuning/decode.py`'s: four numbers for each tile, which are fitted to three quarters of
the shapes. Of the others it is said how far the prediction is off, and how much slower the tiles
are that the model chooses than the best that were measured; today's choice beside it.
"""

import argparse
import json
import math
import random
from pathlib import Path
from typing import Any

import torch

from torch_paged_attn.backends.triton.tuning import decode

Row = dict[str, Any]


def parse(name: str) -> tuple[decode.Tile, int] | None:
    """Tile and least keys of a piece, from a figure's name; None for other contenders."""
    parts = name.split()
    if len(parts) != 5:
        return None
    block_n, warps, stages, resident, least = (int(part[1:]) for part in parts)
    return decode.Tile(block_n, warps, stages, resident), least


def samples(rows: list[Row]) -> dict[decode.Tile, list[tuple[decode.Work, float]]]:
    """By tile: features of a launch, and its microseconds."""
    found: dict[decode.Tile, list[tuple[decode.Work, float]]] = {}
    for row in rows:
        num_heads, num_kv_heads, head_dim = row["heads"]
        for name, us in row["figures"].items():
            if (parsed := parse(name)) is not None:
                tile, least = parsed
                shape = decode.Shape(row["batch"], num_kv_heads, num_heads // num_kv_heads, head_dim)
                work = decode.work_of(shape, row["keys"], tile, least, MULTIPROCESSORS)
                found.setdefault(tile, []).append((work, us))
    return found


MULTIPROCESSORS = 132


def fit(found: list[tuple[decode.Work, float]], steps: int = 3000) -> decode.Costs:
    """Numbers that make the relative errors small."""
    features = torch.tensor([list(work) for work, _ in found], dtype=torch.float64)
    logs = torch.tensor([us for _, us in found], dtype=torch.float64).log()
    start = torch.tensor([6.0, 0.5, 1.0, 0.2, 0.25], dtype=torch.float64).log()
    numbers = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([numbers], lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        predicted = decode.microseconds(features.unbind(1), numbers.exp())
        loss = (predicted.log() - logs).abs().mean()
        loss.backward()
        optimizer.step()
    return decode.Costs(*(round(float(x), 4) for x in numbers.exp()))
