"""Tiles of the attention kernel: explicit choice, then the chip's table, then a rule of thumb."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

TABLES = Path(__file__).parent / "tables"


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


@functools.cache
def _table(arch: str) -> dict[str, dict[str, Any]]:
    path = TABLES / f"{arch}.json"
    return json.loads(path.read_text()) if path.exists() else {}


@functools.lru_cache(maxsize=4096)
def choose_config(
    arch: str,
    rows: int,
    head_dim: int,
    itemsize: int,
    kv_itemsize: int,
    page_size: int,
    tiles: int,
) -> Config:
    """The config for about `tiles` tiles of about `rows` rows. `head_dim` is the larger of the two.

    Tables hold entries like `"prefill/d128/b2"`: `decode` has at most 64 rows, `d` is head_dim
    rounded up to a power of two, `b` the bytes of an element. One that ends in `/kv1` is for 8-bit
    keys; for keys in pages, in `/few` or `/many` for at most 32 tiles or at least 1024, in `/wide`
    for pages of 64 keys or more, in `/narrow` for smaller ones.
    """
    block_m = min(max(16, 1 << (rows - 1).bit_length()), 128)
    width = 1 << (max(head_dim, 16) - 1).bit_length()
    key = f"{'decode' if block_m <= 64 else 'prefill'}/d{width}/b{itemsize}"
    pages = "wide" if page_size >= 64 else "narrow"
    table = _table(arch)
    size = "few" if tiles <= 32 else "many" if tiles >= 1024 else "some"
    entries = [size, pages] if page_size else []
    if kv_itemsize < itemsize:
        entries = ["kv1"]
    for entry in (*(f"{key}/{entry}" for entry in entries), key):
        if entry in table:
            return Config(**{"BLOCK_M": block_m, **table[entry]})
    return _rule_of_thumb(arch, block_m, width, itemsize, page_size)


def _rule_of_thumb(arch: str, block_m: int, width: int, itemsize: int, page_size: int) -> Config:
    """Tiles that fit the registers and the shared memory of every chip of a family."""
    if arch == "interpreter":  # fewer and larger NumPy calls are faster
        return Config(min(block_m, 64), 64, 4, 1)
    is_hip = arch.startswith("gfx")
    stages = 1 if is_hip else 2
    waves = 2 if is_hip else 0
    if itemsize == 4:  # float32 products run on the plain units: small tiles
        return Config(min(block_m, 32), 32 if width <= 128 else 16, 4, 1, 0)
    if block_m <= 64:  # decode: many small programs, all of them loading
        if not is_hip and width <= 256:
            # the ids of pages take two stages of their own
            stages = 5 if page_size else 3
        if width > 256:
            return Config(block_m, 32 if not is_hip else 16, 4 if block_m <= 32 else 8, stages, 0)
        return Config(block_m, 64 if width <= 128 else 32, 4, stages, waves)
    if width > 256:
        return Config(64, 32 if not is_hip else 16, 8, 1, 0)
    if width > 128:
        return Config(
            128 if not is_hip else 64, 64 if not is_hip else 32, 8 if not is_hip else 4, stages, 0
        )
    if arch == "sm90":
        return Config(128, 64, 8, 3 if width > 64 else 2)
    return Config(128, 64, 4 if is_hip or width <= 64 else 8, stages, waves)
