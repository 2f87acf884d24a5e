"""`reshape_and_cache` in JAX: tiles of the cache are read, changed and written back, pipelined.

A DMA cannot write one row of 16 or 8 bits, which is half or a quarter of a register's row, so the
unit is a tile of a page's slots, all heads of it together. The kernel walks the tokens in their
order and takes neighbours together whose slots are neighbours in one tile: one DMA brings their
rows, loads with strides pick a head's. A tile that is filled whole is not read. Of two tokens for
one slot the later one is kept, since a tile that is still being written is waited for.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.config import LANES
from torch_paged_attn.backends.tpu.float16 import to_bits
from torch_paged_attn.backends.tpu.refusal import refuse

STORED = ("float8_e4m3fn", "float8_e5m2", "int8")
NUM_BUFFERS = 16

# tokens of one launch: their slots lie in the scalar core's memory
MOST_TOKENS = 1 << 17

# bytes from one part of a DMA to the next: an int32 in libtpu
FARTHEST = 2**31

# runs that are being read ahead; a tile's write-back has as many runs of time to end
AHEAD = NUM_BUFFERS // 2


class Runs(NamedTuple):
    """Tokens whose slots are neighbours in one tile of the cache; int32 of each buffer, in SMEM."""

    tile: Any
    token: Any  # the first one
    place: Any  # its slot in the tile
    size: Any  # 0 where there is no run any more
    is_late: Any  # whether the tile may still be written when its buffer is free


class Place(NamedTuple):
    """Where the walk stands."""

    run: Array
    token: Array  # the first one that is in no run yet
    written: Array  # runs whose write-back has been waited for


def tile_rows(cache: Array) -> int:
    """Slots that one register holds of a column."""
    return 32 // cache.dtype.itemsize


def _has_tiles(key: Array, cache: Array) -> bool:
    """Whether the kernel writes this cache: pages are whole tiles, or rows hold several keys."""
    is_packed = cache.shape[-1] // key.shape[2] > 1 and cache.shape[-1] % key.shape[2] == 0
    return cache.shape[-2] % tile_rows(cache) == 0 or is_packed


class CacheWriter:
    """The refs of one kernel, and what it does with a run.

    A row of the cache holds `fold` keys, and a new row its numbers as often. New rows are
    (num_tokens, parts of heads, LANES) where heads are of whole lanes.
    """

    def __init__(self, refs: tuple[Any, ...], *, caches: int, fold: int, interpret: Any) -> None:
        self.slots, refs = refs[0], refs[1:]
        self.new_hbm, refs = refs[:2], refs[2 + caches :]
        self.caches, refs = refs[:caches], refs[caches:]
        self.tiles, refs = refs[:caches], refs[caches:]
        self.rows, refs = refs[:2], refs[2:]
        self.read_done, self.write_done, self.rows_done = refs[:3]
        self.runs = Runs(*refs[3:])
        self.fold, self.interpret = fold, interpret

    @property
    def height(self) -> int:
        """Rows of a tile."""
        return self.tiles[0].shape[3]

    @property
    def most(self) -> int:
        """Slots of a tile."""
        return self.height * self.fold

    @property
    def num_slots(self) -> int:
        return self.caches[0].shape[1] * self.caches[0].shape[3] * self.fold

    def _tiles(self, slot: Array) -> list[tuple[Any, Any]]:
        """The tiles in this buffer, and where they lie in the caches: of keys and values in one
        cache both, unless they lie too far apart for one DMA.
        """
        page_rows = self.caches[0].shape[3]
        tiles_per_page = jnp.int32(page_rows // self.height)
        tile = self.runs.tile[slot]
        first = pl.multiple_of(lax.rem(tile, tiles_per_page) * self.height, self.height)
        where = lax.div(tile, tiles_per_page), slice(None), pl.ds(first, self.height)
        found = []
        for tiles, cache in zip(self.tiles, self.caches, strict=True):
            planes = range(cache.shape[0])
            plane_bytes = math.prod(cache.shape[1:]) * cache.dtype.itemsize
            some = [slice(None)] if plane_bytes < FARTHEST else [slice(i, i + 1) for i in planes]
            for which in some:
                place = which, *where
                found.append((tiles.at[slot, which], cache.at[place]))
        return found

    def _reads(self, slot: Array, do: str) -> None:
        for tile, stored in self._tiles(slot):
            getattr(pltpu.make_async_copy(stored, tile, self.read_done.at[slot]), do)()

    def _writes(self, slot: Array, do: str) -> None:
        for tile, stored in self._tiles(slot):
            getattr(pltpu.make_async_copy(tile, stored, self.write_done.at[slot]), do)()

    def _new_rows(self, slot: Array, do: str) -> None:
        """New rows go to their places."""
        token, place = self.runs.token[slot], self.runs.place[slot]

        def move(first: Any, count: Any) -> None:
            for source, rows in zip(self.new_hbm, self.rows, strict=True):
                there = rows.at[slot, pl.ds(place + first, count)]
                here = source.at[pl.ds(token + first, count)]
                copy = pltpu.make_async_copy(here, there, self.rows_done.at[slot])
                getattr(copy, do)()

        if self.interpret is True:  # which knows no size that is not a number
            lax.fori_loop(0, self.runs.size[slot], lambda i, _: move(i, 1), None)
        else:
            move(0, self.runs.size[slot])

    def _is_whole(self, slot: Array) -> Array:
        return self.runs.size[slot] == self.most

    def _next_run(self, token: Array) -> tuple[Array, Array]:
        """The first token from `token` on that is kept, and how many there are in its run."""
        total = jnp.int32(self.slots.shape[0])

        def slot_of(token: Array) -> Array:
            return self.slots[jnp.minimum(token, total - 1)]

        def is_skipped(token: Array) -> Array:
            slot = slot_of(token)
            return (token < total) & ((slot < 0) | (slot >= self.num_slots))

        token = lax.while_loop(is_skipped, lambda token: token + 1, token)
        slot = slot_of(token)
        room = jnp.minimum(self.most - lax.rem(slot, jnp.int32(self.most)), total - token)

        def is_neighbour(size: Array) -> Array:
            return (size < room) & (slot_of(token + size) == slot + size)

        def count_whole(_: Any, size: Array) -> Array:
            """All at once: a loop's turn takes longer than a comparison."""
            differences = [self.slots[token + i] ^ (slot + i) for i in range(self.most)]
            return jnp.where(functools.reduce(jnp.bitwise_or, differences) == 0, self.most, size)

        # a loop, since what hangs on a condition would be computed whether it holds or not
        may_be_whole = (room == self.most) & (
            slot_of(token + self.most - 1) == slot + self.most - 1
        )
        size = lax.fori_loop(0, may_be_whole.astype(jnp.int32), count_whole, jnp.int32(1))
        size = lax.while_loop(is_neighbour, lambda size: size + 1, size)
        return token, jnp.where(token < total, size, 0)

    def fetch(self, run: Array, token: Array) -> Array:
        """Find a run, and start the copies of its tile and its rows; the token behind it."""
        slot = lax.rem(run, jnp.int32(NUM_BUFFERS))
        token, size = self._next_run(token)
        self.runs.size[slot] = size

        @pl.when(size > 0)
        def _() -> None:
            first = self.slots[token]
            tile = lax.div(first, jnp.int32(self.most))
            others = [self.runs.tile[i] == tile for i in range(NUM_BUFFERS)]
            is_late = functools.reduce(jnp.logical_or, others)
            self.runs.tile[slot] = tile
            self.runs.token[slot] = token
            self.runs.place[slot] = lax.rem(first, jnp.int32(self.most))
            self.runs.is_late[slot] = is_late.astype(jnp.int32)
            self._new_rows(slot, "start")
            pl.when(~is_late & (size < self.most))(lambda: self._reads(slot, "start"))

        return token + size

    def wait_for_writes(self, written: Array, stop: Array) -> Array:
        """Wait for the write-back of the runs before `stop`, of which `written` have been."""
        lax.fori_loop(
            written,
            stop,
            lambda run, _: self._writes(lax.rem(run, jnp.int32(NUM_BUFFERS)), "wait"),
            None,
        )
        return jnp.maximum(written, stop)

    def change(self, at: Place) -> Place:
        """Write the run, and start the copies of a later one."""
        slot = lax.rem(at.run, jnp.int32(NUM_BUFFERS))
        is_late = self.runs.is_late[slot] == 1
        behind = at.run + (AHEAD + 1 - NUM_BUFFERS)
        written = self.wait_for_writes(at.written, jnp.where(is_late, at.run, behind))
        token = self.fetch(at.run + AHEAD, at.token)
        is_whole = self._is_whole(slot)
        pl.when(is_late & ~is_whole)(lambda: self._reads(slot, "start"))
        pl.when(~is_whole)(lambda: self._reads(slot, "wait"))
        self._new_rows(slot, "wait")
        pl.when(is_whole)(lambda: self._put(slot, is_whole=True))
        pl.when(~is_whole)(lambda: self._put(slot, is_whole=False))
        self._writes(slot, "start")
        return Place(at.run + 1, token, written)

    def _put(self, slot: Array, *, is_whole: bool) -> None:
        """Change the tiles in this buffer."""
        place, size = self.runs.place[slot], self.runs.size[slot]
        planes = [(tiles, i) for tiles in self.tiles for i in range(tiles.shape[1])]
        for (tiles, plane), rows in zip(planes, self.rows, strict=True):
            heads, height, width = tiles.shape[2:]
            index, lane = (
                lax.broadcasted_iota(jnp.int32, (height, width), axis) for axis in range(2)
            )
            part = lax.div(lane, jnp.int32(width // self.fold))
            index = index * self.fold + part
            is_new = (index >= place) & (index < place + size)
            parts = [self._heads_of(rows, slot, i, width) for i in range(self.fold)]
            for head in range(heads):
                new = parts[0][head]
                for i in range(1, self.fold):
                    new = jnp.where(part == i, parts[i][head], new)
                if not is_whole:
                    new = jnp.where(is_new, new, tiles[slot, plane, head].astype(jnp.float32))
                tiles[slot, plane, head] = new.astype(tiles.dtype)

    def _heads_of(self, rows: Any, slot: Array, first: int, width: int) -> list[Array]:
        """New rows from the first one of a run's buffer on, each `fold`-th: (height, width) of each
        head, in float32.
        """
        _, most, per_token, numbers = rows.shape
        paired = 2 if rows.dtype == jnp.bfloat16 else 1
        if self.interpret or numbers != LANES:  # which knows no refs of another shape or type
            these = pl.ds(first, self.height, stride=self.fold) if self.fold > 1 else slice(None)
            found = [rows[slot, these, i].astype(jnp.float32) for i in range(per_token)]
        else:
            flat = rows.at[slot]
            if paired > 1:
                flat = flat.bitcast(jnp.int32)
            step = per_token // paired
            flat = flat.reshape(most * step, LANES)
            found = []
            for i in range(step):
                x = flat[pl.ds(first * step + i, self.height, stride=self.fold * step), :]
                if paired > 1:  # bfloat16 is the upper half of a float32
                    halves = x << 16, x & jnp.int32(-65536)
                    found += [lax.bitcast_convert_type(half, jnp.float32) for half in halves]
                else:
                    found.append(x.astype(jnp.float32))
        each = max(1, width // numbers)
        groups = [found[i : i + each] for i in range(0, len(found), each)]
        return [x[0] if each == 1 else jnp.concatenate(x, axis=1) for x in groups]


def _write_kernel(*refs: Any, **options: Any) -> None:
    """`refs`: slots, new rows, caches twice (aliased), then buffers, semaphores and runs."""
    writer = CacheWriter(refs, **options)
    for i in range(NUM_BUFFERS):
        writer.runs.tile[i] = jnp.int32(-1)
    token = lax.fori_loop(0, AHEAD, writer.fetch, jnp.int32(0))

    def is_run(at: Place) -> Array:
        return writer.runs.size[lax.rem(at.run, jnp.int32(NUM_BUFFERS))] > 0

    end = lax.while_loop(is_run, writer.change, Place(jnp.int32(0), token, jnp.int32(0)))
    writer.wait_for_writes(end.written, end.run)


def _write(
    new: tuple[Array, ...], caches: tuple[Array, ...], slots: Array, interpret: Any
) -> tuple[Array, ...]:
    """`caches` are one array of two planes, or two arrays; `new` is of their type."""
    for first in range(0, slots.shape[0], MOST_TOKENS):
        some = slice(first, first + MOST_TOKENS)
        caches = _launch(tuple(x[some] for x in new), caches, slots[some], interpret)
    return caches


def _launch(
    new: tuple[Array, ...], caches: tuple[Array, ...], slots: Array, interpret: Any
) -> tuple[Array, ...]:
    """Write so many tokens that their slots fit into the scalar core's memory."""
    dtype, shapes = caches[0].dtype, [cache.shape for cache in caches]
    new, caches = tuple(map(to_bits, new)), tuple(map(to_bits, caches))
    caches = tuple(cache.reshape(-1, *cache.shape[-4:]) for cache in caches)
    page_rows, width = caches[0].shape[-2:]
    fold = width // new[0].shape[2]
    if fold > 1:
        new = tuple(jnp.tile(x, (1, 1, fold)) for x in new)
    height = math.gcd(tile_rows(caches[0]), page_rows)
    new = tuple(map(_as_words, new))
    tiles = [
        pltpu.VMEM((NUM_BUFFERS, planes, heads, height, width), cache.dtype)
        for cache in caches
        for planes, _, heads, _, width in [cache.shape]
    ]
    rows = [pltpu.VMEM((NUM_BUFFERS, height * fold, *x.shape[1:]), x.dtype) for x in new]
    somewhere = pl.BlockSpec(memory_space=pl.ANY)
    written = pl.pallas_call(
        functools.partial(_write_kernel, caches=len(caches), fold=fold, interpret=interpret),
        out_shape=tuple(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in caches),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[somewhere] * (len(new) + len(caches)),
            out_specs=tuple(somewhere for _ in caches),
            scratch_shapes=[
                *tiles,
                *rows,
                *[pltpu.SemaphoreType.DMA((NUM_BUFFERS,))] * 3,
                *[pltpu.SMEM((NUM_BUFFERS,), jnp.int32) for _ in Runs._fields],
            ],
        ),
        input_output_aliases={1 + len(new) + i: i for i in range(len(caches))},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary",), disable_bounds_checks=True
        ),
        interpret=interpret,
        name="paged_attn_reshape_and_cache",
    )(slots.astype(jnp.int32), *new, *caches)
    if dtype == jnp.float16:
        written = tuple(lax.bitcast_convert_type(cache, dtype) for cache in written)
    return tuple(cache.reshape(shape) for cache, shape in zip(written, shapes, strict=True))


def _as_words(new: Array) -> Array:
    """New rows as loads with strides can read them: 32 bits, or pairs of bfloat16."""
    tokens, heads, width = new.shape
    if new.dtype != jnp.bfloat16 or heads * (width // LANES) % 2:
        new = new.astype(jnp.float32)
    return new if width % LANES else new.reshape(tokens, -1, LANES)


def _kept(slots: Array, num_slots: int) -> tuple[Array, Array]:
    """Tokens in the order of their slots, and which are kept: of two for one slot the later one."""
    skipped = jnp.int32(num_slots)
    slots = jnp.where((slots >= 0) & (slots < num_slots), slots, skipped).astype(jnp.int32)
    token = jnp.argsort(slots, stable=True).astype(jnp.int32)
    slot = slots[token]
    # a stable sort keeps the later of two tokens behind the earlier one
    return token, jnp.append(slot[1:] != slot[:-1], True) & (slot < skipped)


def _scatter(new: Array, cache: Array, slots: Array, plane: tuple[int, ...] = ()) -> Array:
    """Write pages that are no whole number of tiles by XLA's scatter."""
    num_pages, _, page_size, _ = cache.shape[-4:]
    token, kept = _kept(slots, num_pages * page_size)
    slot = slots[token]
    page = jnp.where(kept, slot // page_size, num_pages)
    where = (*plane, page, slice(None), slot % page_size)
    return cache.at[where].set(new[token], mode="drop")


def _store(x: Array, dtype: Any, scale: Array | None) -> Array:
    """Convert to the cache's dtype: rounded to nearest even, 8 bits saturated."""
    if dtype == jnp.int16:
        return to_bits(x)
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
    taken = (given, *STORED, "int16") if given == "float16" else (given, *STORED)
    if stored not in taken:
        names = ", ".join(taken)
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
    new = _new_rows((key, value), (k_scale, v_scale), slot_mapping, (kv_cache, kv_cache))
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
    new = _new_rows((key, value), (k_scale, v_scale), slot_mapping, (k_cache, v_cache))
    if slot_mapping.shape[0] == 0 or k_cache.size == 0:
        return k_cache, v_cache
    if _has_tiles(key, k_cache):
        k_cache, v_cache = _write(new, (k_cache, v_cache), slot_mapping, interpret)
        return k_cache, v_cache
    return _scatter(new[0], k_cache, slot_mapping), _scatter(new[1], v_cache, slot_mapping)


def _new_rows(
    values: tuple[Array, Array],
    scales: tuple[Array | None, ...],
    slots: Array,
    caches: tuple[Array, Array],
) -> tuple[Array, ...]:
    """New keys and values in the cache's dtype, with zeros where its rows end in numbers of no key;
    rows past the length of `slots` are padding.
    """
    rows = []
    for x, scale, cache in zip(values, scales, caches, strict=True):
        stored = _store(x[: slots.shape[0]], cache.dtype, scale)
        if cache.shape[-1] % x.shape[2]:
            stored = jnp.pad(stored, ((0, 0), (0, 0), (0, cache.shape[-1] - x.shape[2])))
        rows.append(stored)
    return tuple(rows)
