"""`attend` runs a call of `flash_varlen` or `blocksparse`: tiles are cut, launched, put together.

Prefill and decode of one batch are two launches of one kernel: sequences of one token in tiles of
one token, the others in long tiles (`tile_sizes.py`). No value is read on the host, and no program
is compiled anew for other lengths.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

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
    refuse,
    to_float8,
)
from torch_paged_attn.backends.tpu.kernels.arguments import Options
from torch_paged_attn.backends.tpu.kernels.kv_pipeline import readable
from torch_paged_attn.backends.tpu.kernels.launch import (
    Modifiers,
    TokenScales,
    attend_tiles,
    attend_tokens,
)
from torch_paged_attn.backends.tpu.kernels.layout_mask import lay_out_tiles, layout_words
from torch_paged_attn.backends.tpu.kernels.softmax import LOG2_E, base_2, base_e
from torch_paged_attn.backends.tpu.pages import Pages
from torch_paged_attn.backends.tpu.tile_sizes import Config, choose_config, plan, reads_tokens
from torch_paged_attn.backends.tpu.tiles import (
    Cut,
    Heads,
    Lengths,
    count_up,
    cut_queries,
    repeat_tiles,
)
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

    config = choose_config(config)
    lengths, first_key = lengths_of(call)
    plan_with = functools.partial(
        plan, call, lengths=lengths, first_key=first_key, interpret=interpret
    )
    pages, launches = plan_with(config)
    can_read = all(reads_tokens(call, pages, options) for options in launches)
    layouts = 1 if call.layout is None else call.layout.num_heads
    if not can_read and (call.attn_bias is not None or layouts > 1):
        # XLA lays a bias out for each row of a tile then, and each layout has tiles of its own
        config = config if call.attn_bias is None else config.with_bias()
        pages, launches = plan_with(config, layouts=layouts)
    q = call.q.astype(compute_dtype_of(call.q.dtype))
    factors = _factors(call, lengths, first_key)
    if can_read:
        out, lse = _attend_tokens(call, q, pages, lengths, factors, launches)
        return _to_storage(out, call.result_dtype, call.out_scale), base_e(lse).T
    q = _filled(q, pages)
    is_short = lengths.query <= launches[0].tile_q

    results = []
    for i, options in enumerate(launches):
        is_whole = i < len(launches) - 1
        cut = cut_queries(
            lengths,
            is_short if is_whole else (~is_short | (len(launches) == 1)),
            total_q,
            tile_q=options.tile_q,
            is_whole=is_whole,
            window=call.window,
            num_cores=config.num_cores,
        )
        results.append(_attend_cut(call, q, pages, cut, factors, options))
    out, lse = results[-1]
    if len(launches) > 1:
        starts = call.cu_seqlens_q[1:]
        of_token = jnp.searchsorted(starts, jnp.arange(total_q), side="right")
        chosen = is_short[jnp.minimum(of_token, batch - 1)][:, None, None]
        out, lse = (jnp.where(chosen, x, y) for x, y in zip(*results, strict=True))
    is_padding = (jnp.arange(total_q) >= call.cu_seqlens_q[-1])[:, None, None]
    out = out[..., : call.head_dim_v]
    out, lse = jnp.where(is_padding, 0, out), jnp.where(is_padding, -jnp.inf, base_e(lse))
    return _to_storage(out, call.result_dtype, call.out_scale), lse[..., 0].T


def _filled(q: Array, pages: Pages) -> Array:
    """Queries as wide as rows of keys that end in numbers of no key."""
    filled = 0 if pages.fold > 1 else pages.widths[0] - q.shape[-1]
    return jnp.pad(q, ((0, 0), (0, 0), (0, filled))) if filled > 0 else q


class Factors(NamedTuple):
    """What scores and outputs are multiplied by, None for 1.

    The first two are (batch * num_kv_heads,): of two dimensions, each row would fill whole lanes of
    the scalar core's memory.
    """

    score_scale: Array | None
    out_factor: Array | None
    token_scales: TokenScales | None


def _factors(call: Call, lengths: Lengths, first_key: Array) -> Factors:
    def per_kv_head(descale: Array | None) -> Array:
        factor = jnp.float32(1.0) if descale is None else descale.astype(jnp.float32)
        return jnp.broadcast_to(factor, (call.batch, call.num_kv_heads)).reshape(-1)

    score_scale = out_factor = None
    # of keys and values, both are by token if one is
    k, v = (None, None) if call.has_token_scales else (call.k_descale, call.v_descale)
    if call.q_descale is not None or k is not None:
        score_scale = per_kv_head(call.q_descale) * per_kv_head(k)
    if v is not None or call.dropout_p > 0.0:
        out_factor = per_kv_head(v) / (1.0 - call.dropout_p)
    return Factors(score_scale, out_factor, _token_scales(call, lengths, first_key))


def _token_scales(call: Call, lengths: Lengths, first_key: Array) -> TokenScales | None:
    """Scales of the keys that the block table has room for, or of packed keys. They are laid out
    anew: in pages as they lie, XLA would have 128 lanes for those of 16 tokens."""
    if not call.has_token_scales:
        return None
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
        return (
            pages.reshape(call.batch, call.num_kv_heads, each, LANES).swapaxes(1, 2).reshape(shape)
        )

    both = jnp.stack([of_keys(x).astype(jnp.float32) for x in given], axis=1)
    return TokenScales(both, start)


def _attend_tokens(
    call: Call,
    q: Array,
    pages: Pages,
    lengths: Lengths,
    factors: Factors,
    launches: list[Options],
) -> tuple[Array, Array]:
    """`out`, and base-2 lse (total_q, num_heads): launches write into the same memory."""
    results, fold = None, pages.fold
    if launches[-1].tile_q > 1:  # loads with strides are of whole registers
        q = _filled(q, pages)
    if fold > 1:
        per_kv_head = Heads(call.num_kv_heads, call.group_size, 1)
        q = q.reshape(call.total_q, call.num_kv_heads, call.group_size, -1)
        q = per_kv_head.folded(q, fold).reshape(call.total_q, call.num_heads * fold, -1)
    for i, options in enumerate(launches):
        if len(launches) > 1:
            least, most = (1, 1) if i == 0 else (2, options.most_queries)
            options = dataclasses.replace(options, least_queries=least, most_queries=most)
        options = dataclasses.replace(options, clears_padding=i == 0)
        heads = Heads(
            call.num_heads // options.group_size,
            options.group_size,
            options.tile_q,
            unit=SUBLANES if fold == 1 else math.gcd(SUBLANES, options.group_size * options.tile_q),
        )
        modifiers, words = _modifiers(call, heads, factors, options, fold), None
        if call.attn_bias is not None:
            bias = readable(call.attn_bias, options.tile_q, options.block_k)
            modifiers = modifiers._replace(bias=bias)
        if call.layout is not None:
            words = layout_words(call.layout, options.block_k)
        bounds = call.cu_seqlens_q.astype(jnp.int32), lengths.key
        results = attend_tokens(q, results, pages, bounds, modifiers, words, options)
    assert results is not None
    out, lse = results
    return out[..., : call.head_dim_v], lse[:, 0, : call.num_heads]


def _modifiers(
    call: Call, heads: Heads, factors: Factors, options: Options, fold: int = 1
) -> Modifiers:
    """All but the bias."""
    slopes, scales = call.alibi_slopes, factors.token_scales
    if scales is not None:  # what a block reads behind the last key
        behind = (0, options.block_k // LANES), *((0, 0),) * 3
        scales = scales._replace(pages=jnp.pad(scales.pages, behind))
    return Modifiers(
        sinks=None if call.sinks is None else heads.of_heads(base_2(call.sinks)),
        slopes=None if slopes is None else heads.of_heads(slopes * LOG2_E, fold),
        score_scale=factors.score_scale,
        out_factor=factors.out_factor,
        bias=None,
        rng=rng_words_of(call.rng_state) if call.dropout_p > 0.0 else None,
        token_scales=scales,
    )


def _attend_cut(
    call: Call, q: Array, pages: Pages, cut: Cut, factors: Factors, options: Options
) -> tuple[Array, Array]:
    """One launch: results of all tokens, of which only those in the cut's tiles count."""
    apart = options.head_splits
    heads = Heads(call.num_heads // options.group_size, options.group_size, options.tile_q)
    tiles, layout = cut.tiles, None
    if call.layout is not None:
        of_parts = call.layout
        if of_parts.num_heads < apart:
            crow, col = (jnp.repeat(x, apart, axis=-2) for x in of_parts[:2])
            of_parts = of_parts._replace(crow=crow, col=col)
        tiles, layout = lay_out_tiles(
            of_parts,
            tiles,
            tile_q=options.tile_q,
            block_k=options.block_k,
            num_cores=options.config.num_cores,
        )
    elif apart > 1:
        is_busy = jnp.repeat(tiles.start < tiles.stop, apart)
        tiles = repeat_tiles(tiles, apart, is_busy, options.config.num_cores)
    queries = heads.of_tokens(q, cut)
    if options.fold > 1:
        queries = heads.folded(queries, options.fold)

    modifiers = _modifiers(call, heads, factors, options, options.fold)
    if call.attn_bias is not None:
        # it hides keys row by row: halves of a step would be masked, too
        options = dataclasses.replace(options, masked_step_k=options.step_k)
        modifiers = modifiers._replace(bias=heads.of_bias(call.attn_bias, cut, options.block_k))
    num_tiles, num_kv_heads, *of_head = queries.shape
    queries = queries.reshape(-1, num_kv_heads // apart, *of_head)
    out, lse = attend_tiles(queries, pages, tiles, modifiers, layout, options)
    out = out.reshape(num_tiles, num_kv_heads, *out.shape[2:])
    lse = lse.reshape(num_tiles, num_kv_heads, -1, 1)
    return heads.to_tokens(out, cut), heads.to_tokens(lse, cut)


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
