"""A block of keys is computed on in pieces: those that no row of a tile sees are skipped, those
that every row sees are not masked.
"""

import dataclasses
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

    def walk(self, first: Array, layout: LayoutMask | None, attend: Attend) -> None:
        """`attend` for the pieces of the block from key `first` on; `layout` is that block's."""
        options = self.options

        def walk_step(step: Array, _: None) -> None:
            self._walk_piece(first, layout, attend, step, options.step_k)

        if options.step_k == options.block_k:
            walk_step(jnp.int32(0), None)
        else:
            steps = self._places(first, options.block_k, options.step_k)
            lax.fori_loop(*steps, walk_step, None)

    def _places(self, first: Array, keys: int, width: int) -> tuple[Array, Array]:
        """Pieces of `width` keys, counted from key `first` on: the first one that some token sees,
        and the one behind the last.
        """
        tiles = self.refs.tiles
        start = jnp.maximum(tiles.start[self.tile] - first, 0)
        stop = jnp.minimum(tiles.stop[self.tile] - first, keys)
        return lax.div(start, jnp.int32(width)), lax.div(stop + (width - 1), jnp.int32(width))

    def _walk_piece(
        self, first: Array, layout: LayoutMask | None, attend: Attend, place: Array, width: int
    ) -> None:
        """A piece of which every row sees every key is attended to at once; of others the halves
        are looked at in the same way, and at last those of `masked_step_k` keys are masked. A bias,
        which may hide any key, masks every piece.
        """
        tiles, masked_step_k = self.refs.tiles, self.options.masked_step_k
        first_key = first + place * width
        is_full: Any = (tiles.full_start[self.tile] <= first_key) & (
            first_key + width <= tiles.full_stop[self.tile]
        )
        if layout is not None:
            is_full &= layout.bits(place, width)[1]

        def attend_edge(place: Array, _: None) -> None:
            if layout is None:
                attend(place, masked_step_k, layout, True)
            else:
                pl.when(layout.bits(place, masked_step_k)[0])(
                    lambda: attend(place, masked_step_k, layout, True)
                )

        def walk_half(place: Array, _: None) -> None:
            self._walk_piece(first, layout, attend, place, width // 2)

        def walk_parts() -> None:
            is_large = width > 2 * masked_step_k
            part = width // 2 if is_large else masked_step_k
            start, stop = self._places(first_key, width, part)
            before = place * (width // part)
            body = walk_half if is_large else attend_edge
            lax.fori_loop(before + start, before + stop, body, None)

        reads_bias = self.refs.bias_rows is not None
        if self.refs.bias is not None and not reads_bias:
            walk_parts()
        else:
            pl.when(is_full)(lambda: attend(place, width, None, reads_bias))
            pl.when(~is_full)(walk_parts)


def for_heads(sizes: Sequence[int], body: Callable[[list[Any]], None]) -> None:
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
