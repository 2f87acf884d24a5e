"""Tiles of a cache, the unit of its writes: where one lies, and what its rows hold.

A DMA cannot write one row of 16 or 8 bits, which is half or a quarter of a register's row. So what
is moved is as many slots as a register has rows, of all heads of a page.
"""

import math
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

# bytes from one part of a DMA to the next: an int32 in libtpu
FARTHEST = 2**31


def places(cache: Any, tile: Array, height: int) -> list[tuple[slice, Any]]:
    """Planes of a cache (planes, pages, heads, rows, numbers), and the place of this tile of
    `height` rows in them: keys and values of one cache together, unless they are too far apart for
    one DMA.
    """
    tiles_per_page = jnp.int32(cache.shape[3] // height)
    first = pl.multiple_of(lax.rem(tile, tiles_per_page) * height, height)
    where = lax.div(tile, tiles_per_page), slice(None), pl.ds(first, height)
    planes = range(cache.shape[0])
    plane_bytes = math.prod(cache.shape[1:]) * cache.dtype.itemsize
    some = [slice(None)] if plane_bytes < FARTHEST else [slice(i, i + 1) for i in planes]
    at = [(which, *where) for which in some]
    return [(place[0], cache.at[place]) for place in at]


def num_slots(cache: Any, fold: int) -> int:
    """Slots of a cache whose rows hold `fold` keys each."""
    return int(cache.shape[1] * cache.shape[3] * fold)


class CacheWriter:
    """The refs of one kernel that writes a cache: what runs and groups of tiles have in common.

    A row of the cache holds `fold` keys, and a new row its numbers as often. `new_hbm` and `rows`
    are those of keys and of values: (num_tokens, parts of heads, LANES) where heads are of whole
    lanes. `tiles` end in (planes, heads, rows of a tile, numbers of a row).
    """

    def __init__(
        self,
        slots: Any,
        new_hbm: tuple[Any, ...],
        caches: tuple[Any, ...],
        refs: tuple[Any, ...],
        *,
        fold: int,
        interpret: Any,
    ) -> None:
        """`refs`: buffers of tiles, one for each cache, two of rows, and the writer's own."""
        self.slots, self.new_hbm, self.caches = slots, new_hbm, caches
        self.tiles, refs = refs[: len(caches)], refs[len(caches) :]
        self.rows, self.own = refs[:2], refs[2:]
        self.fold, self.interpret = fold, interpret

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return int(self.tiles[0].shape[-2])

    @property
    def tile_slots(self) -> int:
        return self.height * self.fold
