"""`F.scaled_dot_product_attention` on a CPU: PyTorch's kernel beside ours, one thread, in turns.

    OMP_WAIT_POLICY=passive PYTHONPATH=. python benchmarks/sdpa.py

writes `torch_paged_attn/integrations/sdpa_table.json`, by which "PAGED_ATTN_SDPA" decides, for the
family of this machine's processor. A ratio is PyTorch's smallest CPU time over ours; of a cell with
batches of one and of four sequences, the smaller one counts. The table says how busy the machine
was: on a busy one, CPU time too has other processes' misses in it, on either side.

--quick measures one cell of each dtype and prints it.
"""

import argparse
import contextlib
import itertools
import json
import os
import platform
import re
from collections.abc import Iterator
from typing import Any

import measure
import torch
import torch.nn.functional as F
from torch.nn.attention import activate_flash_attention_impl, restore_flash_attention_impl

from torch_paged_attn import _processor
from torch_paged_attn.integrations import torch_sdpa

DTYPES = torch.float32, torch.bfloat16, torch.float16
HEAD_DIMS, GROUPS, HEADS = (64, 128), (1, 4, 8), torch_sdpa.LEAST_HEADS
KEYS = {
    "decode": (256, 1024, 4096, 16384),
    "prefill": (128, 512, 2048, 4096),
    "encoder": (128, 512, 2048),
}
# a batch of four sequences of more keys takes long, and says what one says
MOST_IN_BATCH = {"decode": 4096, "prefill": 512, "encoder": 512}
# a table measured on a busier machine than this is not to be trusted
QUIET = 0.5


@contextlib.contextmanager
def always_ours() -> Iterator[None]:
    """Within it, every call that may be ours is."""
    stock = torch_sdpa.Table._is_ahead
    torch_sdpa.Table._is_ahead = lambda *_: True  # type: ignore[method-assign]
    activate_flash_attention_impl("PAGED_ATTN_SDPA")
    try:
        yield
    finally:
        restore_flash_attention_impl()
        torch_sdpa.Table._is_ahead = stock  # type: ignore[method-assign]


def ratio(
    kind: str, dtype: torch.dtype, head_dim: int, group: int, keys: int, batch: int, seconds: float
) -> float:
    """PyTorch's time over ours."""
    queries = 1 if kind == "decode" else keys
    q = torch.randn(batch, queries, HEADS, head_dim, dtype=dtype).transpose(1, 2)
    # a model's cache holds heads before tokens; what comes from a projection, tokens before heads
    shape = (batch, HEADS // group, keys, head_dim)
    if kind != "decode":
        shape = (batch, keys, HEADS // group, head_dim)
    k, v = torch.randn(2, *shape, dtype=dtype)
    if kind != "decode":
        k, v = k.transpose(1, 2), v.transpose(1, 2)
    options: dict[str, Any] = {"is_causal": kind == "prefill", "enable_gqa": group > 1}

    def call() -> Any:
        return F.scaled_dot_product_attention(q, k, v, **options)

    theirs = call()
    with always_ours():
        ours = call()
    error = (ours.float() - theirs.float()).abs().max().item()
    if error > 0.05:
        raise AssertionError(f"{kind} {dtype} {shape}: results differ by {error}")
    theirs, sample = measure.sampler(call), measure.sampler(call)

    def ours(number: int) -> measure.Sample:
        with always_ours():
            return sample(number)

    timings = measure.interleave({"torch": theirs, "ours": ours}, seconds, threads=1)
    return timings["torch"].seconds / timings["ours"].seconds


def cells(seconds: float) -> Iterator[dict[str, Any]]:
    """The table's entries, as they are measured."""
    with torch.inference_mode():
        for dtype, dim, group in itertools.product(DTYPES, HEAD_DIMS, GROUPS):
            for kind, lengths in KEYS.items():
                for keys in lengths:
                    batches = (1, 4) if keys <= MOST_IN_BATCH[kind] else (1,)
                    found = [ratio(kind, dtype, dim, group, keys, b, seconds) for b in batches]
                    yield {
                        "dtype": str(dtype).removeprefix("torch."),
                        "kind": kind,
                        "head_dim": dim,
                        "group_size": group,
                        "keys": keys,
                        "ratio": round(min(found), 2),
                    }


def written(table: dict[str, Any]) -> str:
    """The table as text, a cell a line."""
    text = json.dumps(table, indent=1)
    return (
        re.sub(r"\{\s+(\"dtype\"[^}]*?)\s+\}", lambda x: f"{{{' '.join(x[1].split())}}}", text)
        + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=0.15, help="of each contender and cell")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if asked.quick:
        with torch.inference_mode():
            for dtype in DTYPES:
                print(dtype, round(ratio("decode", dtype, 64, 4, 1024, 1, asked.seconds), 2))
        return
    before = os.getloadavg()[0]
    found = []
    for cell in cells(asked.seconds):
        print(*cell.values(), flush=True)
        found.append(cell)
    table = json.loads(torch_sdpa.TABLE.read_text())
    load = max(before, os.getloadavg()[0] - 1)
    table["processors"][_processor.family()] = {
        "torch": torch.__version__,
        "model": _processor.facts().get("model name", platform.machine()),
        "clock": "smallest CPU time of one thread, in turns",
        "load_average_of_others": round(load, 2),
        "is_quiet": load <= QUIET,
        "cells": found,
    }
    torch_sdpa.TABLE.write_text(written(table))


if __name__ == "__main__":
    main()
