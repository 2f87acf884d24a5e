"""`reshape_and_cache` in JAX: tiles of the cache are changed where they lie, by one kernel.

It writes by runs of tokens (`run_writer.py`). A tile that a run does not fill is read, changed
and written back.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from torch_paged_attn.backends.tpu.cache_write.run_writer import Runs, RunWriter, num_buffers
from torch_paged_attn.backends.tpu.dtypes import (
    EIGHT_BITS,
    LANES,
    refuse,
    rows_of_tile,
    to_bits,
    to_float8,
)

# tokens of one launch: their slots lie in the scalar core's memory
MOST_TOKENS = 1 << 17


def _write_kernel(*refs: Any, **options: Any) -> None:
    RunWriter(*refs, **options).walk()


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
    height = math.gcd(rows_of_tile(caches[0].dtype), page_rows)
    new = tuple(map(_as_words, new))
    buffers = _buffers(new, caches, height, fold)
    somewhere = pl.BlockSpec(memory_space=pl.ANY)
    if not interpret:
        # XLA would bring them to VMEM, if they fit, from where a kernel copies register by register
        new = tuple(pltpu.with_memory_space_constraint(x, pltpu.HBM) for x in new)
    written = pl.pallas_call(
        functools.partial(_write_kernel, num_caches=len(caches), fold=fold, interpret=interpret),
        out_shape=tuple(jax.ShapeDtypeStruct(c.shape, c.dtype) for c in caches),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(1,),
            in_specs=[somewhere] * (len(new) + len(caches)),
            out_specs=tuple(somewhere for _ in caches),
            scratch_shapes=buffers,
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


def _buffers(
    new: tuple[Array, ...], caches: tuple[Array, ...], height: int, fold: int
) -> list[Any]:
    """Tiles of all planes and heads, and the new rows for them; semaphores, and what is known of
    each run.
    """
    tiles = [(cache.shape[0], cache.shape[2], height, cache.shape[4]) for cache in caches]
    rows = [(height * fold, *x.shape[1:]) for x in new]
    buffers = list(zip((*tiles, *rows), (x.dtype for x in (*caches, *new)), strict=True))
    count = num_buffers(sum(math.prod(shape) * dtype.itemsize for shape, dtype in buffers))
    return [
        *[pltpu.VMEM((count, *shape), dtype) for shape, dtype in buffers],
        *[pltpu.SemaphoreType.DMA((count,))] * 3,
        *[pltpu.SMEM((count,), jnp.int32) for _ in Runs._fields],
    ]


def _as_words(new: Array) -> Array:
    """New rows as loads with strides can read them: 32 bits, or pairs of bfloat16."""
    tokens, heads, width = new.shape
    if new.dtype != jnp.bfloat16 or heads * (width // LANES) % 2:
        new = new.astype(jnp.float32)
    return new if width % LANES else new.reshape(tokens, -1, LANES)


def _scatter(new: Array, cache: Array, slots: Array, plane: tuple[int, ...] = ()) -> Array:
    """Write pages that are no whole number of tiles by XLA's scatter. Of two tokens for one slot
    the later one is kept, which a stable sort puts behind the earlier one.
    """
    num_pages, _, page_size, _ = cache.shape[-4:]
    skipped = jnp.int32(num_pages * page_size)
    slots = jnp.where((slots >= 0) & (slots < skipped), slots, skipped).astype(jnp.int32)
    token = jnp.argsort(slots, stable=True).astype(jnp.int32)
    slot = slots[token]
    is_kept = jnp.append(slot[1:] != slot[:-1], True) & (slot < skipped)
    page = jnp.where(is_kept, slot // page_size, num_pages)
    where = (*plane, page, slice(None), slot % page_size)
    return cache.at[where].set(new[token], mode="drop")


def _stored(x: Array, cache: Array, scale: Array | None) -> Array:
    """New rows as the cache has them: rounded to nearest even, 8 bits saturated; with zeros where
    its rows end in numbers of no key.
    """
    dtype, width = cache.dtype, cache.shape[-1]
    if dtype == jnp.int16:
        x = to_bits(x)
    elif dtype.name not in EIGHT_BITS:
        x = x.astype(dtype)
    else:
        x = x.astype(jnp.float32)
        if scale is not None:
            heads = jnp.broadcast_to(scale.astype(jnp.float32), (x.shape[1],))[:, None]
            # XLA would multiply by the reciprocal of a broadcast scale, which moves ties
            x = x / lax.optimization_barrier(jnp.broadcast_to(heads, x.shape))
        is_int = dtype == jnp.int8
        x = jnp.clip(jnp.round(x), -128, 127).astype(dtype) if is_int else to_float8(x, dtype)
    filling = width - x.shape[2] if width % x.shape[2] else 0
    return jnp.pad(x, ((0, 0), (0, 0), (0, filling))) if filling else x


def unsupported(key: Array, cache: Array) -> str | None:
    """Why there is no kernel for a write: which argument, and what is supported."""
    given, stored = key.dtype.name, cache.dtype.name
    taken = (given, *EIGHT_BITS, "int16") if given == "float16" else (given, *EIGHT_BITS)
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
    new = (key, value), (k_scale, v_scale), slot_mapping
    return _with_tokens("reshape_and_cache", *new, (kv_cache,), interpret)[0]


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
    new = (key, value), (k_scale, v_scale), slot_mapping
    caches = _with_tokens("reshape_and_cache.split", *new, (k_cache, v_cache), interpret)
    return caches[0], caches[1]


def _with_tokens(
    op: str,
    values: tuple[Array, Array],
    scales: tuple[Array | None, ...],
    slots: Array,
    caches: tuple[Array, ...],
    interpret: Any,
) -> tuple[Array, ...]:
    """The caches, one array of two planes or two arrays, with keys and values in their slots."""
    key, cache = values[0], caches[0]
    if (reason := unsupported(key, cache)) is not None:
        refuse(op, reason)
    count = slots.shape[0]  # new rows behind them are padding
    each = zip(values, (cache, caches[-1]), scales, strict=True)
    new = tuple(_stored(x[:count], stored, scale) for x, stored, scale in each)
    if slots.shape[0] == 0 or cache.size == 0:
        return caches
    # the kernel writes pages that are whole tiles, or whose rows hold several keys
    keys_of_row, rest = divmod(cache.shape[-1], key.shape[2])
    if cache.shape[-2] % rows_of_tile(cache.dtype) == 0 or (keys_of_row > 1 and rest == 0):
        return _write(new, caches, slots, interpret)
    if len(caches) == 2:
        return tuple(_scatter(x, cache, slots) for x, cache in zip(new, caches, strict=True))
    for plane, x in enumerate(new):
        cache = _scatter(x, cache, slots, (plane,))
    return (cache,)
