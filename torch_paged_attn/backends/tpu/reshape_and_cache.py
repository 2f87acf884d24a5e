"""`reshape_and_cache` in JAX: tiles of the cache are read, changed and written back, pipelined.

A DMA cannot write one row of 16 or 8 bits, which is half or a quarter of a register's row, so the
unit is a tile of a page's slots, all heads of it together. Tokens are sorted by slot: a tile is
changed once for all tokens that fall into it, and of two tokens for one slot the later one is kept.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.float16 import to_bits
from torch_paged_attn.backends.tpu.refusal import refuse

STORED = ("float8_e4m3fn", "float8_e5m2", "int8")
NUM_BUFFERS = 16

# tiles that are being read ahead; a tile's write-back has as many tiles of time to end
AHEAD = NUM_BUFFERS // 2


class Groups(NamedTuple):
    """Tokens by the tile of the cache that they go to; int32."""

    num_groups: Array  # (1,)
    tile: Array  # (num_tokens,) of a group
    start: Array  # (num_tokens + 1,) a group's first token, in the sorted order
    slot: Array  # (num_tokens,) sorted
    token: Array  # (num_tokens,) which token that is


def tile_rows(cache: Array) -> int:
    """Slots that one register holds of a column."""
    return 32 // cache.dtype.itemsize


def _has_tiles(key: Array, cache: Array) -> bool:
    """Whether the kernel writes this cache: pages are whole tiles, or rows hold several keys."""
    return cache.shape[-2] % tile_rows(cache) == 0 or cache.shape[-1] > key.shape[2]


def _group(slots: Array, num_slots: int, rows: int) -> Groups:
    size = slots.shape[0]
    index = jnp.arange(size, dtype=jnp.int32)
    skipped = jnp.int32(num_slots)
    slots = jnp.where((slots >= 0) & (slots < num_slots), slots, skipped).astype(jnp.int32)
    token = jnp.argsort(slots, stable=True).astype(jnp.int32)
    slot = slots[token]
    # a stable sort keeps the later of two tokens behind the earlier one
    is_last = jnp.append(slot[1:] != slot[:-1], True) & (slot < skipped)
    order = jnp.argsort(~is_last, stable=True)
    slot, token = slot[order], token[order]
    num_kept = jnp.sum(is_last).astype(jnp.int32)
    tile = slot // rows
    is_first = (index < num_kept) & jnp.append(True, tile[1:] != tile[:-1])
    count = jnp.sum(is_first).astype(jnp.int32)
    first = jnp.nonzero(is_first, size=size, fill_value=0)[0].astype(jnp.int32)
    start = jnp.where(index < count, first, num_kept)
    return Groups(count[None], tile[first], jnp.append(start, num_kept), slot, token)


def _write_kernel(*refs: Any, num_caches: int, num_planes: int, fold: int) -> None:
    """`refs`: the groups, new rows, caches twice (aliased), then buffers and semaphores of each.

    A row of the cache holds `fold` keys, and a new row its numbers as often.
    """
    groups = Groups(*refs[: len(Groups._fields)])
    refs = refs[len(Groups._fields) :]
    rows_hbm, refs = refs[:num_planes], refs[num_planes + num_caches :]
    caches, refs = refs[:num_caches], refs[num_caches:]
    planes = caches if num_caches == num_planes else [caches[0].at[i] for i in range(num_planes)]
    tiles, rows, (read_done, write_done, rows_done) = (
        refs[:num_planes],
        refs[num_planes : 2 * num_planes],
        refs[2 * num_planes :],
    )
    count = groups.num_groups[0]
    height = tiles[0].shape[2]

    def stored(plane: Any, group: Array) -> Any:
        tiles_per_page = jnp.int32(plane.shape[2] // height)
        tile = groups.tile[group]
        first = pl.multiple_of(lax.rem(tile, tiles_per_page) * height, height)
        return plane.at[lax.div(tile, tiles_per_page), :, pl.ds(first, height)]

    def reads(group: Array, slot: Array) -> list[Any]:
        return [
            pltpu.make_async_copy(stored(plane, group), tile.at[slot], read_done.at[slot])
            for plane, tile in zip(planes, tiles, strict=True)
        ]

    def writes(group: Array, slot: Array) -> list[Any]:
        return [
            pltpu.make_async_copy(tile.at[slot], stored(plane, group), write_done.at[slot])
            for plane, tile in zip(planes, tiles, strict=True)
        ]

    def for_tokens(group: Array, slot: Array, do: Any) -> None:
        first = groups.start[group]

        def body(i: Array, _: None) -> None:
            for source, target in zip(rows_hbm, rows, strict=True):
                row = source.at[groups.token[i]]
                do(pltpu.make_async_copy(row, target.at[slot, i - first], rows_done.at[slot]))

        lax.fori_loop(first, groups.start[group + 1], body, None)

    def fetch(group: Array, slot: Array) -> None:
        @pl.when(group < count)
        def _() -> None:
            for copy in reads(group, slot):
                copy.start()
            for_tokens(group, slot, lambda copy: copy.start())

    def change(group: Array, _carry: None) -> None:
        slot = lax.rem(group, jnp.int32(NUM_BUFFERS))
        ahead = lax.rem(group + AHEAD, jnp.int32(NUM_BUFFERS))

        @pl.when(group + AHEAD >= NUM_BUFFERS)
        def _() -> None:
            for copy in writes(group + AHEAD - NUM_BUFFERS, ahead):
                copy.wait()

        fetch(group + AHEAD, ahead)
        for copy in reads(group, slot):
            copy.wait()
        for_tokens(group, slot, lambda copy: copy.wait())
        first = groups.start[group]
        for tile, new in zip(tiles, rows, strict=True):
            index = lax.broadcasted_iota(jnp.int32, tile.shape[1:], 1)
            if fold > 1:
                lane = lax.broadcasted_iota(jnp.int32, tile.shape[1:], 2)
                index = index * fold + lax.div(lane, jnp.int32(tile.shape[3] // fold))

            def put(i: Array, old: Array, new: Any = new, index: Array = index) -> Array:
                row = new[slot, i - first].astype(jnp.float32)[:, None]
                place = lax.rem(groups.slot[i], jnp.int32(height * fold))
                return jnp.where(index == place, row, old)

            old = tile[slot].astype(jnp.float32)
            changed = lax.fori_loop(first, groups.start[group + 1], put, old)
            tile[slot] = changed.astype(tile.dtype)
        for copy in writes(group, slot):
            copy.start()

    for i in range(AHEAD):
        fetch(jnp.int32(i), jnp.int32(i))
    lax.fori_loop(0, count, change, None)

    def drain(group: Array, _: None) -> None:
        for copy in writes(group, lax.rem(group, jnp.int32(NUM_BUFFERS))):
            copy.wait()

    lax.fori_loop(jnp.maximum(count + AHEAD - NUM_BUFFERS, 0), count, drain, None)


def _write(
    new: tuple[Array, ...], caches: tuple[Array, ...], slots: Array, interpret: Any
) -> tuple[Array, ...]:
    """`caches` are one array of two planes, or two arrays; `new` is of their type."""
    dtype = caches[0].dtype
    new, caches = tuple(map(to_bits, new)), tuple(map(to_bits, caches))
    num_pages, heads, page_rows, width = caches[0].shape[-4:]
    fold = width // new[0].shape[2]
    if fold > 1:
        new = tuple(jnp.tile(x, (1, 1, fold)) for x in new)
    height = math.gcd(tile_rows(caches[0]), page_rows)
    groups = _group(slots, num_pages * page_rows * fold, height * fold)
    buffers = [pltpu.VMEM((NUM_BUFFERS, heads, height, x.shape[2]), caches[0].dtype) for x in new]
    rows = [pltpu.VMEM((NUM_BUFFERS, height, heads, x.shape[2]), x.dtype) for x in new]
    somewhere = pl.BlockSpec(memory_space=pl.ANY)
    first_cache = len(groups) + len(new)
    written = pl.pallas_call(
        functools.partial(_write_kernel, num_caches=len(caches), num_planes=len(new), fold=fold),
        out_shape=tuple(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in caches),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(groups),
            grid=(1,),
            in_specs=[somewhere] * (len(new) + len(caches)),
            out_specs=tuple(somewhere for _ in caches),
            scratch_shapes=buffers + rows + [pltpu.SemaphoreType.DMA((NUM_BUFFERS,))] * 3,
        ),
        input_output_aliases={first_cache + i: i for i in range(len(caches))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attn_reshape_and_cache",
    )(*groups, *new, *caches)
    if dtype == jnp.float16:
        written = tuple(lax.bitcast_convert_type(cache, dtype) for cache in written)
    return tuple(written)


def _scatter(new: Array, cache: Array, slots: Array, plane: tuple[int, ...] = ()) -> Array:
    """Write pages that are no whole number of tiles by XLA's scatter."""
    num_pages, _, page_size, _ = cache.shape[-4:]
    groups = _group(slots, num_pages * page_size, 1)
    kept = jnp.arange(slots.shape[0]) < groups.start[-1]
    page = jnp.where(kept, groups.slot // page_size, num_pages)
    where = (*plane, page, slice(None), groups.slot % page_size)
    return cache.at[where].set(new[groups.token], mode="drop")


def _store(x: Array, dtype: Any, scale: Array | None) -> Array:
    """Convert to the cache's dtype: rounded to nearest even, 8 bits saturated."""
    if dtype.name not in STORED:
        return x.astype(dtype)
    x = x.astype(jnp.float32)
    if scale is not None:
        heads = jnp.broadcast_to(scale.astype(jnp.float32), (x.shape[1],))[:, None]
        # of a broadcast XLA would take the reciprocal, which turns ties
        x = x / lax.optimization_barrier(jnp.broadcast_to(heads, x.shape))
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(x), -128, 127).astype(dtype)
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit).astype(dtype)


