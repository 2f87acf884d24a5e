"""`attend_backward` computes the gradients of a call of `flash_varlen` with packed keys.

Two launches, one for queries and one for keys and values, on the tiles that the forward cuts: no
sum is added up by two programs, so the same call gives the same bits.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from torch_paged_attn.backends.tpu.attention import (
    FLOATS,
    SHORT,
    Heads,
    choose_options,
    compute_dtype_of,
    lengths_of,
    rng_words_of,
)
from torch_paged_attn.backends.tpu.call import Call
from torch_paged_attn.backends.tpu.config import LANES, Config, choose_config
from torch_paged_attn.backends.tpu.kernel_arguments import Options
from torch_paged_attn.backends.tpu.launch_gradients import Operands, key_gradients, query_gradients
from torch_paged_attn.backends.tpu.refusal import refuse
from torch_paged_attn.backends.tpu.softmax import LOG2_E, base_2
from torch_paged_attn.backends.tpu.tiles import Cut, cut_keys, cut_queries
from torch_paged_attn.backward_call import GRADIENTS

# the tensors that have gradients, in the order of `Needs` and `Gradients`
WITH_GRADIENT = tuple(GRADIENTS.values())
Needs = tuple[bool, bool, bool, bool, bool]

# query rows of a tile: with more, too much of the diagonal's tiles is computed for nothing
MOST_TILE_ROWS = 512


class Gradients(NamedTuple):
    """Of a call's tensors; None is what was not asked for."""

    dq: Array | None
    dk: Array | None
    dv: Array | None
    dbias: Array | None
    dsinks: Array | None


def unsupported_backward(call: Call) -> str | None:
    """Why there are no gradients of a call with a forward: the argument, and what is allowed."""
    if call.op != "flash_varlen":
        return f"{call.op} has no backward on TPUs; supported: flash_varlen"
    if call.block_table is not None:
        return "block_table came, and there is no backward for paged keys; allowed: packed k and v"
    if (dtype := call.q.dtype.name) not in FLOATS:
        return f"q has dtype {dtype}, which has no backward; allowed: {', '.join(FLOATS)}"
    for name, dtype in (("k", call.k.dtype.name), ("out_dtype", call.result_dtype.name)):
        if dtype != call.q.dtype.name:
            return f"{name} is {dtype}; allowed: {call.q.dtype.name}, as q"
    return None


