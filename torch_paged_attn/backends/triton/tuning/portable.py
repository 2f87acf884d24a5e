"""Tiles of the attention kernel: explicit choice, then the chip's table, then a rule of thumb.

A table is a file for a chip. The entries of those that nobody could measure are the largest tiles
whose kernels spill no register: `tests/triton/fit_tiles.py` finds them.
"""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tables"

# chips without a table of their own use that of a chip with the same registers and instructions,
# and no more shared memory
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

# keys that a table may hold for a sequence: of few there is little to have on its way at a time
LENGTHS = {"short": 2048, "medium": 4096}

# tiles of queries, at most; more are many
SIZES = {"few": 32, "moderate": 72, "some": 1023}
SIZES_OF_SMALL = {"few": 8, "several": 63, "some": 1023}  # of at most 16 rows

# the same of calls that say how many keys the longest sequence visits, and how many are few
SAID_TILES = {"few": 7, "several": 16, "some": 64, "wave": 132}
NEARNESS = {"next": 512, "near": 1024, "mid": 4096}
# keys of all tiles of queries, at most, that are more than 128 and no more than 256 for each of 132
# programs
ONCE = range(132 * 124, 132 * 256)

# head sizes in between use the tiles of the next larger one
WIDTHS = (64, 128, 256, 1024)


@dataclasses.dataclass(frozen=True)
class Config:
    """What one program works on (BLOCK_M rows, BLOCK_N keys at a time) and what the compiler is
    told.
    """

    BLOCK_M: int
    BLOCK_N: int
    num_warps: int
    num_stages: int
    waves_per_eu: int = 0  # AMD only; 0 leaves it to the compiler
    resident: int = 4  # programs that a multiprocessor holds at once
    maxnreg: int = 0  # NVIDIA only: registers of a thread, so that as many fit; 0 sets no bound
    # elements of a head in one product: more products than one are shared by warps, each of which
    # then holds less of the queries and keys; 0 is the whole head
    chain: int = 0


@functools.cache
def table(arch: str) -> dict[str, dict[str, Any]]:
    """The entries of a chip, or of its relative."""
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
    reach: int = 0,
) -> list[str]:
    """The entries of a table that fit a call, the most special first.

    `"prefill/d128/b2"`: `decode` has at most 64 rows, `d` is one of WIDTHS, `b` the bytes of an
    element. `/kv1` is for 8-bit keys; for keys in pages, `/few` and so on are for so many tiles as
    SIZES say, `/few/short` and so on for tables of so many keys as LENGTHS says, `/wide` for pages
    of 64 keys or more, `/narrow` for smaller ones. `/thin`, also for 8-bit keys, is for tiles of a
    power of two of at most 16 rows, if they are some or many; `/few/tall` and so on for 9 to 16
    rows, whose parts are slow to merge. `/said/few` and so on, before all others, are for tiles of
    at most 16 rows where the caller says how many keys the longest sequence visits (`reach`, or 0):
    `/near` and so on as NEARNESS says, `/once` where large tiles of keys are one for each program.
    `/full` is for packed keys that every query of their sequence sees. `/extra` is for a call that
    is not plain: with a bias, ALiBi, softcap, dropout or a layout.
    """
    width = next((w for w in WIDTHS if head_dim <= w), WIDTHS[-1])
    key = f"{'decode' if block_m <= 64 else 'prefill'}/d{width}/b{itemsize}"
    found = [key]
    sizes = SIZES_OF_SMALL if block_m <= 16 else SIZES
    size = next((name for name, most in sizes.items() if tiles <= most), "many")
    # one warp is slow to merge what many programs share, and with rows of an odd number of heads
    is_thin = block_m <= 16 and size in ("some", "many") and rows & (rows - 1) == 0
    said: list[str] = []
    if reach and block_m <= 16 and (page_size or kv_itemsize < itemsize):
        of_tiles = next((name for name, most in SAID_TILES.items() if tiles <= most), "many")
        how_near = [name for name, most in NEARNESS.items() if reach <= most]
        if NEARNESS["near"] < reach and tiles * reach in ONCE:
            how_near.insert(0, "once")
        kind = f"{key}/kv1/said" if kv_itemsize < itemsize else f"{key}/said"
        said = [f"{kind}/{of_tiles}/{x}" for x in how_near] + [f"{kind}/{of_tiles}"]
    if kv_itemsize < itemsize:
        found = [f"{key}/kv1/{size}"] + [f"{key}/kv1/thin"] * is_thin + [f"{key}/kv1", key]
        found = said + found
    elif page_size:
        found = [f"{key}/{size}", f"{key}/{'wide' if page_size >= 64 else 'narrow'}", key]
        length = next((name for name, most in LENGTHS.items() if keys <= most), "long")
        found = [f"{key}/thin"] * is_thin + [f"{key}/{size}/{length}", *found]
        if 8 < rows <= 16:
            found.insert(0, f"{key}/{size}/tall")
        found = said + found
    elif is_full and is_plain:
        found.insert(0, f"{key}/full")
    return found if is_plain else [f"{k}/extra" for k in found] + found


def find_entry(
    arch: str,
    rows: int,
    head_dim: int,
    itemsize: int,
    kv_itemsize: int,
    page_size: int,
    tiles: int,
    keys: int,
    is_plain: bool,
    is_full: bool,
    reach: int = 0,
) -> tuple[str | None, int]:
    """The entry of a chip's table for about `tiles` tiles of about `rows` rows and at most `keys`
    keys, and the rows of such a tile. `head_dim` is the larger of the two.
    """
    # float32 products run on the plain units: small tiles
    most = 32 if itemsize == 4 and arch != "interpreter" else 128
    block_m = min(max(16, 1 << (rows - 1).bit_length()), most)
    of_keys = kv_itemsize, page_size, tiles, keys, is_plain, is_full, reach
    found = entries(block_m, rows, head_dim, itemsize, *of_keys)
    return next((e for e in found if e in table(arch)), None), block_m


@functools.lru_cache(maxsize=4096)
def choose_config(arch: str, rows: int, head_dim: int, itemsize: int, *rest: Any) -> Config:
    """The config for a call, described as for `find_entry`. An entry's BLOCK_M is the most rows
    that a tile may have.
    """
    entry, block_m = find_entry(arch, rows, head_dim, itemsize, *rest)
    if entry is None:
        return _rule_of_thumb(arch, block_m, head_dim, itemsize)
    found = Config(**{"BLOCK_M": block_m, **table(arch)[entry]})
    return dataclasses.replace(found, BLOCK_M=min(found.BLOCK_M, block_m))


def choose_config_in_turns(head_dim: int) -> Config:
    """The config for short sequences whose tiles are taken in turns, in 16 bits: several programs
    of few rows on a multiprocessor. Measured on Hopper, which alone is asked to.
    """
    return Config(64, 64, 4, 2 if head_dim <= 64 else 1)


def _rule_of_thumb(arch: str, block_m: int, head_dim: int, itemsize: int) -> Config:
    """Small tiles, for a chip that nobody has looked at."""
    if arch == "interpreter":  # fewer and larger NumPy calls are faster
        return Config(min(block_m, 64), 64, 4, 1)
    if itemsize == 4:
        return Config(min(block_m, 16), 16, 8, 1)
    return Config(min(block_m, 64 if head_dim <= 128 else 32), 32, 8, 1)
