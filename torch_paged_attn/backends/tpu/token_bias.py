"""The bias is read where it lies: `(1 or num_heads, total_q, keys)`, a DMA for a tile and a block.

Copies begin at whole tiles of memory, and a sequence's tokens anywhere: what is copied begins up to
a tile before them. What is computed on is in float32 and in base 2, once for each block; a bias of
one head is then read by all of them.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.kernel_arguments import ForwardRefs, Options
from torch_paged_attn.backends.tpu.registers import rows_of_tile
from torch_paged_attn.backends.tpu.softmax import base_2


def rows_of_copy(tile_q: int, dtype: Any) -> int:
    """Rows that have a tile's tokens among them, wherever these begin."""
    unit = rows_of_tile(dtype)
    return unit if tile_q == 1 else -(-(tile_q + unit - 1) // unit) * unit


def readable(bias: Array, tile_q: int, block_k: int) -> Array:
    """The bias of a call, of a type that kernels read, with whole copies of rows and of keys."""
    if bias.dtype == jnp.bool_:
        bias = jnp.where(bias, 0.0, -jnp.inf).astype(jnp.bfloat16)
    elif bias.dtype != jnp.bfloat16:
        bias = bias.astype(jnp.float32)
    _, rows, keys = bias.shape
    least, unit = rows_of_copy(tile_q, bias.dtype), rows_of_tile(bias.dtype)
    more = max(least, -(-rows // unit) * unit) - rows
    return jnp.pad(bias, ((0, 0), (0, more), (0, -keys % block_k)))


@dataclasses.dataclass(frozen=True)
class TokenBias:
    """The bias of one tile's tokens on blocks of keys."""

    refs: ForwardRefs
    options: Options
    tile: Array

    def _rows(self) -> tuple[Array, Array]:
        """Where the copy begins, and the tile's first token in it."""
        refs, tiles = self.refs, self.refs.tiles
        first = refs.cu_seqlens[tiles.sequence[self.tile]] + tiles.first_query[self.tile]
        unit = rows_of_tile(refs.bias.dtype)
        last = refs.bias.shape[1] - refs.bias_buffers.shape[2]
        start = jnp.minimum(first & -unit, last)
        return pl.multiple_of(start, unit), first - start

    def copy(self, block: Array, slot: Array) -> Any:
        """Of a block's bias into its buffer."""
        refs, block_k = self.refs, self.options.block_k
        start, _ = self._rows()
        rows = pl.ds(start, refs.bias_buffers.shape[2])
        columns = pl.ds(pl.multiple_of(block * block_k, block_k), block_k)
        return pltpu.make_async_copy(
            refs.bias.at[:, rows, columns],
            refs.bias_buffers.at[slot],
            refs.semaphores.at[2, slot],
        )

    def arrange(self, slot: Array) -> None:
        """The tile's tokens of what has been copied, in float32 and in base 2."""
        refs, tile_q, count = self.refs, self.options.tile_q, self.refs.bias_buffers.shape[2]
        _, first = self._rows()

        def arrange_head(head: Any, _: None) -> None:
            copied = refs.bias_buffers[slot, head].astype(jnp.float32)
            # what is copied begins at whole tiles, and only those can be loaded
            own = pltpu.roll(copied, count - first, 0)[:tile_q]
            place = (0, pl.ds(head, 1)) if tile_q == 1 else (head,)
            refs.bias_rows[place] = base_2(own)

        lax.fori_loop(0, refs.bias.shape[0], arrange_head, None)

    def of(self, head: Any, place: Array, width: int) -> Array:
        """(rows, width) of one KV head, or of a stack: piece `place` of the block."""
        refs, size = self.refs, self.options.group_size
        columns = pl.ds(pl.multiple_of(place * width, width), width)
        if refs.bias.shape[0] == 1:
            x, rows = refs.bias_rows[0, :, columns], refs.m_i.shape[1]
            return jnp.tile(x, (size, 1)) if len(x) > 1 else jnp.broadcast_to(x, (rows, width))
        heads = pl.ds(pl.multiple_of(head * size, size), size)
        if self.options.tile_q == 1:
            return refs.bias_rows[0, heads, columns]
        return refs.bias_rows[heads, :, columns].reshape(-1, width)
