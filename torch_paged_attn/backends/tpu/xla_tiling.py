"""Tokens as rows of tiles, and back: the gathers and transposes that XLA does before and after a
launch. Kernels with `q_out_dma.py` pick rows out of the tokens themselves.
"""

import dataclasses

import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.registers import SUBLANES
from torch_paged_attn.backends.tpu.softmax import base_2
from torch_paged_attn.backends.tpu.tiles import Cut


@dataclasses.dataclass(frozen=True)
class Heads:
    """How a launch's rows are numbered: `row = g * tile_q + token` for query head `g` of a KV
    head's group. KV heads whose rows are stacked count as one here, and their groups as one group.
    """

    num_kv_heads: int
    group_size: int
    tile_q: int
    unit: int = SUBLANES  # rows are padded to multiples of it

    def pad(self, rows: Array, value: float = 0.0) -> Array:
        """(..., rows, n) with `rows` padded to a multiple of `unit`."""
        padding = ((0, 0), (0, 0), (0, -rows.shape[2] % self.unit), (0, 0))
        return jnp.pad(rows, padding, constant_values=value)

    def of_tokens(self, x: Array, cut: Cut, absent: float | None = None) -> Array:
        """(total_q, num_heads, n) as (num_tiles, num_kv_heads, rows, n).

        Rows that are no tokens hold `absent`, or any number if it is None.
        """
        num_tiles, tile_q = cut.token.shape
        x = x[cut.token]
        if absent is not None:
            is_there = jnp.arange(tile_q) < cut.tiles.num_tokens[:, None]
            x = jnp.where(is_there[:, :, None, None], x, jnp.asarray(absent, x.dtype))
        x = x.reshape(num_tiles, tile_q, self.num_kv_heads, self.group_size, -1)
        x = x.transpose(0, 2, 3, 1, 4).reshape(num_tiles, self.num_kv_heads, -1, x.shape[-1])
        return self.pad(x, absent or 0.0)

    def to_tokens(self, x: Array, cut: Cut) -> Array:
        """(num_tiles, num_kv_heads, rows, n) as (total_q, num_heads, n)."""
        num_tiles, num_kv_heads, _, width = x.shape
        x = x[:, :, : self.group_size * self.tile_q]
        x = x.reshape(num_tiles, num_kv_heads, self.group_size, self.tile_q, width)
        x = x.transpose(0, 3, 1, 2, 4).reshape(num_tiles * self.tile_q, -1, width)
        return x[cut.tile_of * self.tile_q + cut.place_of]

    def folded(self, q: Array, fold: int) -> Array:
        """(tiles, heads, rows, n) as (tiles, heads, fold * rows, fold * n), for keys of which
        `fold` lie in a row. The i-th copy of the rows has its numbers where the i-th key of a row
        lies, and zeros elsewhere.
        """
        width = q.shape[-1]
        lanes = ((i * width, (fold - 1 - i) * width) for i in range(fold))
        axes = ((0, 0),) * (q.ndim - 1)
        return jnp.concatenate([jnp.pad(q, (*axes, both)) for both in lanes], axis=2)

    def of_heads(self, values: Array, fold: int = 1) -> Array:
        """([batch,] num_heads) as (1 or batch, num_kv_heads, fold * rows, 1): a head's number in
        each of its rows, all rows `fold` times.
        """
        x = values.astype(jnp.float32).reshape(-1, self.num_kv_heads, self.group_size, 1)
        x = jnp.broadcast_to(x, (*x.shape[:3], self.tile_q))
        return jnp.tile(self.pad(x.reshape(*x.shape[:2], -1, 1)), (1, 1, fold, 1))

    def of_bias(self, bias: Array, cut: Cut, block_k: int) -> Array:
        """A bias (1 or num_heads, total_q, keys) as (num_tiles, 1 or num_kv_heads, rows, keys) in
        base 2, with keys padded to whole blocks of `block_k`.
        """
        if bias.dtype == jnp.bool_:
            bias = jnp.where(bias, 0.0, -jnp.inf)
        else:
            bias = base_2(bias.astype(jnp.float32))
        bias = jnp.pad(bias, ((0, 0), (0, 0), (0, -bias.shape[2] % block_k)))
        x = bias[:, cut.token].swapaxes(0, 1)  # (num_tiles, heads, tile_q, keys)
        num_tiles, heads, _, keys = x.shape
        if heads == 1:
            x = jnp.broadcast_to(x, (num_tiles, self.group_size, self.tile_q, keys))
        # padding rows see no key
        return self.pad(x.reshape(num_tiles, max(1, heads // self.group_size), -1, keys), -jnp.inf)
