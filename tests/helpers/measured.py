"""Serving steps whose ways were timed on a GPU, as calls of an operator: what costs are fitted to
and choices are judged by.
"""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.dispatch import cost_model as ways
from torch_paged_attn.backends.triton.dispatch import kernels
from torch_paged_attn.backends.triton.flash_varlen import said_of_reach

DATA = Path(__file__).parents[1] / "triton" / "data" / "ways_sweep.json.gz"

Row = dict[str, Any]


def rows_of(path: Path = DATA) -> list[Row]:
    """The measured steps. A row has lengths of all sequences only if queries are many."""
    rows: list[Row] = json.loads(gzip.decompress(path.read_bytes()))
    return rows


def write(rows: list[Row], path: Path = DATA) -> None:
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def call_of(row: Row) -> AttentionCall:
    """The call of a step, with tensors of any values."""
    num_heads, num_kv_heads, head_dim = row["heads"]
    page_size, batch = row["page_size"], row["batch"]
    dtype, kv_dtype = getattr(torch, row["dtype"]), getattr(torch, row["kv_dtype"])
    q = torch.empty(row["total_q"], num_heads, head_dim, dtype=dtype)
    shape = 2, page_size, num_kv_heads, head_dim
    k, v = (torch.empty(shape, dtype=kv_dtype).transpose(1, 2) for _ in "kv")
    starts, used = (torch.empty(n, dtype=torch.int32) for n in (batch + 1, batch))
    width = max(row.get("width", 1 << 17) // page_size, 2)
    return AttentionCall.flash_varlen(
        q, k, v, starts, None, 0, said_of_reach(row["keys"][2], False), used,
        torch.empty(batch, width, dtype=torch.int32), causal=True, window_size_left=row["window"],
    )  # fmt: skip


def shape_of(row: Row, is_exact: bool = False) -> ways.Shape:
    """What the operator knows of a step, and the ways that can run it and were measured. With
    `is_exact`, its sizes, which the operator rounds."""
    call = call_of(row)
    sizes = kernels.sizes_of(call, 0 if "lengths" in row else row["longest_q"], is_exact)
    why = kernels.reasons(call, sizes, None)
    return kernels.shape_of(call, sizes, {x: y for x, y in why.items() if x in row["figures"]})


def guess_of(row: Row) -> tuple[ways.Lengths, ...]:
    """The lengths that a step really has."""
    if "lengths" in row:
        found = [ways.Lengths(keys, keys, 1, q) for q, keys in row["lengths"] if q > 1]
        if ones := [keys for q, keys in row["lengths"] if q == 1]:
            found.append(ways.Lengths(sum(ones) / len(ones), max(ones), len(ones)))
        return tuple(found)
    mean, longest = row["keys"][1] / row["batch"], row["keys"][2]
    if row["window"] >= 0:
        mean, longest = (min(x, row["window"] + row["longest_q"]) for x in (mean, longest))
    return (ways.Lengths(mean, longest, row["batch"], row["total_q"] / row["batch"]),)


def chosen() -> Iterator[tuple[Row, str, dict[str, float]]]:
    """Each step in question, the way that is chosen for it, and microseconds of all that can run
    it. A target that has Hopper's kernel is to be assumed."""
    for row in rows_of():
        shape = shape_of(row)
        figures = {way: row["figures"][way] for way, _ in shape.tiles}
        if len(figures) > 2:
            yield row, ways.choose_way(shape), figures
