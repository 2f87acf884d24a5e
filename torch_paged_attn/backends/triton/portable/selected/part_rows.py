"""Rows of parts of gradients, which a later kernel adds up.

Most of the time of a backward that leaves parts goes to writing and reading them. So where dS is
rounded to bfloat16, parts are float16 with a power of two as the scale of a row: their rounding is
an eighth of that of dS. Elsewhere they are float32.
"""

import torch
import triton
import triton.language as tl

from torch_paged_attn.attention_call import AttentionCall
from torch_paged_attn.backends.triton.portable.common.gather_scatter import load_rows, store_rows
from torch_paged_attn.backends.triton.runtime.target import cdiv, next_power_of_2

# the largest number of a row in float16 is below two to this power; float16 ends at 2**16
HIGHEST = tl.constexpr(14)
# columns of a part that are multiplied and added up at a time, and share a scale
COLUMNS = tl.constexpr(128)


def part_dtype(call: AttentionCall, dtype: str) -> torch.dtype:
    """Of the numbers of parts. dtype: of the factors of products."""
    is_rough = dtype == "bf16" and call.k.dtype == call.v.dtype == torch.bfloat16
    return torch.float16 if is_rough else torch.float32


def scales_of(dim: int) -> int:
    """How many scales a row of a part has."""
    return cdiv(dim, COLUMNS.value)


def width_of(dim: int) -> int:
    """How many columns of a part are added up at a time."""
    return min(next_power_of_2(dim), COLUMNS.value)


@triton.constexpr_function
def part_width(dim, low):
    """How many columns of a part of `dim` are multiplied at a time, where rows of the factor are
    read in chunks of `low` or more."""
    return min(max(triton.next_power_of_2(dim), low), 128)


@triton.jit
def put_part(
    ptr, scale_ptr, part, at, exists, is_added, START: tl.constexpr, DIM: tl.constexpr,
    ADDS: tl.constexpr,
):  # fmt: skip
    """Write columns from START on of the rows `at` of parts of DIM numbers, which have a scale for
    each COLUMNS. With ADDS, rows of which `is_added` holds are added to what is there, in float32.
    """
    WIDTH: tl.constexpr = part.shape[1]
    if scale_ptr is not None:
        largest = tl.max(tl.abs(part), 1)
        exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
        exponent = HIGHEST - 1 - tl.maximum(exponent, -100)
        up = ((127 + exponent) << 23).to(tl.float32, bitcast=True)
        down = ((127 - exponent) << 23).to(tl.float32, bitcast=True)
        of_row: tl.constexpr = (DIM + COLUMNS - 1) // COLUMNS
        tl.store(scale_ptr + at * of_row + START // COLUMNS, down, mask=exists)
        part = part * up[:, None]
    elif ADDS:
        keep = exists & is_added
        part += load_rows(ptr, at * DIM, keep, START, WIDTH, DIM, True, "RAW", tl.float32)
    store_rows(ptr + at * DIM, part, exists, START, WIDTH, DIM, None, "NATIVE")


@triton.jit
def load_part(
    ptr, scale_ptr, at, exists, block, DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """WIDTH columns, block number `block` of these, of the rows `at` of parts, in float32; 0 where
    they do not exist. A row has a scale for each block."""
    d = block * WIDTH + tl.arange(0, WIDTH)
    mask = exists[:, None] & (d < DIM)[None, :]
    part = tl.load(ptr + at[:, None] * DIM + d[None, :], mask=mask, other=0.0).to(tl.float32)
    if scale_ptr is not None:
        of_row: tl.constexpr = (DIM + WIDTH - 1) // WIDTH
        part = part * tl.load(scale_ptr + at * of_row + block, mask=exists, other=0.0)[:, None]
    return part