def unsupported(key: Array, cache: Array) -> str | None:
    """Why there is no kernel for a write: the argument, what came, what is supported."""
    given, stored = key.dtype.name, cache.dtype.name
    if stored not in (given, *STORED):
        names = ", ".join((given, *STORED))
        return f"key has dtype {given}, its cache {stored}; supported: {names}"
    return None


@functools.partial(jax.jit, static_argnames=("interpret",), donate_argnames=("kv_cache",))
def reshape_and_cache(
    key: Array,
    value: Array,
    kv_cache: Array,
    slot_mapping: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    interpret: Any = False,
) -> Array:
    """Arguments as in the op; the cache is donated, and returned with the tokens in it."""
    if (reason := unsupported(key, kv_cache)) is not None:
        refuse("reshape_and_cache", reason)
    new = _new_rows((key, value), (k_scale, v_scale), slot_mapping, kv_cache)
    if slot_mapping.shape[0] == 0 or kv_cache.size == 0:
        return kv_cache
    if _has_tiles(key, kv_cache):
        return _write(new, (kv_cache,), slot_mapping, interpret)[0]
    for plane, x in enumerate(new):
        kv_cache = _scatter(x, kv_cache, slot_mapping, (plane,))
    return kv_cache


@functools.partial(jax.jit, static_argnames=("interpret",), donate_argnames=("k_cache", "v_cache"))
def reshape_and_cache_split(
    key: Array,
    value: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: Array,
    k_scale: Array | None = None,
    v_scale: Array | None = None,
    *,
    interpret: Any = False,
) -> tuple[Array, Array]:
    """Arguments as in the op; the caches are donated, and returned with the tokens in them."""
    if (reason := unsupported(key, k_cache)) is not None:
        refuse("reshape_and_cache.split", reason)
    new = _new_rows((key, value), (k_scale, v_scale), slot_mapping, k_cache)
    if slot_mapping.shape[0] == 0 or k_cache.size == 0:
        return k_cache, v_cache
    if _has_tiles(key, k_cache):
        k_cache, v_cache = _write(new, (k_cache, v_cache), slot_mapping, interpret)
        return k_cache, v_cache
    return _scatter(new[0], k_cache, slot_mapping), _scatter(new[1], v_cache, slot_mapping)


def _new_rows(
    values: tuple[Array, Array], scales: tuple[Array | None, ...], slots: Array, cache: Array
) -> tuple[Array, ...]:
    """New keys and values in the cache's dtype; rows past the length of `slots` are padding."""
    return tuple(
        _store(x[: slots.shape[0]], cache.dtype, scale)
        for x, scale in zip(values, scales, strict=True)
    )
