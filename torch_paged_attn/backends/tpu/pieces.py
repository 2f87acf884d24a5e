"""A block of keys is computed on in pieces: those that no row of a tile sees are skipped, those
that every row sees are not masked.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from torch_paged_attn.backends.tpu.config import MOST_HEADS, MOST_ROWS
from torch_paged_attn.backends.tpu.kernel_arguments import Options, Refs
from torch_paged_attn.backends.tpu.layout_mask import LayoutMask

# (place, width, layout, masked): piece `place` of a block, counted in pieces of `width` keys
Attend = Callable[[Array, int, LayoutMask | None, bool], None]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """The pieces of blocks of keys that one tile sees."""

    refs: Refs
    options: Options
    tile: Array

    def walk(self, first: Array, turn: Array, attend: Attend) -> None:
        """`attend` for the pieces of the block from key `first` on, the tile's at this turn."""
        options = self.options
        walk_step = functools.partial(self._walk_step, first, turn, attend)
        if options.step_k == options.block_k:
            walk_step(jnp.int32(0))
        else:
            lax.fori_loop(
                *self._places(first, options.block_k, options.step_k),
                lambda step, _: walk_step(step),
                None,
            )

    def _places(self, first: Array, keys: int, width: int) -> tuple[Array, Array]:
        """Pieces of `width` keys, counted from key `first` on: the first one that some token sees,
        and the one behind the last.
        """
        tiles = self.refs.tiles
        start = jnp.maximum(tiles.start[self.tile] - first, 0)
        stop = jnp.minimum(tiles.stop[self.tile] - first, keys)
        return lax.div(start, jnp.int32(width)), lax.div(stop + (width - 1), jnp.int32(width))

    def _walk_step(self, first: Array, turn: Array, attend: Attend, step: Array) -> None:
        """A step of which every row sees every key is one piece, others are several."""
        tiles, options = self.refs.tiles, self.options
        step_k, edge_k = options.step_k, options.edge_k
        first_key = first + step * step_k
        is_full: Any = (tiles.full_start[self.tile] <= first_key) & (
            first_key + step_k <= tiles.full_stop[self.tile]
        )
        layout: LayoutMask | None = None
        if self.refs.layout is not None:
            layout = LayoutMask(self.refs.layout, options, tiles.position[self.tile], turn)
            is_full &= layout.bits(step, step_k)[1]

        def attend_edge(place: Array, _: None) -> None:
            if layout is None:
                attend(place, edge_k, layout, True)
            else:
                pl.when(layout.bits(place, edge_k)[0])(lambda: attend(place, edge_k, layout, True))

        def attend_edges() -> None:
            start, stop = self._places(first_key, step_k, edge_k)
            before = step * (step_k // edge_k)
            lax.fori_loop(before + start, before + stop, attend_edge, None)

        if self.refs.bias is not None:
            attend_edges()
        else:
            pl.when(is_full)(lambda: attend(step, step_k, None, False))
            pl.when(~is_full)(attend_edges)


def for_heads(sizes: Sequence[int], options: Options, body: Callable[[list[Any]], None]) -> None:
    """`body(heads)` for all heads, as many at a time as are computed on together; `sizes` are the
    numbers of heads and of a head's rows.
    """
    num_heads, rows = sizes
    most = min(MOST_HEADS, max(1, MOST_ROWS // rows))
    together = max(n for n in range(1, most + 1) if num_heads % n == 0)

    def attend_some(i: Any, _: None) -> None:
        body([i * together + j for j in range(together)])

    if num_heads == together:
        attend_some(0, None)
    else:
        lax.fori_loop(0, num_heads // together, attend_some, None)
