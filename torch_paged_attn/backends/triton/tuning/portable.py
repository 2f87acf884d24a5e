"""Tile sizes of the portable attention kernel: from the GPU's table, else by a rule of thumb.

A table is a JSON file for an architecture. For architectures that could not be measured, its
entries are the largest tiles whose kernels spill no registers (`tests/helpers/fit_tiles.py` finds
them).
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

from torch_paged_attn.backends.triton.common.page_sizes import COMPILED

TABLES = Path(__file__).parent / "tables"

# architecture without a table -> one with the same registers and instructions, and no more shared
# memory, whose table it uses
RELATIVES = {
    "sm87": "sm86",
    "sm89": "sm86",
    "sm103": "sm100",
    "sm110": "sm100",
    "sm121": "sm120",
    "gfx940": "gfx942",
    "gfx941": "gfx942",
    "gfx1101": "gfx1100",
    "gfx1102": "gfx1100",
    "gfx1103": "gfx1100",
    "gfx1150": "gfx1100",
    "gfx1151": "gfx1100",
    "gfx1200": "gfx1201",
}

# the most keys per sequence that a block table of this length has room for; else "long"
LENGTHS = {"short": 2048, "medium": 4096}

# the most tiles of queries of a size; else "many". The second line is for tiles of at most 16 rows
SIZES = {"few": 32, "moderate": 72, "some": 1023}
SIZES_OF_SMALL = {"few": 8, "several": 63, "some": 1023}

# the head_dims of entries; others use those of the next larger one
WIDTHS = (64, 128, 256, 1024)


@dataclasses.dataclass(frozen=True)
class Config:
    """A program's tile, BLOCK_M rows and BLOCK_N keys at a time, and compiler options."""

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    waves_per_eu: int = 0  # AMD only; 0: the compiler's choice
    resident: int = 4  # programs that run on a multiprocessor at the same time
    maxnreg: int = 0  # NVIDIA only: most registers of a thread; 0: the compiler's choice
    # elements of a head in one product: several products are divided between warps, each of which
    # then holds less of the queries and keys; 0: the whole head
    chain: int = 0
    # many parts of a tile are merged by several programs, which wait for each other
    is_merged_by_all: bool = False


@functools.cache
def table(arch: str) -> dict[str, dict[str, Any]]:
    """The table of an architecture, or of the one in RELATIVES; empty if there is none."""
    path = TABLES / f"{RELATIVES.get(arch, arch)}.json"
    return json.loads(path.read_text()) if path.exists() else {}


def entries(
    block_m: int,
    rows: int,
    head_dim: int,
    itemsize: int,
    kv_itemsize: int,
    page_size: int,
    tiles: int,
    keys: int,
    is_plain: bool,
    is_full: bool,
    has_columns: bool = False,
) -> list[str]:
    """The keys of a table's entries that fit a call, the most specific first.

    A key starts with, for example, `prefill/d128/b2`: `decode` is for tiles of at most 64 rows,
    else `prefill`; `d` is one of WIDTHS; `b` is the itemsize. Then may follow:

        /kv1            8-bit keys
        /few ...        paged keys, number of tiles as in SIZES
        /few/short ...  the same, and a block table for as many keys as in LENGTHS
        /wide, /narrow  paged keys, pages of at least 64 tokens, or smaller
        /odd            paged keys, pages of a size that is not compiled in
        /thin           some or many tiles, whose rows are a power of two up to 16; 8-bit keys, too
        /few/tall ...   paged keys, 9 to 16 rows, whose partial results take long to merge
        /full           packed keys without causal mask and window
        /extra          not plain: a bias, ALiBi, softcap, dropout, a layout, int4 or scales by
                        token
        /columns        scales by column
    """
    width = next((w for w in WIDTHS if head_dim <= w), WIDTHS[-1])
    key = f"{'decode' if block_m <= 64 else 'prefill'}/d{width}/b{itemsize}"
    found = [key]
    sizes = SIZES_OF_SMALL if block_m <= 16 else SIZES
    size = next((name for name, most in sizes.items() if tiles <= most), "many")
    # few tiles are shared by many programs, whose results one warp merges slowly; so it does with
    # rows that are no power of two
    is_thin = block_m <= 16 and size in ("some", "many") and rows & (rows - 1) == 0
    if kv_itemsize < itemsize:
        found = [f"{key}/kv1/{size}"] + [f"{key}/kv1/thin"] * is_thin + [f"{key}/kv1", key]
    elif page_size:
        found = [f"{key}/{size}", f"{key}/{'wide' if page_size >= 64 else 'narrow'}", key]
        length = next((name for name, most in LENGTHS.items() if keys <= most), "long")
        found = [f"{key}/thin"] * is_thin + [f"{key}/{size}/{length}", *found]
        if 8 < rows <= 16:
            found.insert(0, f"{key}/{size}/tall")
        if page_size not in COMPILED:
            found.insert(0, f"{key}/odd")
    elif is_full and is_plain:
        found.insert(0, f"{key}/full")
    kinds = ["columns"] * has_columns + ["extra"] * (not is_plain)
    return [f"{k}/{kind}" for kind in kinds for k in found] + found


def find_entry(
    arch: str, rows: int, head_dim: int, itemsize: int, *rest: Any
) -> tuple[str | None, int]:
    """The key of the most specific entry in an architecture's table, None if there is none; and the
    number of rows of a tile. `rest` is as in `entries`.

    rows: rows of a tile, if it had all queries of a sequence of mean length
    head_dim: the larger of head_dim and head_dim_v
    tiles, keys: about how many tiles there are, and the most keys of a sequence
    """
    # float32 products do not run on tensor cores and need small tiles
    most = 32 if itemsize == 4 and arch != "interpreter" else 128
    block_m = min(max(16, 1 << (rows - 1).bit_length()), most)
    found = entries(block_m, rows, head_dim, itemsize, *rest)
    return next((e for e in found if e in table(arch)), None), block_m


@functools.lru_cache(maxsize=4096)
def choose_config(arch: str, rows: int, head_dim: int, itemsize: int, *rest: Any) -> Config:
    """The config of a call; arguments as in `find_entry`. An entry's BLOCK_M is an upper bound."""
    entry, block_m = find_entry(arch, rows, head_dim, itemsize, *rest)
    if entry is None:
        return _rule_of_thumb(arch, block_m, head_dim, itemsize)
    found = Config(**{"BLOCK_M": block_m, **table(arch)[entry]})
    return dataclasses.replace(found, BLOCK_M=min(found.BLOCK_M, block_m))


def choose_config_in_turns(head_dim: int) -> Config:
    """The config for 16-bit calls with short sequences, whose tiles are taken in turns: small
    tiles, so that several programs run on a multiprocessor. Measured on Hopper, and used only
    there.
    """
    return Config(64, 64, 4, 2 if head_dim <= 64 else 1)


def _rule_of_thumb(arch: str, block_m: int, head_dim: int, itemsize: int) -> Config:
    """Small tiles, for a GPU without a table."""
    if arch == "interpreter":  # fewer and larger NumPy calls are faster
        return Config(min(block_m, 64), 64, 4, 1)
    if itemsize == 4:
        return Config(min(block_m, 16), 16, 8, 1)
    return Config(min(block_m, 64 if head_dim <= 128 else 32), 32, 8, 1)
