"""`attend` runs a call of `flash_varlen` or `blocksparse`: keys are laid out, kernels are launched.

Prefill and decode of one batch are two launches of one kernel: sequences of one token in tiles of
one token, the others in long tiles (`tile_sizes.py`). Heads that do not fit VMEM together have
launches of their own, as have rows of a layout that do not fit the scalar core's memory. No value
is read on the host, and no program is compiled anew for other lengths.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from torch_paged_attn.attention_call import is_by_token
from torch_paged_attn.backends.tpu import BACKEND
from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.dtypes import (
    EIGHT_BITS,
    FLOAT8,
    FLOATS,
    LANES,
    SUBLANES,
    compute_dtype_of,
    numbers_of_word,
    refuse,
    to_float8,
)
from torch_paged_attn.backends.tpu.kernels.arguments import Options
from torch_paged_attn.backends.tpu.kernels.kv_pipeline import readable
from torch_paged_attn.backends.tpu.kernels.launch import attend_heads
from torch_paged_attn.backends.tpu.kernels.layout_mask import split_words
from torch_paged_attn.backends.tpu.kernels.softmax import LOG2_E, base_2, base_e
from torch_paged_attn.backends.tpu.pages import Pages
from torch_paged_attn.backends.tpu.tile_sizes import Config, choose_config, plan
from torch_paged_attn.backends.tpu.tiles import Heads, Lengths, count_up, folded
from torch_paged_attn.ops.lacking import refuse_lacking


def unsupported(call: Call) -> str | None:
    """Why there is no kernel for a valid call: which argument, and what is supported."""
    queries = (*FLOATS, *FLOAT8)
    stored: tuple[str, ...] = (call.q.dtype.name, *EIGHT_BITS)
    if call.q.dtype.name == "float16" and call.block_table is not None:
        stored = (*stored, "int16")  # the bits of float16
    if call.q.dtype.name not in queries:
        return f"q has dtype {call.q.dtype.name}; supported: {', '.join(queries)}"
    if call.k.dtype.name not in stored:
        return f"k has dtype {call.k.dtype.name}; supported: {', '.join(stored)}"
    if call.result_dtype.name not in queries:
        return f"out_dtype is {call.result_dtype.name}; supported: {', '.join(queries)}"
    return None


@functools.partial(jax.jit, static_argnames=("config", "interpret"), inline=True)
def attend(call: Call, *, config: Config | None, interpret: Any) -> tuple[Array, Array]:
    """`out` and `softmax_lse` of a call; NotImplementedError if there is no kernel for it."""
    refuse_lacking(call, "tpu", BACKEND.lacks)
    if (reason := unsupported(call)) is not None:
        refuse(call.op, reason)
    total_q, num_heads, batch = call.total_q, call.num_heads, call.batch
    if total_q == 0 or batch == 0:
        out = jnp.zeros((total_q, num_heads, call.head_dim_v), call.result_dtype)
        return out, jnp.full((num_heads, total_q), -jnp.inf, jnp.float32)

    lengths, first_key = lengths_of(call)
    pages, parts, launches = plan(
        call, choose_config(config), lengths=lengths, first_key=first_key, interpret=interpret
    )
    heads, kv_heads = num_heads // parts, call.num_kv_heads
    q = call.q.astype(compute_dtype_of(call.q.dtype))
    if launches[-1].tile_q > 1:
        # loads with strides are of whole lanes, and of words with the numbers of several heads
        filled = 0 if pages.fold > 1 else pages.widths[0] - q.shape[-1]
        q = jnp.pad(q, ((0, 0), (0, 0), (0, max(filled, 0))))
        if any(heads % numbers_of_word(x) for x in (q.dtype, launches[0].out_dtype)):
            q = q.astype(jnp.float32)
            launches = [dataclasses.replace(x, out_dtype=jnp.dtype(jnp.float32)) for x in launches]
    changed: dict[str, Any] = {"q": q}
    operands = _factors(call) | _token_scales(call, lengths, first_key)
    operands |= {"cu_seqlens": call.cu_seqlens_q.astype(jnp.int32), "key_lens": lengths.key}
    results = []
    for i in range(parts):
        first: dict[str, Any] = {"first_head": i * heads, "first_kv_head": i * kv_heads // parts}
        own = [dataclasses.replace(options, **first) for options in launches]
        part = part_of(dataclasses.replace(call, **changed), i, parts)
        results.append(_attend_part(part, pages, operands, own))
    out, lse = (jnp.concatenate(x, axis=1) for x in zip(*results, strict=True))
    out = _to_storage(out[..., : call.head_dim_v], call.result_dtype, call.out_scale)
    return out, base_e(lse).T


def part_of(call: Call, part: int, parts: int) -> Call:
    """The call of some heads; pages have those of all."""

    def heads_of(x: Array | None, axis: int) -> Array | None:
        # of each query head, of each KV head, or of all
        if x is None or x.shape[axis] == 1 or parts == 1:
            return x
        first, count = part * x.shape[axis] // parts, max(1, x.shape[axis] // parts)
        return lax.slice_in_dim(x, first, first + count, axis=axis % x.ndim)

    axes = {"q": 1, "sinks": 0, "alibi_slopes": -1, "attn_bias": 0}
    axes |= {"crow_indices": -2, "col_indices": -2}
    if call.block_table is None:
        axes |= {"k": 1, "v": 1}
    of_part: dict[str, Any] = {
        name: heads_of(getattr(call, name), axis) for name, axis in axes.items()
    }
    return dataclasses.replace(call, **of_part)


def _factors(call: Call) -> dict[str, Array]:
    """What scores and outputs are multiplied by, (batch * num_kv_heads,): of two dimensions, each
    row would fill whole lanes of the scalar core's memory.
    """

    def per_kv_head(descale: Array | None) -> Array:
        factor = jnp.float32(1.0) if descale is None else descale.astype(jnp.float32)
        return jnp.broadcast_to(factor, (call.batch, call.num_kv_heads)).reshape(-1)

    factors = {}
    # of keys and values, both are by token if one is
    k, v = (None, None) if call.has_token_scales else (call.k_descale, call.v_descale)
    if call.q_descale is not None or k is not None:
        factors["score_scale"] = per_kv_head(call.q_descale) * per_kv_head(k)
    if v is not None or call.dropout_p > 0.0:
        factors["out_factor"] = per_kv_head(v) / (1.0 - call.dropout_p)
    return factors


def _token_scales(call: Call, lengths: Lengths, first_key: Array) -> dict[str, Array]:
    """Scales of the keys that the block table has room for, or of packed keys. They are laid out
    anew: in pages as they lie, XLA would have 128 lanes for those of 16 tokens."""
    if not call.has_token_scales:
        return {}
    given = call.k_descale, call.v_descale
    if (table := call.block_table) is None:
        bound = (call.k.shape[0] + call.batch * (LANES - 1)) // LANES
        counts = -(-lengths.key // LANES)
        sequence, rank = count_up(counts, max(bound, 1))
        sequence = jnp.minimum(sequence, call.batch - 1)
        start = (jnp.cumsum(counts) - counts).astype(jnp.int32)
        row = first_key[sequence, None] + rank[:, None] * LANES + jnp.arange(LANES)
    else:
        page_size = call.k.shape[-2] * call.keys_of_row
        room = table.shape[1] * page_size
        each = -(-room // LANES)
        sequence = jnp.repeat(jnp.arange(call.batch), each)
        start = jnp.arange(call.batch, dtype=jnp.int32) * each

    def of_keys(descale: Array | None) -> Array:
        """(pages of LANES keys, num_kv_heads, LANES)"""
        shape = len(sequence), call.num_kv_heads, LANES
        if descale is None:
            return jnp.ones(shape, jnp.float32)
        if not is_by_token(descale, call.batch):
            heads = jnp.broadcast_to(descale, (call.batch, call.num_kv_heads))
            return jnp.broadcast_to(heads[sequence, :, None], shape)
        if table is None:
            return descale[jnp.minimum(row, descale.shape[0] - 1)].swapaxes(1, 2)
        pages = descale[jnp.clip(table, 0, descale.shape[0] - 1)].swapaxes(1, 2)
        pages = pages.reshape(call.batch, call.num_kv_heads, room)
        pages = jnp.pad(pages, ((0, 0), (0, 0), (0, each * LANES - room)))
        pages = pages.reshape(call.batch, call.num_kv_heads, each, LANES)
        return pages.swapaxes(1, 2).reshape(shape)

    both = jnp.stack([of_keys(x).astype(jnp.float32) for x in given], axis=1)
    return {"token_scales": both, "scale_start": start}


def _attend_part(
    call: Call, pages: Pages, operands: dict[str, Array], launches: list[Options]
) -> tuple[Array, Array]:
    """`out`, and base-2 lse (total_q, num_heads): launches write into the same memory."""
    results, fold, q = None, pages.fold, call.q
    total_q, num_heads, width = q.shape
    if fold > 1:
        q = q.reshape(total_q, -1, launches[0].group_size, width)
        q = folded(q, fold).reshape(total_q, num_heads * fold, -1)
    for i, options in enumerate(launches):
        if len(launches) > 1:
            least, most = (1, 1) if i == 0 else (2, options.most_queries)
            options = dataclasses.replace(options, least_queries=least, most_queries=most)
        layouts: list[Any] = [(options.layout_rows, None)]
        if call.layout is not None:
            layouts = split_words(call.layout, options, total_q, call.batch, pages.table.size)
        own = operands | _of_heads(call, options)
        if "token_scales" in own:  # what a block reads behind the last key
            behind = (0, options.block_k // LANES), *((0, 0),) * 3
            own["token_scales"] = jnp.pad(own["token_scales"], behind)
        for rows, words in layouts:
            options = dataclasses.replace(options, layout_rows=rows, clears_padding=results is None)
            results = attend_heads(q, results, pages, own, words, options)
    assert results is not None
    out, lse = results
    return out, lse[:, 0, :num_heads]


def _of_heads(call: Call, options: Options) -> dict[str, Array]:
    """What changes the scores of heads."""
    fold = options.fold
    found: dict[str, Array] = {}
    num_heads, unit = call.num_heads // options.group_size, SUBLANES // math.gcd(SUBLANES, fold)
    heads = Heads(num_heads, options.group_size, options.tile_q, unit)
    if call.sinks is not None:
        found["sinks"] = heads.of_heads(base_2(call.sinks))
    if (slopes := call.alibi_slopes) is not None:
        slopes = slopes.astype(jnp.float32) * LOG2_E
        is_shared = slopes.ndim == 1
        found["slopes"] = heads.of_heads(slopes, fold) if is_shared else slopes.reshape(-1)
    if call.attn_bias is not None:
        found["bias"] = readable(call.attn_bias, options.tile_q, options.block_k)
    if call.dropout_p > 0.0:
        found["rng"] = rng_words_of(call.rng_state)
    return found


def lengths_of(call: Call) -> tuple[Lengths, Array]:
    """Lengths, and where packed keys start."""
    bounds = call.cu_seqlens_q
    starts = bounds if call.cu_seqlens_k is None else call.cu_seqlens_k
    key = starts[1:] - starts[:-1] if call.seqused_k is None else call.seqused_k
    lengths = Lengths(bounds[:-1], bounds[1:] - bounds[:-1], key)
    return jax.tree.map(lambda x: x.astype(jnp.int32), (lengths, starts[:-1]))


def rng_words_of(rng_state: Array) -> Array:
    """Seed's low word, its high word and the offset as int32, from the op's `(2,)` integers.

    JAX has no 64-bit integers unless asked to: three words are taken as they are.
    """
    if rng_state.shape == (3,):
        return lax.bitcast_convert_type(rng_state.astype(jnp.uint32), jnp.int32)
    bits = rng_state.dtype.itemsize * 8
    high = rng_state[0] >> 32 if bits == 64 else jnp.minimum(rng_state[0], 0)
    return jnp.stack([rng_state[0], high, rng_state[1]]).astype(jnp.int32)


def _to_storage(x: Array, dtype: Any, scale: Array | None) -> Array:
    """Divide by the scale, round to nearest even; 8-bit formats saturate."""
    if scale is not None:
        x = x / scale.astype(jnp.float32)
    return to_float8(x, dtype) if dtype.name in FLOAT8 else x.astype(dtype)