@functools.partial(jax.jit, static_argnames=("needs", "config", "interpret"), inline=True)
def attend_backward(
    call: Call,
    dout: Array,
    dlse: Array | None,
    out: Array,
    softmax_lse: Array,
    *,
    needs: Needs,
    config: Config | None,
    interpret: Any,
) -> Gradients:
    """Gradients of q, k, v, attn_bias and sinks, as far as `needs` asks for them.

    `out` (total_q, num_heads, head_dim_v) and `softmax_lse` (num_heads, total_q) may be those of
    more keys than the call has.
    """
    if (reason := unsupported_backward(call)) is not None:
        refuse(f"{call.op}_backward", reason)
    needs_q, needs_k, needs_v, needs_bias, needs_sinks = needs
    needs_bias = needs_bias and call.attn_bias is not None and call.attn_bias.dtype != jnp.bool_
    total_q, total_k, batch = call.total_q, call.k.shape[0], call.batch
    # of rows that see no key all gradients are 0, whatever stands there
    is_live = ~jnp.isneginf(softmax_lse.T)
    is_live &= (jnp.arange(total_q) < call.cu_seqlens_q[-1])[:, None]
    delta = jnp.sum(dout.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    delta = jnp.where(is_live, delta if dlse is None else delta - dlse.T, 0.0)
    lse = jnp.where(is_live, base_2(softmax_lse.T), jnp.inf)
    dsinks = None
    if needs_sinks and call.sinks is not None:
        dsinks = -jnp.sum(jnp.exp2(base_2(call.sinks) - lse) * delta, axis=0)
    if 0 in (total_q, total_k, batch):
        inputs = (call.q, call.k, call.v, call.attn_bias if needs_bias else None)
        dq, dk, dv, dbias = (None if x is None else jnp.zeros_like(x) for x in inputs)
        return Gradients(dq, dk, dv, dbias, dsinks)

    options = _choose_options(call, config, interpret)
    num_cores, dtype = options.config.num_cores, options.compute_dtype
    lengths, first_key = lengths_of(call)
    sizes: dict[str, Any] = {"tile_q": options.tile_q, "window": options.window}
    sizes["num_cores"] = num_cores
    every = jnp.ones(batch, bool)
    cut = cut_queries(lengths, every, total_q, is_whole=False, **sizes)
    key_cut = cut_keys(lengths, first_key, total_k, tile_k=options.block_k, **sizes)
    heads = Heads(call.num_kv_heads, call.group_size, options.tile_q, LANES)

    def queries(x: Array) -> Array:
        return heads.of_tokens(jnp.where(is_live[..., None], x, 0).astype(dtype), cut, 0.0)

    def keys(x: Array) -> Array:
        return x.astype(dtype)[key_cut.token].swapaxes(1, 2)

    def to_keys(x: Array, like: Array) -> Array:
        x = x.swapaxes(1, 2).reshape(-1, *like.shape[1:])
        x = x[key_cut.tile_of * options.block_k + key_cut.place_of]
        return jnp.where(key_cut.is_key[:, None, None], x, 0).astype(like.dtype)

    statistics = (
        heads.of_tokens(lse[..., None], cut, jnp.inf),
        heads.of_tokens(delta[..., None], cut, 0.0),
    )
    operands = Operands(
        q=queries(call.q),
        dout=queries(dout),
        statistics=jnp.concatenate([x[..., 0] for x in statistics], axis=1),
        k=keys(call.k),
        v=keys(call.v),
        bias=None
        if call.attn_bias is None
        else heads.of_bias(call.attn_bias, cut, options.block_k),
        slopes=None if call.alibi_slopes is None else heads.of_heads(call.alibi_slopes * LOG2_E),
        rng=rng_words_of(call.rng_state) if call.dropout_p > 0.0 else None,
    )
    dq = dk = dv = dbias = None
    if needs_q or needs_bias:
        of_sequence = -(-lengths.key // options.block_k)
        first_key_tile = (jnp.cumsum(of_sequence) - of_sequence).astype(jnp.int32)
        dq, dbias = query_gradients(
            operands, cut.tiles, first_key_tile, options, needs_bias=needs_bias
        )
        dq = jnp.where(is_live[..., None], heads.to_tokens(dq, cut), 0).astype(call.q.dtype)
    if dbias is not None:
        dbias = _of_bias(dbias, call, heads, cut)
    if needs_k or needs_v:
        dk, dv = key_gradients(operands, cut.tiles, key_cut.tiles, options)
        dk = to_keys(dk, call.k) if needs_k else None
        dv = to_keys(dv, call.v) if needs_v else None
    return Gradients(dq if needs_q else None, dk, dv, dbias, dsinks)


def wanted_gradients(*args: Any, **options: Any) -> Any:
    """Of `attend_backward`, those that there are; a lone one is no tuple."""
    found = tuple(x for x in attend_backward(*args, **options) if x is not None)
    return found if len(found) > 1 else found[0]


def _of_bias(dbias: Array, call: Call, heads: Heads, cut: Cut) -> Array:
    """(num_tiles, 1 or num_kv_heads, rows, keys) as (1 or num_heads, total_q, keys)."""
    num_heads, _, keys = call.attn_bias.shape
    dbias = dataclasses.replace(heads, num_kv_heads=dbias.shape[1]).to_tokens(dbias, cut)
    if num_heads == 1:
        dbias = jnp.sum(dbias, axis=1, keepdims=True)
    is_live = jnp.arange(call.total_q) < call.cu_seqlens_q[-1]
    dbias = jnp.where(is_live[:, None, None], dbias, 0.0)
    return dbias.swapaxes(0, 1)[..., :keys].astype(call.attn_bias.dtype)


def _choose_options(call: Call, config: Config | None, interpret: Any) -> Options:
    """What both kernels are compiled for."""
    config = choose_config(config)
    if call.attn_bias is not None:
        config = config.with_bias()
    longest = call.max_seqlen_q or call.total_q
    longest_k = longest if call.cu_seqlens_k is None else call.k.shape[0]
    block_k = min(config.block_k, max(LANES, _power_of_two(longest_k)))
    tile_rows = min(config.tile_rows, MOST_TILE_ROWS)
    # a block is computed on for so long that one copy ahead of it is in time
    config = dataclasses.replace(
        config,
        tile_rows=tile_rows,
        block_k=block_k,
        step_k=min(config.step_k, block_k),
        num_buffers=2,
    )
    widths = call.head_dim, call.head_dim_v
    config = config.fit_backward(call.num_kv_heads, widths, compute_dtype_of(call).itemsize)
    most = max(1, config.tile_rows // call.group_size)
    tile_q = max(2 * SHORT, min(1 << (most.bit_length() - 1), _power_of_two(longest)))
    return choose_options(call, config, LANES, tile_q, interpret)


def _power_of_two(count: int) -> int:
    """The least one that is not below the count."""
    return 1 << max(count - 1, 0).bit_length()
