"""Keys and values are laid out as pages; one DMA loads a page with all of its heads.

A paged cache is read where it is. If its rows have 64, 32, 16 or 8 numbers, several keys are read
as one row of whole lanes (*folded*), without a copy if the cache was allocated in this shape
(`packed_shape`). Packed sequences, and pages that are no whole number of register tiles, are first
copied into pages by XLA: one more pass over the keys.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.dtypes import LANES, SUBLANES, rows_of_tile, to_bits
from torch_paged_attn.backends.tpu.tiles import Lengths, count_up

REPAGED = 128  # keys of a page that keys are copied into
LEAST_NUMBERS = 8  # of a key of which several are read as one row


class Pages(NamedTuple):
    """Page `n` of sequence `b` is `table[start + n]`; `start` is `b * table_stride`, or
    `table_start[b]` where sequences have different numbers of entries.
    """

    # (num_pages, num_kv_heads, page_size // fold, fold * head_dim); or k and v as one array, with
    # an axis of 2 in front, and `v` is None
    k: Array
    v: Array | None
    table: Array
    table_start: Array | None = None  # (batch,)
    table_stride: int = 0
    fold: int = 1  # keys of a row
    shared: int = 0  # if values are the first numbers of keys: how many. Then `v` is None

    @property
    def page_size(self) -> int:
        return self.k.shape[-2] * self.fold

    def table_of_blocks(self, pages: int) -> Array:
        """The table, padded with the entries that a block of so many pages reads past its end."""
        beyond = -self.table_stride % pages if self.table_stride else pages
        return jnp.pad(self.table, (0, beyond))

    @property
    def widths(self) -> tuple[int, int]:
        """Numbers of a row of keys, and of one of values."""
        return self.k.shape[-1], self.shared or (self.k if self.v is None else self.v).shape[-1]


def keys_per_step(page_size: int, fold: int = 1) -> int:
    """The number of keys of which a block has to be a multiple: blocks are whole pages, and a row
    of scores fills whole lanes."""
    return math.lcm(page_size, fold * LANES)


def keys_per_row(head_dim: int) -> int:
    """How many keys a row of LANES numbers holds; 1 unless keys fill it evenly."""
    return LANES // head_dim if head_dim >= LEAST_NUMBERS and LANES % head_dim == 0 else 1


def packed_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape with rows of whole lanes for a cache `(..., page_size, head_dim)`.

    If rows have fewer than 128 numbers, XLA lays the page's number along the lanes of an array and
    not the row, so that a kernel would need a copy. An array of the shape returned here holds the
    same numbers in the same order, as a kernel reads them, and the JAX functions take it in
    place of the other one. Rows of 80 or 576 numbers, which do not fill whole lanes, are padded
    with numbers that belong to no key and have to be finite; a cache write makes them zeros.
    """
    *front, page_size, head_dim = shape
    fold = keys_per_row(head_dim)
    if fold == 1 and head_dim >= LEAST_NUMBERS:
        return (*front, page_size, -(-head_dim // LANES) * LANES)
    if page_size % (fold * SUBLANES):
        return shape
    return (*front, page_size // fold, fold * head_dim)


def heads_first(sharding: Any) -> Any:
    """A format for a cache of shape (2, num_pages, page_size, num_kv_heads, head_dim), in which its
    memory is that of (2, num_pages, num_kv_heads, page_size, head_dim). A kernel reads it without a
    copy. Allocate the cache with it:

        jax.jit(lambda: jnp.zeros(shape), out_shardings=heads_first(sharding))()

    Then give each op `cache.swapaxes(2, 3)`, in a function that is compiled with this format for
    the cache in `in_shardings` and `out_shardings`.
    """
    from jax.experimental.layout import Format, Layout

    return Format(Layout((0, 1, 3, 2, 4)), sharding)


def with_rows(cache: Array, head_dim: int, *, packed: bool) -> Array:
    """A cache of either shape, with rows of whole lanes if `packed`, else a row for each key."""
    *front, rows, width = cache.shape
    if width % head_dim:
        return cache[..., :head_dim]
    fold = width // head_dim
    shape = (*front, rows * fold, width // fold)
    return cache.reshape(packed_shape(shape) if packed else shape)


def fold_of(call: Call) -> int:
    """How many keys one row holds where the kernel reads this call's cache. It is 1 for calls with
    a bias, dropout, a layout or scales by token, which need scores with a column for each key, and
    where values have another width than keys or are their first numbers.
    """
    is_plain = call.op == "flash_varlen" and call.attn_bias is None and call.dropout_p == 0.0
    is_plain = is_plain and not call.has_token_scales
    width_v = (call.k if call.v is None else call.v).shape[-1]
    if not is_plain or width_v != call.k.shape[-1] or call.values_are_keys:
        return 1
    page_size = call.k.shape[-2] * call.keys_of_row
    return page_size // packed_shape((page_size, call.head_dim))[0]


def lay_out_pages(call: Call, lengths: Lengths, first_key: Array, *, widest_step: int) -> Pages:
    """The pages of a call, which are copied if need be. `first_key` (batch,): the first row of a
    packed sequence; `widest_step`: the most keys of a block."""
    k, v, block_table = call.k, call.v, call.block_table
    fold = 1 if block_table is None else fold_of(call)
    if block_table is None:
        bound = (k.shape[0] + lengths.key.shape[0] * (REPAGED - 1)) // REPAGED
        return _repage(
            (k, v), lambda x, b, j: x[jnp.minimum(first_key[b] + j, x.shape[0] - 1)], lengths, bound
        )

    shared = -(-call.head_dim_v // LANES) * LANES if call.values_are_keys else 0
    v = None if shared else v
    batch, max_pages = block_table.shape
    # ids are not checked on the device: a wrong one must not read outside the cache
    table = jnp.clip(block_table, 0, k.shape[-4] - 1)
    page_size = k.shape[-2] * call.keys_of_row
    whole = SUBLANES if fold > 1 else rows_of_tile(k.dtype)
    is_readable = page_size // fold % whole == 0 and keys_per_step(page_size, fold) <= widest_step
    is_packed = fold > 1 and is_readable
    is_filled = all(x.shape[-1] % LANES == 0 for x in (k, v) if x is not None)
    is_taken_apart = call.keys_of_row > 1 and not is_packed
    if is_taken_apart or (is_readable and fold == 1 and not is_filled):
        # rows that are taken apart or filled are copied: only the call's pages are
        k, v, table = _picked(k, v, table)
    if call.keys_of_row > 1 or is_packed:
        k = with_rows(k, call.head_dim, packed=is_packed)
        v = None if v is None else with_rows(v, call.head_dim_v, packed=is_packed)
    if is_readable:
        k, v = _filled(to_bits(k)), None if v is None else _filled(to_bits(v))
        return Pages(k, v, table.reshape(-1), table_stride=max_pages, fold=fold, shared=shared)

    def stored(cache: tuple[Array, tuple[int, ...], int], b: Array, j: Array) -> Array:
        x, plane, width = cache
        column = jnp.minimum(j // page_size, max_pages - 1)
        place = (*plane, table[b, column], slice(None), j % page_size)
        return x[place][..., :width]

    # a slice of the whole cache (k or v of one array, the first numbers of rows) would be a copy:
    # `stored` slices what it has read
    planes = ((0,), (1,)) if k.ndim == 5 else ((), ())
    widths = call.head_dim, call.head_dim_v
    caches = zip((k, k if v is None else v), planes, widths, strict=True)
    bound = batch * -(-max_pages * page_size // REPAGED)
    return _repage(caches, stored, lengths, bound)


def _picked(k: Array, v: Array | None, table: Array) -> tuple[Array, Array | None, Array]:
    """Keys and values of the pages in `table` alone, and a table for these; of all pages if the
    table has more entries.
    """
    ids = table.reshape(-1)
    if ids.shape[0] >= k.shape[-4]:
        return k, v, table
    own = jnp.arange(ids.shape[0], dtype=jnp.int32).reshape(table.shape)
    if k.ndim == 5:  # keys and values as one
        return k[0, ids], k[1, ids], own
    return k[ids], None if v is None else v[ids], own


def _repage(caches: Iterable[Any], stored, lengths: Lengths, bound: int) -> Pages:
    """Copy keys and values into at most `bound` pages. `stored(x, sequence, key)` reads rows
    `(num_kv_heads, dim)` of `x`, one of the two `caches`.
    """
    batch = lengths.key.shape[0]
    counts = -(-lengths.key // REPAGED)
    sequence, rank = count_up(counts, max(bound, 1))
    sequence = jnp.minimum(sequence, batch - 1)[:, None]
    key = rank[:, None] * REPAGED + jnp.arange(REPAGED)
    k, v = (stored(x, sequence, key).swapaxes(1, 2) for x in caches)
    start = (jnp.cumsum(counts) - counts).astype(jnp.int32)
    k, v = (_filled(to_bits(x)) for x in (k, v))
    return Pages(k, v, jnp.arange(k.shape[0], dtype=jnp.int32), start)


def _filled(x: Array) -> Array:
    """Rows that end in zeros where they would not fill whole lanes."""
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, -x.shape[-1] % LANES)))
