"""Keys and values are laid out as pages, which one DMA loads whole, all heads of a page together.

A paged cache is read where it is. Packed keys, and pages that are no whole number of register
tiles, are copied into pages by XLA first: one more pass over the keys.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.config import LANES
from torch_paged_attn.backends.tpu.float16 import to_bits
from torch_paged_attn.backends.tpu.tiles import Lengths, count_up

REPAGED = 128  # keys in a page of our own


class Pages(NamedTuple):
    """Page `n` of sequence `b` is `table[table_start[b] + n]`."""

    k: Array  # (num_pages, num_kv_heads, page_size, head_dim), or k and v as one with 2 in front
    v: Array | None
    table: Array
    table_start: Array  # (batch,)

    @property
    def num_pages(self) -> int:
        return self.k.shape[-4]

    @property
    def num_kv_heads(self) -> int:
        return self.k.shape[-3]

    @property
    def page_size(self) -> int:
        return self.k.shape[-2]

    @property
    def head_dim(self) -> int:
        return self.k.shape[-1]

    @property
    def head_dim_v(self) -> int:
        return (self.k if self.v is None else self.v).shape[-1]


def keys_per_step(page_size: int) -> int:
    """Blocks of keys are whole pages and whole lanes."""
    return math.lcm(page_size, LANES)


def lay_out_pages(call: Call, lengths: Lengths, first_key: Array, *, widest_step: int) -> Pages:
    """`first_key` (batch,) is where a packed sequence starts; `widest_step` bounds a block."""
    k, v, block_table = call.k, call.v, call.block_table
    if block_table is None:
        bound = (k.shape[0] + lengths.key.shape[0] * (REPAGED - 1)) // REPAGED
        return _repage(
            (k, v), lambda x, b, j: x[jnp.minimum(first_key[b] + j, x.shape[0] - 1)], lengths, bound
        )

    num_pages, page_size = k.shape[-4], k.shape[-2]
    batch, max_pages = block_table.shape
    # ids are not checked on the device: a wrong one must not read outside the cache
    table = jnp.clip(block_table, 0, num_pages - 1)
    if page_size % (32 // k.dtype.itemsize) == 0 and keys_per_step(page_size) <= widest_step:
        start = jnp.arange(batch, dtype=jnp.int32) * max_pages
        return Pages(to_bits(k), None if v is None else to_bits(v), table.reshape(-1), start)

    def stored(x: Array, b: Array, j: Array) -> Array:
        column = jnp.minimum(j // page_size, max_pages - 1)
        return x[table[b, column], :, j % page_size]

    k, v = (k[0], k[1]) if v is None else (k, v)
    bound = batch * -(-max_pages * page_size // REPAGED)
    return _repage((k, v), stored, lengths, bound)


def _repage(caches: tuple[Array, Array], stored, lengths: Lengths, bound: int) -> Pages:
    """Copy keys into pages; `stored(x, sequence, key)` reads rows `(num_kv_heads, dim)` of x."""
    batch = lengths.key.shape[0]
    counts = -(-lengths.key // REPAGED)
    sequence, rank = count_up(counts, max(bound, 1))
    sequence = jnp.minimum(sequence, batch - 1)[:, None]
    key = rank[:, None] * REPAGED + jnp.arange(REPAGED)
    k, v = (stored(x, sequence, key).swapaxes(1, 2) for x in caches)
    start = (jnp.cumsum(counts) - counts).astype(jnp.int32)
    return Pages(to_bits(k), to_bits(v), jnp.arange(k.shape[0], dtype=jnp.int32), start)
